"""The embedded store in its own process (`host=process`), for programs that hold the GIL for long.

The node binds the port, and executes this interpreter: a fork would copy the locks of threads, and `multiprocessing`
would run the user's script again. Node and store process exchange lines of JSON over a socket pair, since secrets must
not be in arguments or in the environment. The store's process ends when the node's end of the pair is closed. As a
forked child of a killed node may keep that end open, the store's process also polls its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO
from urllib.parse import quote

from rdzv.backends.credentials import PATHS, Credentials
from rdzv.config.settings import parse
from rdzv.display.standard_error import StandardErrorHandler
from rdzv.errors import RendezvousSettingsError
from store import Limits, StoreUsageError
from store.net.dialing import exhausted_limit
from store.net.sockets import close_in_children, listen_on, unregister

if TYPE_CHECKING:
    from rdzv.config.settings import Settings
    from store.net.sockets import Sockets

log: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 1.0  # seconds until a killed parent is noticed
POLL_EVERY: Final = 0.1  # seconds between questions whether clients are connected
ENDS_WITHIN: Final = 15.0  # seconds for an answer, and for the process to end, before it is killed; a server ends in 10
ERRORS: Final = (StoreUsageError, RendezvousSettingsError, OSError)
NOT_STARTED: Final = "the store's process has ended, or has not answered within join_timeout"
HAND_OVER: Final = "hand over"
HANDED_OVER: Final = (*PATHS, "insecure", "http_port", "prefix")
# Full paths, and the folder of this package: `sys.path` may have relative ones, and the program may `chdir`.
IMPORTED_FROM: Final = (*map(os.path.abspath, sys.path), str(Path(__file__).parents[2]))


class StoreProcess:
    """A store in another process: the members of `Server` that `HostedStore` needs. Raises like `serve_embedded`."""

    def __init__(
        self, settings: Settings, credentials: Credentials, address: str, port: int, listeners: Sockets | None = None
    ) -> None:
        self.end_when_alone: StoreProcess = self  # as `Server.end_when_alone`
        self.rejects_clients: bool = False  # True once the server rejects clients
        self._stopped = self._closed = False
        self.has_ended: bool = False
        self._asking, (self._control, theirs) = threading.Lock(), socket.socketpair()
        listeners = listeners or listen_on(address, port)
        close_in_children(self, self._control, theirs, *listeners)
        numbers = [sock.fileno() for sock in (theirs, *listeners)]
        path = list(dict.fromkeys((*IMPORTED_FROM, *sys.path)))
        program = f"import sys; sys.path[:] = {path!r}; import {__name__} as it; it.main({numbers})"
        try:
            self._process = subprocess.Popen(  # noqa: S603  this interpreter, with our own program
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=numbers,
                start_new_session=True,
            )
        finally:
            for sock in (theirs, *listeners):
                sock.close()
        self._lines = self._control.makefile("rw")
        threading.Thread(target=self._report_death, name="wait for the store's process", daemon=True).start()
        chosen = {name: getattr(settings, name) for name in HANDED_OVER if getattr(settings, name) is not None}
        what = {
            "parent": os.getpid(),
            "url": f"{settings.endpoint.url}/{quote(settings.run_id, safe='')}",
            "chosen": chosen,
            "token": None if settings.token_file or credentials.token is None else credentials.token.hex(),
            "limits": settings.limits and asdict(settings.limits),
            "listen": {"address": address, "port": port},
            "level": logging.getLogger("store").getEffectiveLevel(),
        }
        self._control.settimeout(settings.join_timeout)
        told = self._ask(what)
        if told is None or "error" in told:
            self.close()
            kind, *about = (OSError.__name__, 0, NOT_STARTED) if told is None else told["error"]
            raise next(one for one in ERRORS if one.__name__ == kind)(*about)
        self._control.settimeout(ENDS_WITHIN)
        self.url: str = told["url"]
        self.store_id: str = told["store_id"]

    def reject_new_clients(self) -> None:
        """See `EndWhenAlone.reject_new_clients`."""
        self._ask(HAND_OVER)

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return int((self._ask(None) or {}).get("connections", 0))

    def wait_until_alone(self, within: float) -> bool:
        """Wait until no client is connected, and reject clients from then on; return False at the time limit."""
        until = time.monotonic() + within
        while not (self.rejects_clients or self._stopped):
            left = max(until - time.monotonic(), 0.0)
            told = self._ask(min(POLL_EVERY, left))
            self.rejects_clients = told is None or bool(told["alone"])
            if left <= POLL_EVERY:
                break
        return self.rejects_clients or self._stopped

    def stop_waiting(self) -> None:
        """End `wait_until_alone`; thread-safe."""
        self._stopped = True

    def close(self) -> None:
        """End the store's process, and wait for its end."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        unregister(self)
        with contextlib.suppress(OSError), self._control:
            self._lines.close()

    def _ask(self, request: dict[str, Any] | str | float | None) -> Any:
        """Send settings, `HAND_OVER`, seconds to wait until alone, or None (a query); return the answer, if any."""
        with self._asking, contextlib.suppress(OSError, ValueError):
            _send(self._lines, request)
            return json.loads(self._lines.readline())
        return None

    def _report_death(self) -> None:
        status = self._process.wait()
        if not self._closed:
            self.has_ended = True
            log.error("the process that serves the store (pid %d) has ended with %d", self._process.pid, status)
            self.close()


def main(numbers: list[int]) -> None:
    """Serve the store that the parent requests over the first socket, on the other sockets, until the parent ends."""
    from rdzv.backends.monitoring import serve_embedded

    for meant_for_the_program in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(meant_for_the_program, signal.SIG_IGN)
    control, *listeners = [socket.socket(fileno=number) for number in numbers]
    lines = control.makefile("rw")
    asked = json.loads(lines.readline())
    logging.basicConfig(level=asked["level"], handlers=[StandardErrorHandler()])
    token = asked["token"] and bytes.fromhex(asked["token"])
    limits = asked["limits"] and Limits(**asked["limits"])
    try:
        threading.Thread(target=_exit_with_parent, args=(asked["parent"], control), daemon=True).start()
        settings = parse(asked["url"], {**asked["chosen"], "token": token, "limits": limits}, {})
        serving, server = serve_embedded(settings, Credentials(settings), listeners=listeners, **asked["listen"])
    except ERRORS as error:
        kind = next(one for one in ERRORS if isinstance(error, one))
        _send(lines, {"error": [kind.__name__, *error.args[:2]]})
        return
    except RuntimeError as error:
        if not (limit := exhausted_limit(error.__cause__ or error)):
            raise
        _send(lines, {"error": [OSError.__name__, 0, limit]})
        return
    with serving:
        _send(lines, {"url": server.url, "store_id": server.store_id})
        end = server.end_when_alone
        for within in map(json.loads, lines):
            if within == HAND_OVER:
                end.reject_new_clients()
            alone = isinstance(within, float) and end.wait_until_alone(within)
            _send(lines, {"alone": alone, "connections": server.connections})
        end.stop_waiting()


def _send(lines: TextIO, what: object) -> None:
    with contextlib.suppress(OSError):  # the other process has ended; reading `lines` ends, too
        lines.write(json.dumps(what) + "\n")
        lines.flush()


def _exit_with_parent(parent: int, control: socket.socket) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
