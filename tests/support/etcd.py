"""Real etcd: one member or several, on loopback, started and killed as a test needs.

    with serve_etcd() as etcd:                  # one member
        client = store.connect(etcd.url)

    with serve_etcd(members=3) as etcd:
        etcd.leader().kill()

No member outlives the block. Data lies in memory if the system offers that: the tests are about the consensus, not the
disk.
"""

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import free_port, require

READY_WITHIN = 30.0  # seconds; an idle machine takes one


class Member:
    """One etcd process.

    Attributes:
        client_port: Where clients reach it.
        peer_port: Where it listens for the other members.
    """

    def __init__(
        self, name: str, folder: Path, *, options: Sequence[str], scheme: str, tls: ssl.SSLContext | None
    ) -> None:
        self.name = name
        self.client_port, self.peer_port = free_port(), free_port()
        self.advertised_peer_port = self.peer_port
        self.cluster = ""  # all members and where they listen, as etcd wants it
        self._folder = folder
        self._options = options
        self._scheme = scheme
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of its HTTP endpoint."""
        return f"{self._scheme}://127.0.0.1:{self.client_port}"

    def start(self) -> None:
        """Start it, again perhaps, with the data it had."""
        peer = f"http://127.0.0.1:{self.peer_port}"
        with open(self._folder / f"{self.name}.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    require_etcd(),
                    *("--name", self.name, "--data-dir", str(self._folder / self.name)),
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", peer),
                    *("--initial-advertise-peer-urls", f"http://127.0.0.1:{self.advertised_peer_port}"),
                    *("--initial-cluster", self.cluster, "--log-level", "error"),
                    *self._options,
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """SIGSTOP: it holds its connections, and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """Delete all its data, while it does not run."""
        shutil.rmtree(self._folder / self.name)

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if it was started and not killed since."""
        return self._process is not None

    def get(self, path: str, *, timeout: float = 2.0) -> bytes:
        """Read something over HTTP: `/health`, `/metrics`."""
        with urllib.request.urlopen(self.url + path, timeout=timeout, context=self._tls) as response:
            content: bytes = response.read()
            return content

    def ask(self, path: str, *, as_user: str = "", **body: Any) -> dict[str, Any]:
        """Send a request to its gateway, beside the client under test. A user's password equals the user's name."""
        shown = (
            {"Authorization": self.ask("auth/authenticate", name=as_user, password=as_user)["token"]} if as_user else {}
        )
        request = urllib.request.Request(f"{self.url}/v3/{path}", data=json.dumps(body).encode(), headers=shown)
        with urllib.request.urlopen(request, timeout=10, context=self._tls) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def log(self) -> str:
        """Return its log so far."""
        return (self._folder / f"{self.name}.log").read_text(errors="replace")


class Etcd:
    """A cluster.

    Attributes:
        members: All of them, running or not.
        url: As `store.connect` takes it, with all members.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        secure = members[0].url.startswith("https")
        hosts = ",".join(f"127.0.0.1:{member.client_port}" for member in members)
        self.url = f"{'etcds' if secure else 'etcd'}://{hosts}"

    def wait_until_ready(self) -> None:
        """Wait until every member that runs can write."""
        deadline = time.monotonic() + READY_WITHIN
        for member in self.members:
            while member.running and not self._healthy(member):
                if time.monotonic() > deadline:
                    raise AssertionError(
                        f"{member.name} is not ready within {READY_WITHIN:g} s: {member.log()[-2000:]}"
                    )
                time.sleep(0.05)  # nothing announces that it is ready

    def wait_until_ready_to_listen(self) -> None:
        """Wait until the first member answers a request. A member with users shows no health without a login."""
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.members[0].client_port), timeout=1).close()
                return
            time.sleep(0.05)  # nothing announces that it listens
        raise AssertionError(f"it does not listen: {self.members[0].log()[-999:]}")

    def _healthy(self, member: Member) -> bool:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            return str(json.loads(member.get("/health"))["health"]) == "true"
        return False

    def leader(self) -> Member:
        """The member that leads now."""
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline:
            for member in self.members:
                if member.running:
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        status = member.ask("maintenance/status")
                        if status.get("leader") == status["header"]["member_id"]:
                            return member
            time.sleep(0.05)
        raise AssertionError("nobody leads")

    def followers(self) -> list[Member]:
        """The running members that do not lead."""
        leader = self.leader()
        return [member for member in self.members if member.running and member is not leader]

    def compact(self, revision: int) -> None:
        """Forget the history up to a revision."""
        self.members[0].ask("kv/compaction", revision=str(revision), physical=True)

    def metrics(self) -> dict[str, float]:
        """Every counter of every running member, added up by its name and labels."""
        total: dict[str, float] = {}
        for member in self.members:
            if member.running:
                for line in member.get("/metrics").decode().splitlines():
                    if not line.startswith("#"):
                        name, _, value = line.rpartition(" ")
                        total[name] = total.get(name, 0.0) + float(value)
        return total


def require_etcd() -> str:
    """The path of etcd; without it, the test is skipped, or fails where everything must be there.

    `RDZV_TEST_ETCD` names another release's binary.
    """
    return os.environ.get("RDZV_TEST_ETCD") or require("etcd")


@contextlib.contextmanager
def serve_etcd(
    members: int = 1,
    *,
    options: Sequence[str] = (),
    scheme: str = "http",
    tls: ssl.SSLContext | None = None,
    advertised: Sequence[int] = (),
    listening: Callable[[list[int]], None] = lambda _: None,
) -> Iterator[Etcd]:
    """Run a cluster for as long as the context lasts; it is ready to be asked.

    Args:
        members: How many.
        options: More of etcd's options, for each.
        scheme: Of the clients' side; members speak plain HTTP with each other.
        tls: How to reach it, if that is "https".
        advertised: Ports that the members tell each other to be reached at, where something stands in between.
        listening: Is told, before they start, where the members listen for each other.
    """
    require_etcd()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="rdzv-etcd-", dir=memory) as folder, contextlib.ExitStack() as stack:
        etcd = Etcd(
            [Member(f"m{number}", Path(folder), options=options, scheme=scheme, tls=tls) for number in range(members)]
        )
        listening([member.peer_port for member in etcd.members])
        for member, port in zip(etcd.members, advertised, strict=False):
            member.advertised_peer_port = port
        cluster = ",".join(f"{it.name}=http://127.0.0.1:{it.advertised_peer_port}" for it in etcd.members)
        for member in etcd.members:
            member.cluster = cluster
            stack.callback(member.kill)
            member.start()
        etcd.wait_until_ready()
        yield etcd


def encoded(text: str) -> str:
    """Text as the gateway has it."""
    return base64.b64encode(text.encode()).decode()
