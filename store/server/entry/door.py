"""Shell: accepts connections, a few at a time; nobody while there is no room, and with one line when files run out.

Here is also how a server closes its door for good.

asyncio's own listener accepts as many in one step as its backlog is long, and at the limit of open files it logs each
of them, thousands of times a second. Here whoever cannot be taken in waits in the system's queue.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from typing import TYPE_CHECKING

from store.net.sockets import PASSED_ON, prepare
from store.net.tasks import cancel_and_wait
from store.net.threads import Flag

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from store.server.entry.table import Table

__all__ = ["Door", "WayOut"]

log: logging.Logger = logging.getLogger(__name__)

BACKLOG = 4096  # connections waiting to be accepted: a whole job reconnecting at once
ACCEPT_AT_ONCE = 64  # before everybody else has a turn
LOOK_AGAIN = 0.05  # seconds until it is seen whether there is room again
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RETRY_AFTER = 0.5  # seconds, when files have run out
QUIET_FOR = 60.0  # seconds between lines that say so


class Door:
    """Listening sockets, and what becomes of who connects there.

    Args:
        table: Where all connections are counted.
        socks: Bound sockets; they are closed with the door.
        protocol: Makes the protocol object of a connection.
        beside: Whether it leads to something else than the store.
    """

    def __init__(
        self,
        table: Table,
        socks: Sequence[socket.socket],
        protocol: Callable[[], asyncio.BaseProtocol],
        *,
        beside: bool = False,
    ) -> None:
        self._beside = beside
        self._table = table
        self.socks: list[socket.socket] = list(socks)
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # connections that the loop has not taken over yet
        self._timer: asyncio.TimerHandle | None = None
        self._quiet_until = 0.0

    def open(self) -> None:
        """Listen, and accept from now on."""
        for sock in self.socks:
            sock.setblocking(False)
            if PASSED_ON:
                prepare(sock)
            sock.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
        for sock in self.socks:
            self._loop.remove_reader(sock)
            sock.close()

    async def wait_closed(self) -> None:
        """Wait until nobody is half through the door."""
        await cancel_and_wait(*self._tasks)

    def _resume(self) -> None:
        self._timer = None
        for sock in self.socks:
            self._loop.add_reader(sock, self._accept, sock)

    def _pause(self, seconds: float) -> None:
        for sock in self.socks:
            self._loop.remove_reader(sock)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            if not self._table.make_room(coming=len(self._tasks), beside=self._beside):
                self._pause(LOOK_AGAIN)
                return
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # it has gone again
                continue
            except OSError as error:
                self._say_that_files_ran_out(error)
                self._pause(RETRY_AFTER)
                return
            sock.setblocking(False)
            if not PASSED_ON:
                prepare(sock)
            task = self._loop.create_task(self._hand_over(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _say_that_files_ran_out(self, error: OSError) -> None:
        if self._loop.time() >= self._quiet_until:
            self._quiet_until = self._loop.time() + QUIET_FOR
            what = "no more files can be opened" if error.errno in OUT_OF_FILES else "nobody can be accepted"
            log.error(
                "%s (%s): newcomers wait until connections end; raise the limit of open files (ulimit -n), or lower "
                "connections_max",
                *(what, os.strerror(error.errno or 0)),
            )

    async def _hand_over(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, sock)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise


class WayOut:
    """How a server ends once nobody needs it any more: for whoever serves it from another thread.

    Nobody slips in between being alone and the end. Whoever comes then is told to try again, and finds the next store.

    Args:
        alone: Whether no client is connected.
    """

    def __init__(self, alone: Callable[[], bool]) -> None:
        self._alone = alone
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted = False
        self._left = Flag()
        self.taken: bool = False  # nobody is taken in any more

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """The server takes connections in, in this loop."""
        self._loop = loop

    def note(self) -> None:
        """In that loop: no client is connected any more, or the way out is wanted."""
        if self._wanted and self._alone():
            self.taken = True
            self._left.set()

    def wait_until_alone(self, within: float) -> bool:
        """From another thread: take nobody in any more once no client is connected; whether that is so in time."""
        assert self._loop is not None, "only what is served can be left"
        self._wanted = True
        self._loop.call_soon_threadsafe(self.note)
        return self._left.wait(within)

    def stop_waiting(self) -> None:
        """From any thread: whoever waits to be alone need wait no longer."""
        self._left.set()
