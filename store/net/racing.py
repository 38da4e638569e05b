"""Shell: a connection to a name that has several addresses, of which some may be dead ("happy eyeballs", RFC 8305).

The addresses are tried a quarter of a second apart, or at once after one that fails, and the first that answers wins.
The families take turns, so that a dead network of one family costs one pause, however many addresses it has. The
address that worked last time comes first. Those that gave no answer come last: an attempt that is given up after a
moment is so followed by one that begins with another address.

Once a connection was made, a name server that fails or is slow keeps nobody away: then what it said last time holds.

asyncio's own race is not used: it forgets the socket that has won, unclosed, if it is cancelled just then. uvloop has
none, and neither have blocking callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from store.net.sockets import SystemErrorsSuppressed, raised_by_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Addresses", "Race", "connected", "connected_socket"]

log: logging.Logger = logging.getLogger(__name__)

STAGGER = 0.25  # seconds that one address has for itself, as RFC 8305 recommends

CHECK_EVERY = 0.5  # seconds; how late who blocks may notice that he is to end
LOOKED_UP_WITHIN = 1.0  # seconds; then holds what the name stood for last time, if that is known
HOLDS_FOR = 3.0  # seconds; longer than the longest pause before another attempt
TOLD_MOST = 4  # addresses of a name in one sentence
UNDER_WAY = frozenset({0, errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN})  # the last on systems short of memory
WORKED, SILENT = -1, 1  # the standings of the address that worked last, and of those that were tried since in vain
SMALL_SEGMENT = 1024  # bytes; with all headers such a packet passes wherever IPv6 does, and through most tunnels

Resolved = tuple[int, int, int, str, Any]
"""Family, kind, protocol, canonical name and address, as `socket.getaddrinfo` gives them."""


class Addresses:
    """What is known of the addresses of one host; all connections to it share this. Safe to use from several threads.

    Args:
        host: A name or an IP address.
        port: The port at each of its addresses.

    Attributes:
        literal: Whether the host is an IP address, and not a name that must be looked up.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._standing: dict[Any, int] = {}  # of addresses that were tried: the lowest is tried first
        self._resolved: list[Resolved] = []
        self._small_packets = self._said = self._has_worked = False
        self._looking: threading.Thread | None = None
        self._holds_until = -math.inf  # what was found, on `time.monotonic()`
        self._problem: Exception = OSError(f"{host} was not looked up")  # of the last time that nothing was found
        with contextlib.suppress(OSError):
            self._look_up(socket.AI_NUMERICHOST)
        self.literal: bool = bool(self._resolved)

    def use_small_packets(self, small: bool) -> None:
        """Let both ends of the connections that are made from now on send small packets only, or any."""
        self._small_packets = small
        if small and not self._said:
            self._said = True
            log.info(
                "%s port %d takes connections, and nothing comes on them, as where large packets are lost: trying with "
                "packets of at most %d bytes; see that the MTU is the same everywhere",
                *(self.host, self.port, SMALL_SEGMENT),
            )

    def prepare(self, sock: socket.socket) -> None:
        """Prepare a socket that is about to connect."""
        if self._small_packets:
            with SystemErrorsSuppressed(OSError):  # as some systems have it: it is theirs to decide
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)

    def where(self) -> str:
        """Return which addresses the name stood for when it was last looked up, to be said after what went wrong."""
        found = list(dict.fromkeys(str(one[4][0]) for one in tuple(self._resolved)))
        if self.literal or not found:
            return ""
        more = f" and {len(found) - TOLD_MOST} more" if len(found) > TOLD_MOST else ""
        return f" ({self.host} is {', '.join(found[:TOLD_MOST])}{more} here)"

    def resolve(self, within: float = math.inf) -> list[Resolved] | None:
        """Look the addresses up, and give them in the order in which they are to be tried.

        None if that is not known within a second, or so many: ask again. A name server may take longer than an attempt
        to connect: what it says then is for the next one.

        Raises:
            OSError: There are none.
        """
        if not self.literal and time.monotonic() >= self._holds_until:
            looking, wait = self._looking, not self._has_worked
            if looking is None or not looking.is_alive():  # never two: it may take minutes
                looking = threading.Thread(target=self._look_up_aside, name=f"look up {self.host}", daemon=True)
                wait = True
                looking.start()
                self._looking = looking
            if wait:
                looking.join(min(within, LOOKED_UP_WITHIN))
            is_over = not looking.is_alive()  # first: what it finds after this counts
            if not self._has_worked and time.monotonic() >= self._holds_until:
                if is_over:
                    raise self._problem.with_traceback(None)
                return None
        families: dict[int, list[Resolved]] = {}
        for one in self._resolved:
            families.setdefault(one[0], []).append(one)
        turns = [one for turn in itertools.zip_longest(*families.values()) for one in turn if one is not None]
        return sorted(turns, key=lambda one: self._standing.get(one[4], 0))

    def _look_up_aside(self) -> None:
        try:
            self._look_up()  # if it comes too late, the next attempt has it
        except (OSError, UnicodeError) as error:
            self._problem = error

    def _look_up(self, flags: int = 0) -> None:
        # As bytes, where they are the same: for text Python loads its tables of international names, which takes longer
        # than the rest of connecting.
        host = self.host.encode() if self.host.isascii() else self.host
        found = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM, flags=flags)
        if not found:
            raise OSError(f"{self.host} has no address")
        self._resolved = list(found)
        self._holds_until = time.monotonic() + HOLDS_FOR

    def worked(self, address: Any) -> None:
        """A connection to this address was made."""
        self._has_worked = True
        tried = self._standing.copy()  # at once: other threads may be at it, too
        self._standing = {one: standing for one, standing in tried.items() if standing != WORKED}
        self._standing[address] = WORKED

    def did_not_work(self, addresses: Iterable[Any]) -> None:
        """These were tried and have failed, or not answered before the race was over."""
        self._standing.update(dict.fromkeys(addresses, SILENT))
        # No generator: closing it early swallows what a signal's handler raises just then.
        if {self._standing.get(one[4]) for one in self._resolved} <= {SILENT}:
            self._standing.clear()  # all are alike again


class Race:
    """One attempt to connect: sockets that do not block, on their way to the addresses of one host.

    Whoever runs it begins with the next address when it is time, waits until one of `connecting` can be written to, and
    asks `won` of that one. It ends with a socket that has won, or with an error, and is closed in any case.

    Args:
        addresses: What is told of the outcome.
        order: In which order to try them.
    """

    def __init__(self, addresses: Addresses, order: Iterable[Resolved]) -> None:
        self._addresses = addresses
        self._left = deque(order)
        self._tried: list[Any] = []
        self._problem: OSError | None = None
        self.connecting: dict[socket.socket, Any] = {}

    @property
    def more(self) -> bool:
        """Whether there are addresses that were not tried yet."""
        return bool(self._left)

    def begin_next(self) -> socket.socket | None:
        """Begin with the next address that does not fail at once; None if none is left.

        Raises:
            OSError: All addresses have failed.
        """
        while self._left:
            family, kind, protocol, _, address = self._left.popleft()
            self._tried.append(address)
            sock = None
            try:
                sock = socket.socket(family, kind, protocol)
                sock.setblocking(False)
                self._addresses.prepare(sock)
                number = sock.connect_ex(address)
            except BaseException as error:
                if sock is not None:
                    sock.close()
                if not isinstance(error, OSError) or raised_by_handler(error):
                    raise
                self._failed(error)
                continue
            assert sock is not None, "it was made"
            if number in UNDER_WAY:
                self.connecting[sock] = address
                return sock
            sock.close()
            self._failed(OSError(number, os.strerror(number)))
        self._check_over()
        return None

    def won(self, sock: socket.socket) -> bool:
        """Whether a socket that can be written to is connected; it is the caller's then. Otherwise it has failed.

        Raises:
            OSError: So have all others.
        """
        address = self.connecting.pop(sock)
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not number:
            self._tried.remove(address)
            self._addresses.worked(address)
            return True
        sock.close()
        self._failed(OSError(number, os.strerror(number)))
        self._check_over()
        return False

    def close(self) -> None:
        """Give up what is under way."""
        for sock in self.connecting:
            sock.close()
        self.connecting.clear()
        self._addresses.did_not_work(self._tried)
        self._tried.clear()

    def _failed(self, error: OSError) -> None:
        # That somebody's machine refuses says more than that there is no way to another.
        if self._problem is None or isinstance(error, ConnectionRefusedError):
            self._problem = error

    def _check_over(self) -> None:
        if not self._left and not self.connecting and self._problem is not None:
            raise self._problem


def connected(addresses: Addresses, until: float, check: Callable[[], None]) -> socket.socket:
    """Give a socket that is connected to the first address that answers, for a caller who blocks; it does not block.

    Args:
        addresses: Where to connect to.
        until: When to give up, on `time.monotonic()`.
        check: Called every now and then; what it raises ends this.

    Raises:
        OSError: None of them can be reached. A `TimeoutError`: it was not in time.
    """
    while (order := addresses.resolve(until - time.monotonic())) is None:
        check()
        if time.monotonic() >= until:
            raise TimeoutError
    with contextlib.closing(Race(addresses, order)) as race:
        next_at = time.monotonic()
        while True:
            check()
            now = time.monotonic()
            if now >= until:
                raise TimeoutError
            if race.more and now >= next_at:
                race.begin_next()
                next_at = now + STAGGER
            waiting = select.poll()
            for sock in race.connecting:
                waiting.register(sock, select.POLLOUT)
            wake_at = min(until, now + CHECK_EVERY, next_at if race.more else math.inf)
            ready = {number for number, _ in waiting.poll((wake_at - now) * 1000 + 1)}
            for sock in [sock for sock in race.connecting if sock.fileno() in ready]:
                if race.won(sock):
                    return sock
                next_at = now  # its turn is over


async def connected_socket(addresses: Addresses) -> socket.socket:
    """Give a socket that is connected to the first address that answers, however long that takes.

    Raises:
        OSError: None of them can be reached.
    """
    # Neither the loop's getaddrinfo nor its sock_connect: uvloop asks threads of libuv's, which a forked child has not,
    # and libuv looks for them when the child ends.
    order = addresses.resolve() if addresses.literal else None
    while order is None:
        order = await anyio.to_thread.run_sync(addresses.resolve, abandon_on_cancel=True)
    loop = asyncio.get_running_loop()
    race = Race(addresses, order)
    writable: list[socket.socket] = []
    come = asyncio.Event()

    def can_be_written_to(sock: socket.socket) -> None:
        loop.remove_writer(sock)
        writable.append(sock)
        come.set()

    try:
        while True:
            sock = race.begin_next()
            if sock is not None:
                loop.add_writer(sock, can_be_written_to, sock)
            with anyio.move_on_after(STAGGER if race.more else None):
                await come.wait()
            come.clear()
            while writable:
                sock = writable.pop()
                if race.won(sock):
                    return sock
    finally:
        for sock in race.connecting:
            loop.remove_writer(sock)
        race.close()
