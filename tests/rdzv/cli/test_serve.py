"""`rdzv serve` as a real process: its ready message, its shutdown, its limits, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import sqlite3
import ssl
from typing import TYPE_CHECKING, Any

import pytest

import store
from rdzv.cli import main as cli
from rdzv.cli import serve
from rdzv.cli.command import WRONG_USAGE
from store.errors import AuthenticationError, ConnectionLost, LimitExceeded
from store.messages import Get, Put, Watch
from store.protocol.wire import Bye
from tests.support.processes import Child, free_port, require, start_python
from tests.support.stores import Peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import trustme

pytestmark = pytest.mark.some_here(3)

MIB = 1024 * 1024


@contextlib.asynccontextmanager
async def serving(*arguments: str, **env: str) -> AsyncIterator[tuple[Child, int]]:
    """Yield a server that is ready, and its port."""
    async with start_python("-m", "rdzv", "serve", "--port", "0", *arguments, env=env) as child:
        line = await child.says("serves the store at" if "--hosts" in arguments else "listens on")
        yield child, int(line.partition(",")[0].rpartition(":")[2])


def one_of_hosts() -> tuple[str, str]:
    return "--hosts", f"127.0.0.1,127.0.0.2:{free_port()}"


@pytest.mark.parametrize(
    ("arguments", "everywhere"), [([], False), (["--insecure"], True), (["--insecure", "--host", "127.0.0.1"], False)]
)
async def test_it_listens_on_all_addresses_only_with_a_token_tls_or_insecure(
    arguments: list[str], everywhere: bool
) -> None:
    async with serving(*arguments) as (child, port):
        assert (f"listens on *:{port}" in await child.says("listens on")) is everywhere
        families = [socket.AF_INET]
        if socket.has_ipv6 and "--host" not in arguments:
            families.append(socket.AF_INET6)
        for family in families:
            loopback = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}[family]
            with socket.socket(family) as sock:
                sock.connect((loopback, port))
        with socket.socket() as sock:  # all of 127/8 is this machine, so this shows whether it listens on every address
            assert (sock.connect_ex(("127.0.0.77", port)) == 0) is everywhere


async def a_peer(port: int) -> Peer:
    _, peer = await asyncio.get_running_loop().create_connection(Peer, "127.0.0.1", port)
    await peer.until(lambda: peer.connection.welcomed)
    return peer


# ----------------------------------------------------------------------------------------------------------- readiness


async def test_the_port_is_in_the_file_by_the_time_it_says_ready(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        arguments = ("--port-file", str(tmp_path / "port"))
        async with serving(*arguments, NOTIFY_SOCKET=str(tmp_path / "notify")) as (child, port):
            assert await received(manager) == b"READY=1"
            assert (tmp_path / "port").read_text() == f"{port}\n"
            async with store.connect(f"tcp://127.0.0.1:{port}") as client:
                assert await client.put("a", b"") > 0
            child.interrupt()
            assert await received(manager) == b"STOPPING=1"
            assert await child.wait() == 0


async def received(manager: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(manager, 1024), 10)


@pytest.mark.parametrize("among", [tuple, one_of_hosts])
async def test_a_service_manager_may_have_an_abstract_name_and_a_watchdog(among: Any) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")  # Linux chooses an abstract address
        manager.setblocking(False)
        name = f"@{manager.getsockname()[1:].decode()}"
        async with serving(*among(), NOTIFY_SOCKET=name, WATCHDOG_USEC="400000"):
            while not (await received(manager)).startswith(b"READY=1"):
                pass  # a start may take longer than the watchdog's time
            for _ in range(2):
                assert await received(manager) == b"WATCHDOG=1"


async def test_it_serves_also_without_its_service_manager(tmp_path: Path) -> None:
    async with serving(NOTIFY_SOCKET=str(tmp_path / "nobody")) as (child, port):
        await child.says("cannot be told READY=1")
        async with store.connect(f"tcp://127.0.0.1:{port}") as client:
            assert await client.put("a", b"") > 0


# ------------------------------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("reads", [True, False])
async def test_sigterm_tells_the_clients_and_a_second_one_ends_it_at_once(tmp_path: Path, reads: bool) -> None:
    async with serving("--data-dir", str(tmp_path)) as (child, port):
        watcher, deaf = [await a_peer(port) for _ in range(2)]
        watcher.ask(Watch(prefix=""))
        await watcher.until(lambda: watcher.said)
        deaf.ask(Put("large", bytes(8 * MIB)))
        await deaf.until(deaf.replies)
        if not reads:
            deaf.transport.pause_reading()
        deaf.ask(*[Get("large")] * 8)
        async with store.connect(f"tcp://127.0.0.1:{port}") as client:
            while not reads and (await client.stats())["outbox_bytes"] == 0:
                await client.ping()
        child.terminate()
        await child.says("leaving")
        if not reads:
            await asyncio.sleep(1.1)  # within a second, the two count as one signal
            assert child.returncode is None, "a client does not read, and the server waits for a while"
            child.terminate()
        assert await child.wait() == (0 if reads else 1)
        if reads:
            await watcher.lost.wait()
            assert watcher.said[-1] == Bye("the server is leaving")
        deaf.transport.abort()


async def test_a_server_that_finds_its_data_damaged_exits(tmp_path: Path) -> None:
    """On a full disk it goes back to the state on disk. If that is damaged, it must exit, not refuse every request."""
    import resource

    async with serving("--data-dir", str(tmp_path)) as (child, port):
        async with store.connect(f"tcp://127.0.0.1:{port}", timeout=1.0) as client:
            await client.put("a", b"1")
            with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite3", isolation_level=None)) as database:
                database.execute("UPDATE entries SET value = 'another'")
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            with pytest.raises(ConnectionLost):
                await client.put("large", bytes(MIB))
        assert await child.wait() == WRONG_USAGE
        await child.says("restore it from a backup")


async def test_the_one_of_several_hosts_that_serves_takes_any_free_port_for_http() -> None:
    """Regression: `--http-port 0` was ignored beside `--hosts`."""
    require("aiohttp")
    hosts = f"127.0.0.1,127.0.0.2:{free_port()}"
    async with start_python("-m", "rdzv", "-v", "serve", "--hosts", hosts, "--http-port", "0") as child:
        await child.says("are shown at http://127.0.0.1:")


@pytest.mark.parametrize("url", ["tcps://localhost/any", "tcps://a,b:1/any"])
def test_one_file_may_contain_the_certificate_and_its_key(url: str) -> None:
    """Regression: beside `--hosts` it was refused."""
    options = cli.parser_of(cli.command_named("serve")).parse_args(["--cert", "both.pem"])
    settings = serve._settings_of_options(url, options)
    assert (settings.cert, settings.key) == ("both.pem", "both.pem")


# -------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    "words",
    [
        ("--limit", "value_bytes_max=10", "--limit", "lease_ttl_max=2.5"),
        ("--value-bytes-max", "10", "--lease-ttl-max=2.5"),
    ],
    ids=["limit", "a flag of its own"],
)
async def test_a_limit_on_the_command_line_is_the_servers(words: tuple[str, ...]) -> None:
    async with serving(*words) as (_, port), store.connect(f"tcp://127.0.0.1:{port}") as client:
        with pytest.raises(LimitExceeded, match="value_bytes_max is 10"):
            await client.put("a", bytes(11))
        with pytest.raises(LimitExceeded, match=r"lease_ttl_max is 2\.5"):
            await client.grant(3.0)


def test_the_help_gives_the_name_and_default_of_every_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    help = " ".join(capsys.readouterr().out.split())
    for limit in dataclasses.fields(store.Limits):
        assert f"{limit.name}={limit.default}" in help


@pytest.mark.parametrize(
    ("arguments", "env", "complaint"),
    [
        (["--limit", "keys_max=0"], {}, "the limit keys_max is 0; it must be above 0"),
        (["--limit", "session_ttl=nan"], {}, "--limit='session_ttl:nan' must be names of limits with numbers"),
        (["--limit", "keys_max"], {}, "write for example --limit=keys_max=100000"),
        (["--limit", "key_max=7"], {}, "there is no limit 'key_max' (did you mean keys_max?)"),
        (["--limit", "keys_max=5", "--limit", "keys_max=6"], {}, "'keys_max' is there twice"),
        (["--limit", "frame_bytes_max=5000"], {}, "frame_bytes_max (5000)"),
        (["--key", "k.pem"], {}, "key='k.pem'"),
        (["--ca", "k.pem"], {}, "--ca needs --cert"),
        (["--hosts", "a,b", "--port-file", "port"], {}, "--port-file is for one host"),
        (["--cert", "/nowhere.pem"], {}, "they must be readable PEM files"),
        (["--token-file", "/nowhere"], {}, "token_file='/nowhere' cannot be read"),
        (["--host", "0.0.0.0"], {}, "would accept every client"),
        (["--data-dir", "/dev/null"], {}, "data_dir /dev/null cannot be used"),
        (["--data-dir", ""], {}, "data_dir is empty; name a directory"),
        ([], {"RDZV_TOKEN": ""}, "RDZV_TOKEN"),
        ([], {"RDZV_TOKEN_FILE": "/nowhere"}, "token_file='/nowhere' cannot be read"),
        ([], {"RDZV_TOKEN": "a", "RDZV_TOKEN_FILE": "b"}, "are both given"),
    ],
)
def test_invalid_settings_are_reported_in_one_line(
    arguments: list[str],
    env: dict[str, str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["serve", "--port", "0", *arguments]) == WRONG_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rdzv serve: ")
    assert complaint in line


@pytest.mark.parametrize("by", ["RDZV_TOKEN", "RDZV_TOKEN_FILE", "--token-file"])
async def test_the_token_comes_from_a_file_or_from_the_environment(by: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("swordfish with chips\n")
    path = str(tmp_path / "token")
    arguments = (by, path) if by.startswith("--") else ()
    env = {} if arguments else {by: path if by.endswith("FILE") else "swordfish with chips"}
    async with serving(*arguments, **env) as (_, port):
        async with store.connect(f"tcp://127.0.0.1:{port}", token="swordfish with chips") as client:
            await client.ping()
        with pytest.raises(AuthenticationError):
            await store.connect(f"tcp://127.0.0.1:{port}", timeout=30).__aenter__()


# ----------------------------------------------------------------------------------------------------------------- TLS


class Files:
    """A certificate authority, and the files of a server that it has certified."""

    def __init__(self, directory: Path) -> None:
        require("trustme")
        import trustme

        self.authority = trustme.CA()
        self.cert, self.key, self.ca = (directory / name for name in ("cert.pem", "key.pem", "ca.pem"))
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.certify()

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--cert", str(self.cert), "--key", str(self.key))

    @property
    def mutual(self) -> tuple[str, ...]:
        return (*self.arguments, "--ca", str(self.ca))

    def certify(self, *names: str, **options: Any) -> None:
        issued = self.authority.issue_cert(*(names or ("127.0.0.1",)), **options)
        issued.private_key_pem.write_to_path(str(self.key))
        issued.cert_chain_pems[0].write_to_path(str(self.cert))

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context

    def client(self, *, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if certificate is not None:
            certificate.configure_cert(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def shown(port: int, context: ssl.SSLContext) -> str:
    """Return the serial number of the server's certificate."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return str(certificate["serialNumber"])


async def test_after_sighup_new_connections_get_the_new_certificate(files: Files) -> None:
    async with serving(*files.arguments) as (child, port):
        url = f"tcps://127.0.0.1:{port}"
        async with store.connect(url, tls=files.client()) as client:
            first = await shown(port, files.client())
            files.certify()
            assert await shown(port, files.client()) == first
            child._signal(signal.SIGHUP)
            await child.says("was read again")
            second = await shown(port, files.client())
            assert second != first
            files.key.write_text("no key")
            child._signal(signal.SIGHUP)
            await child.says("stays as it was")
            assert await shown(port, files.client()) == second
            assert client.connected, "connected clients stay"
            await client.ping()


async def test_after_sighup_clients_of_a_new_authority_are_accepted(files: Files, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Files(tmp_path / "other")
    async with serving(*files.mutual) as (child, port):
        tls = files.client(certificate=other.authority.issue_cert("client"))
        with pytest.raises(ConnectionLost):
            async with store.connect(f"tcps://127.0.0.1:{port}", tls=tls, timeout=0.5):
                raise AssertionError("it was let in")
        files.ca.write_text(files.ca.read_text() + other.ca.read_text())
        child._signal(signal.SIGHUP)
        await child.says("was read again")
        async with store.connect(f"tcps://127.0.0.1:{port}", tls=tls) as client:
            assert await client.put("a", b"") > 0


@pytest.mark.parametrize("among", [tuple, one_of_hosts])
async def test_after_sighup_new_connections_prove_the_new_token(tmp_path: Path, among: Any) -> None:
    """Regression: the server kept the token of its start, and members that had read the new one did not come back."""
    file = tmp_path / "token"
    old, new = "the first token, of many bytes", "the second token, of many bytes"
    file.write_text(old)
    async with serving("--token-file", str(file), *among()) as (child, port):
        url = f"tcp://127.0.0.1:{port}"
        async with store.connect(url, token=old) as client:
            for content, said in (("", "stays as it was"), (new, "the token was read again")):
                file.write_text(content)
                child._signal(signal.SIGHUP)
                await child.says(said)
            assert client.connected, "connected clients stay"
            with pytest.raises(store.AuthenticationError):
                async with store.connect(url, token=old):
                    raise AssertionError("the old token was accepted")
            async with store.connect(url, token=new) as other:
                await other.put("a", b"")


async def test_sighup_without_a_certificate_changes_nothing() -> None:
    async with serving() as (child, port):
        child._signal(signal.SIGHUP)
        await child.says("no certificate to read again")
        async with store.connect(f"tcp://127.0.0.1:{port}") as client:
            assert await client.put("a", b"") > 0
