"""The embedded store in its own process (`host=process`), for programs that hold the GIL for long.

The node binds the port, and executes this interpreter: a fork would copy the locks of threads, and `multiprocessing`
would run the user's script again. Node and store process exchange pickled objects by a socket pair: secrets
must not be in arguments or the environment. The store's process ends when the node's end of the pair is closed. As a
forked child of a killed node may keep that end open, the store's process also polls its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from rdzv.backends.credentials import PATHS, Credentials
from rdzv.backends.host_queries import MultiHostDial
from rdzv.backends.monitoring import serve_embedded
from rdzv.config.settings import parse
from rdzv.core.keys import Keys
from rdzv.display.standard_error import StandardErrorHandler
from rdzv.node.run.status import read_nodes_of_all_runs
from store import Client, StoreError, StoreReplaced
from store.net.dialing import exhausted_limit
from store.net.sockets import close_in_children, listen_on, unregister

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.config.settings import Settings
    from store import Server
    from store.net.sockets import Sockets

log: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 1.0  # seconds until a killed parent is noticed
POLL_EVERY: Final = 0.1  # seconds between checks for connected clients and, at the start, for `gives_up`
ENDS_WITHIN: Final = 15.0  # seconds for an answer, and to end, before SIGKILL; a server ends within 10
HANDED_OVER: Final = (*PATHS, "insecure", "http_port", "prefix", "limits", "min_nodes", "close_timeout")
# Full paths, and the folder of this package: `sys.path` may have relative ones, and the program may `chdir`.
IMPORTED_FROM: Final = (*map(os.path.abspath, sys.path), str(Path(__file__).parents[2]))


class StoreProcess:
    """A store in another process: the members of `Server` that `HostedStore` needs. Raises like `serve_embedded`.

    Another thread sets `gives_up` to end the start.
    """

    def __init__(
        self,
        settings: Settings,
        credentials: Credentials,
        address: str,
        port: int,
        listeners: Sockets | None = None,
        gives_up: threading.Event | None = None,
    ) -> None:
        self.end_when_alone: StoreProcess = self  # which has these methods itself
        self.rejects_clients: bool = False  # True once the server rejects clients
        self.connections: int = 0  # the number of connected clients at the last answer
        self.has_died: bool = False  # True if the process has ended by itself
        self._serves = self._stopped = False
        self._asking, (self._control, theirs) = threading.Lock(), Pipe()
        listeners = listeners or listen_on(address, port)
        given: list[Any] = [theirs, *listeners]
        close_in_children(self, self._control, *given)
        numbers = [one.fileno() for one in given]
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
            for one in given:
                one.close()
        self._end = threading.Thread(target=self._wait_for_end, name="wait for the store's process", daemon=True)
        self._end.start()
        chosen = {name: getattr(settings, name) for name in HANDED_OVER}
        chosen["token"] = None if settings.token_file else credentials.token
        url = f"{settings.endpoint.url}/{quote(settings.run_id, safe='')}"
        level = logging.getLogger("store").getEffectiveLevel()
        told = self._ask((os.getpid(), level, url, chosen, address, port), settings.join_timeout, gives_up)
        if told is None or isinstance(told, Exception):
            self.close()
            raise told or OSError(0, "the store's process has ended, or has not answered within join_timeout")
        self.url: str = told[0]
        self.store_id: str = told[1]
        self._serves = True

    def reject_new_clients(self) -> None:
        """See `EndWhenAlone.reject_new_clients`."""
        self._ask((True, 0.0))

    def wait_until_alone(self, within: float) -> bool:
        """Wait until no client is connected, and reject clients from then on; return False at the time limit."""
        until = time.monotonic() + within
        while not (self.rejects_clients or self._stopped):
            left = max(until - time.monotonic(), 0.0)
            self.rejects_clients, self.connections = self._ask((False, min(POLL_EVERY, left))) or (True, 0)
            if left <= POLL_EVERY:
                break
        return self.rejects_clients or self._stopped

    def stop_waiting(self) -> None:
        """End `wait_until_alone`; thread-safe."""
        self._stopped = True

    def close(self) -> None:
        """End the store's process, and wait for its end."""
        self._serves = False
        with self._asking, self._control, contextlib.suppress(OSError):
            self._control.send(None)  # the node is not dead
        self._end.join(ENDS_WITHIN)
        self._process.kill()
        self._end.join()

    def _ask(self, request: object, within: float | None = None, gives_up: threading.Event | None = None) -> Any:
        """Send an object and return the answer; None if the process has ended. If it does not answer, kill it."""
        until = time.monotonic() + (ENDS_WITHIN if within is None else within)
        with self._asking, contextlib.suppress(OSError, EOFError):
            self._control.send(request)
            while time.monotonic() < until and not (gives_up and gives_up.is_set()):
                if self._control.poll(POLL_EVERY):
                    return self._control.recv()
            self._process.kill()
        return None

    def _wait_for_end(self) -> None:
        status = self._process.wait()
        if self._serves:
            self.has_died = True
            log.error("the process that serves the store (pid %d) has ended with %d", self._process.pid, status)
        with self._asking:
            self._control.close()
        unregister(self)


def main(numbers: list[int]) -> None:
    """Serve the store that the parent requests over the first socket, on the other sockets, until the parent ends."""
    for meant_for_the_program in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(meant_for_the_program, signal.SIG_IGN)
    with Connection(numbers[0]) as control, contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        _serve(control, [socket.socket(fileno=number) for number in numbers[1:]])


def _serve(control: Connection, listeners: Sockets) -> None:
    parent, level, url, chosen, address, port = control.recv()
    logging.basicConfig(level=level, handlers=[StandardErrorHandler()])
    try:
        settings = parse(url, chosen, {})
        credentials = Credentials(settings)
        serving, server = serve_embedded(settings, credentials, address, port, listeners)
    except Exception as error:  # noqa: BLE001  the parent raises it
        limit = exhausted_limit(error.__cause__ or error)
        control.send(OSError(0, limit) if limit else error)
        return
    with serving:
        control.send((server.url, server.store_id))
        end = server.end_when_alone
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
            while os.getppid() == parent:
                if control.poll(LOOK_EVERY):
                    if (request := control.recv()) is None:
                        return
                    rejects, within = request
                    if rejects:
                        end.reject_new_clients()
                    control.send((end.wait_until_alone(within), server.connections))
        if settings.endpoint.has_successors:
            keys, ttl = Keys(settings.prefix, settings.run_id, has_successors=True), settings.close_timeout
            dial = MultiHostDial(settings, credentials)
            open_client = partial(Client, dial, name=server.url, token=credentials.token, timeout=ENDS_WITHIN)
            with contextlib.suppress(StoreError):
                asyncio.run(announce_end(open_client, server, keys, ttl, with_parent=True))
                end.wait_until_alone(ttl)


async def announce_end(
    open_client: Callable[[], Any], server: Server | StoreProcess, keys: Keys, ttl: float, *, with_parent: bool = False
) -> None:
    """Send the nodes of all runs to the next host. `with_parent`: the nodes of the parent process are dead."""
    async with open_client() as client:
        if client.store_id != server.store_id:
            raise StoreReplaced(f"{client.store_id} serves at another host")
        await client.put(keys.ending, b"", ttl=ttl)  # first: no run may begin after the listing below
        for run in {keys, *await read_nodes_of_all_runs(client)}:
            for dead in await client.list(run.parents) if with_parent else ():
                value = b"%s %d" % (dead.value, dead.mod_revision)
                await client.put(run.hosted + dead.key.removeprefix(run.parents), value, ttl=ttl)
            await client.put(run.moving, b"", ttl=ttl)
    server.end_when_alone.reject_new_clients()
