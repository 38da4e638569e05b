"""The embedded store in its own process (`host=process`), for programs that hold the GIL for long.

The node binds the port, and executes this interpreter: a fork would copy the locks of threads, and `multiprocessing`
would run the user's script again. The two exchange pickled objects by a socket pair, as arguments and environment are
public. The store's process ends when the node's end of the pair is closed, or when its parent, the node, has ended: a
forked child may keep the pair open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final

from rdzv.backends.credentials import PATHS, Credentials
from rdzv.backends.handover import hand_over_as_parent_died
from rdzv.backends.monitoring import serve_embedded
from rdzv.config.settings import Settings
from rdzv.display.standard_error import NonBlockingStderrHandler
from store.net.dialing import exhausted_limit
from store.net.sockets import close_in_children, forget_sockets

if TYPE_CHECKING:
    from store.net.sockets import Sockets
    from store.net.threads import Flag

log: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 1.0  # seconds until a killed parent is noticed
ENDS_WITHIN: Final = 15.0  # seconds for an answer, and to end, before SIGKILL; a server ends within 10
SERVING: Final = ("token", "insecure", "http_port", "limits", "min_nodes", "close_timeout", *PATHS)
# Full paths, and the folder of this package: `sys.path` may have relative ones, and the program may `chdir`.
IMPORTED_FROM: Final = (*map(os.path.abspath, sys.path), str(Path(__file__).parents[2]))


class StoreProcess:
    """A store in another process, with the members of `Server` that `HostedStore` needs. Raises like `serve_embedded`.

    It takes over the bound sockets. Another thread sets `gives_up` to end the start.
    """

    def __init__(self, settings: Settings, address: str, port: int, bound: Sockets, gives_up: Flag) -> None:
        self.end_when_alone: StoreProcess = self  # has `EndWhenAlone`'s methods
        self.connections: int = 0  # the number of connected clients at the last answer
        self.has_died: bool = False  # True if the process has ended before `close`
        self.url: str = ""
        self.store_id: str = ""  # until the store serves
        self._asking, (self._control, theirs) = Lock(), Pipe()
        given: list[Any] = [theirs, *bound]
        close_in_children(self, self._control, *given)
        numbers = [one.fileno() for one in given]
        program = f"import sys; sys.path[:] = {[*IMPORTED_FROM, *sys.path]}; import {__name__} as m; m.main({numbers})"
        command, null = [sys.executable, "-c", program], subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=numbers, start_new_session=True)  # noqa: S603  ours
        finally:
            for one in given:
                one.close()
        chosen = {name: getattr(settings, name) for name in ("endpoint", "run_id", "prefix", *SERVING)}
        level = logging.getLogger("store").getEffectiveLevel()
        gives_up.call_when_set(lambda: None if self.store_id else self._process.kill())
        told = self._ask((os.getpid(), level, chosen, address, port), settings.join_timeout)
        if not isinstance(told, tuple):
            self.close()
            raise told or OSError(0, "the store's process has ended, or has not answered within join_timeout")
        self.url, self.store_id = told
        Thread(target=self._wait_for_end, name="wait for the store's process", daemon=True).start()

    def reject_new_clients(self) -> None:
        """See `EndWhenAlone`."""
        self._ask(("reject_new_clients",))

    def wait_until_alone(self, within: float) -> bool:
        """See `EndWhenAlone`; return True also if the process has ended."""
        is_alone, self.connections = self._ask(("wait_until_alone", within)) or (True, 0)
        return is_alone

    def close(self) -> None:
        """End the store's process, and wait for its end."""
        with self._asking, self._control, contextlib.suppress(OSError):
            self._control.send(None)  # ends it without a handover
        forget_sockets(self)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_WITHIN)
        self._process.kill()
        self._process.wait()

    def _wait_for_end(self) -> None:
        status = self._process.wait()
        if not self._control.closed:
            self.has_died = True
            log.error("the process that serves the store (pid %d) has ended with %d", self._process.pid, status)
            self.close()

    def _ask(self, request: object, within: float | None = None) -> Any:
        """Send an object and return the answer; at the limit, kill the process. Return None if the process ends."""
        with self._asking, contextlib.suppress(OSError, EOFError):
            self._control.send(request)
            if self._control.poll(ENDS_WITHIN if within is None else within):
                return self._control.recv()
            self._process.kill()
        return None


def main(numbers: list[int]) -> None:
    """Read requests from the first socket, and serve the store on the others until the parent ends or asks to end."""
    for meant_for_the_program in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(meant_for_the_program, signal.SIG_IGN)
    with Connection(numbers[0]) as control, contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        _serve(control, [socket.socket(fileno=number) for number in numbers[1:]])


def _serve(control: Connection, listeners: Sockets) -> None:
    parent, level, chosen, address, port = control.recv()
    logging.basicConfig(level=level, handlers=[NonBlockingStderrHandler()])
    try:
        credentials = Credentials(settings := Settings(**chosen))
        serving, server = serve_embedded(settings, credentials, address, port, listeners)
    except Exception as error:  # noqa: BLE001  the parent raises it
        limit = exhausted_limit(error.__cause__ or error)
        control.send(OSError(0, limit) if limit else error)
        return
    with serving:
        control.send((server.url, server.store_id))
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
            while os.getppid() == parent:
                if control.poll(LOOK_EVERY):
                    if (request := control.recv()) is None:
                        return
                    name, *words = request
                    control.send((getattr(server.end_when_alone, name)(*words), server.connections))
        hand_over_as_parent_died(settings, credentials, server)
