"""Accepts connections, a few at a time, while the connection table has room.

asyncio's listener accepts a whole backlog in one step, and logs thousands of lines a second when no file can be opened.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from store.net.sockets import PASSED_ON, set_tcp_options
from store.net.tasks import cancel_and_wait
from store.net.threads import Flag

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from store.server.accept.connection_table import ConnectionTable

log: logging.Logger = logging.getLogger(__name__)

BACKLOG = 4096  # connections in the system's queue: a whole job that reconnects at once
ACCEPT_AT_ONCE = 64  # connections accepted before the loop serves other sockets
LOOK_AGAIN = 0.05  # seconds until the next look for room
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RETRY_AFTER = 0.5  # seconds until the next try after a failed accept
QUIET_FOR = 60.0  # seconds, at least, between log lines about failed accepts


class TcpListener:
    """Accepts connections on listening sockets until `close`; `beside`: HTTP connections, for pages or metrics."""

    def __init__(
        self,
        table: ConnectionTable,
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
        self._tasks: set[asyncio.Task[None]] = set()  # each hands an accepted connection to a new protocol
        self._timer: asyncio.TimerHandle | None = None
        self._quiet_until = 0.0

    def open(self) -> None:
        """Listen and accept."""
        for sock in self.socks:
            sock.setblocking(False)
            if PASSED_ON:
                set_tcp_options(sock)
            sock.listen(BACKLOG)
        self._resume_accepting()

    def close(self) -> None:
        """Stop accepting."""
        if self._timer is not None:
            self._timer.cancel()
        for sock in self.socks:
            self._loop.remove_reader(sock)
            sock.close()

    async def wait_closed(self) -> None:
        """Cancel the tasks that hand over accepted connections, and wait for their end."""
        await cancel_and_wait(*self._tasks)

    def _resume_accepting(self) -> None:
        self._timer = None
        for sock in self.socks:
            self._loop.add_reader(sock, self._accept, sock)

    def _pause_accepting(self, seconds: float) -> None:
        for sock in self.socks:
            self._loop.remove_reader(sock)
        self._timer = self._loop.call_later(seconds, self._resume_accepting)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            if not self._table.make_room(coming=len(self._tasks), beside=self._beside):
                self._pause_accepting(LOOK_AGAIN)
                return
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # the client closed the connection before it was accepted
                continue
            except OSError as error:
                self._log_out_of_files(error)
                self._pause_accepting(RETRY_AFTER)
                return
            sock.setblocking(False)
            if not PASSED_ON:
                set_tcp_options(sock)
            task = self._loop.create_task(self._connect_protocol(sock))
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_accept_task_done, sock))

    def _log_out_of_files(self, error: OSError) -> None:
        if self._loop.time() >= self._quiet_until:
            self._quiet_until = self._loop.time() + QUIET_FOR
            what = "no more files can be opened" if error.errno in OUT_OF_FILES else "no connection can be accepted"
            log.error(
                "%s (%s): newcomers wait until connections end; raise the limit of open files (ulimit -n), or lower "
                "connections_max",
                *(what, os.strerror(error.errno or 0)),
            )

    async def _connect_protocol(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, sock)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise

    def _on_accept_task_done(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before its first step, so the task may not have closed the socket
            sock.close()


class EndWhenAlone:
    """Lets the thread that ends a server wait until no client is left; new clients are then told to retry."""

    def __init__(self, alone: Callable[[], bool]) -> None:
        self._alone = alone
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted = False
        self._left = Flag()
        self.rejects_clients: bool = False
        self.hands_over: bool = False

    def note_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note the loop in which the server accepts connections."""
        self._loop = loop

    def end_wait_if_alone(self) -> None:
        """End a thread's `wait_until_alone` if no client is connected; call this in the server's loop."""
        if self._wanted and self._alone():
            self.rejects_clients = True
            self._left.set()

    def reject_new_clients(self) -> None:
        """Reject new clients from now on: another host may take over."""
        self.hands_over = True

    def wait_until_alone(self, within: float) -> bool:
        """Wait, in another thread, until no client is connected, then reject new ones; return False on a timeout."""
        assert self._loop is not None, "only what is served can be left"
        self._wanted = True
        self._loop.call_soon_threadsafe(self.end_wait_if_alone)
        return self._left.wait(within)
