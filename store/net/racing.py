"""Connecting to a host with several addresses, of which some may be dead ("happy eyeballs", RFC 8305).

Attempts start a quarter of a second apart, or at once after a failure, and the first connection wins. IPv6 and IPv4
addresses alternate, so a dead network costs one pause. This race replaces asyncio's, which may leak the winning socket
if cancelled, and which uvloop and blocking sockets lack.
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

from store.net.sockets import SuppressUnlessSignal, raised_by_signal
from store.printable import short_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log: logging.Logger = logging.getLogger(__name__)

STAGGER = 0.25  # seconds between attempts (RFC 8305)

CHECK_EVERY = 0.5  # seconds, at most, between calls of `check` after the lookup
LOOKED_UP_WITHIN = 1.0  # seconds for a lookup; then the last known addresses are used, if any has worked
HOLDS_FOR = 3.0  # seconds that a lookup's result is used for; more than the longest pause between attempts
TOLD_MOST = 4  # the most addresses of a name in one message
UNDER_WAY = frozenset({0, errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN})  # no failures; EAGAIN: memory is short
WORKED, SILENT = -1, 1  # ranks: of the address that worked last, and of failed ones; else 0
SMALL_SEGMENT = 1024  # bytes; such packets pass all IPv6 networks and most tunnels

Resolved = tuple[int, int, int, str, Any]
"""Family, kind, protocol, canonical name and address, as `socket.getaddrinfo` returns them."""


class Addresses:
    """The addresses of one host; `literal` if it is an IP address. Safe to use from several threads."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._standing: dict[Any, int] = {}  # ranks of tried addresses: the lowest is tried first
        self._resolved: list[Resolved] = []
        self._small_packets = self._said = self._has_worked = False
        self._looking: threading.Thread | None = None
        self._holds_until = -math.inf  # until this `time.monotonic()`, the last lookup's result is used
        self._problem: Exception = OSError(f"{host} was not looked up")  # the error of the last failed lookup
        with contextlib.suppress(OSError):
            self._look_up(socket.AI_NUMERICHOST)
        self.literal: bool = bool(self._resolved)

    def set_small_packets(self, small: bool) -> None:
        """Choose whether both ends of later connections send only small packets."""
        self._small_packets = small
        if small and not self._said:
            self._said = True
            log.info(
                "%s port %d takes connections, and nothing comes on them, as where large packets are lost: trying with "
                "packets of at most %d bytes; see that the MTU is the same everywhere",
                *(self.host, self.port, SMALL_SEGMENT),
            )

    def set_options(self, sock: socket.socket) -> None:
        """Prepare a socket before it connects."""
        if self._small_packets:
            with SuppressUnlessSignal(OSError):  # some systems reject it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)

    def in_parentheses(self) -> str:
        """Return the last known addresses, for an error message."""
        found = list(dict.fromkeys(str(one[4][0]) for one in tuple(self._resolved)))
        if self.literal or not found:
            return ""
        return f" ({self.host} is {short_names(found, TOLD_MOST)} here)"

    def resolve(self, within: float = math.inf) -> list[Resolved] | None:
        """Return the addresses in order to try. None if the lookup is slow and no address has worked: call again."""
        if not self.literal and time.monotonic() >= self._holds_until:
            looking, wait = self._looking, not self._has_worked
            if looking is None or not looking.is_alive():  # only one lookup runs at a time: a lookup may take minutes
                looking = threading.Thread(target=self._look_up_in_thread, name=f"look up {self.host}", daemon=True)
                wait = True
                looking.start()
                self._looking = looking
            if wait:
                looking.join(min(within, LOOKED_UP_WITHIN))
            is_over = not looking.is_alive()  # read before the result, which the thread may set meanwhile
            if not self._has_worked and time.monotonic() >= self._holds_until:
                if is_over:
                    raise self._problem.with_traceback(None)
                return None
        families: dict[int, list[Resolved]] = {}
        for one in self._resolved:
            families.setdefault(one[0], []).append(one)
        turns = [one for turn in itertools.zip_longest(*families.values()) for one in turn if one is not None]
        return sorted(turns, key=lambda one: self._standing.get(one[4], 0))

    def _look_up_in_thread(self) -> None:
        try:
            self._look_up()
        except (OSError, UnicodeError) as error:
            self._problem = error

    def _look_up(self, flags: int = 0) -> None:
        # Pass an ASCII name as bytes: for text, Python loads its IDNA tables, which is slow.
        host = self.host.encode() if self.host.isascii() else self.host
        found = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM, flags=flags)
        if not found:
            raise OSError(f"{self.host} has no address")
        self._resolved = list(found)
        self._holds_until = time.monotonic() + HOLDS_FOR

    def note_success(self, address: Any) -> None:
        """Note that a connection to this address was made."""
        self._has_worked = True
        tried = self._standing.copy()  # atomic: other threads may change it
        self._standing = {one: standing for one, standing in tried.items() if standing != WORKED}
        self._standing[address] = WORKED

    def note_failures(self, addresses: Iterable[Any]) -> None:
        """Note that these addresses have failed, or not answered in time."""
        self._standing.update(dict.fromkeys(addresses, SILENT))
        # Use a set: a generator may swallow the exception of a signal's handler.
        if {self._standing.get(one[4]) for one in self._resolved} <= {SILENT}:
            self._standing.clear()  # all addresses have failed: rank them equally


class ConnectRace:
    """One race: the caller calls `connect_next` at intervals, and `finish_attempt` with each writable socket."""

    def __init__(self, addresses: Addresses, order: Iterable[Resolved]) -> None:
        self._addresses = addresses
        self.left: deque[Resolved] = deque(order)  # not tried yet
        self._tried: list[Any] = []
        self._problem: OSError | None = None
        self.connecting: dict[socket.socket, Any] = {}

    def connect_next(self) -> socket.socket | None:
        """Begin to connect to the next address that does not fail at once, if any; `OSError` if all have failed."""
        while self.left:
            family, kind, protocol, _, address = self.left.popleft()
            self._tried.append(address)
            sock = None
            try:
                sock = socket.socket(family, kind, protocol)
                sock.setblocking(False)
                self._addresses.set_options(sock)
                number = sock.connect_ex(address)
            except BaseException as error:
                if sock is not None:
                    sock.close()
                if not isinstance(error, OSError) or raised_by_signal(error):
                    raise
                self._note_error(error)
                continue
            assert sock is not None, "it was made"
            if number in UNDER_WAY:
                self.connecting[sock] = address
                return sock
            sock.close()
            self._note_error(OSError(number, os.strerror(number)))
        self._raise_if_all_failed()
        return None

    def finish_attempt(self, sock: socket.socket) -> bool:
        """Return True if a writable socket is connected: the caller owns it. `OSError` if all attempts have failed."""
        address = self.connecting.pop(sock)
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not number:
            self._tried.remove(address)
            self._addresses.note_success(address)
            return True
        sock.close()
        self._note_error(OSError(number, os.strerror(number)))
        self._raise_if_all_failed()
        return False

    def close(self) -> None:
        """Close the sockets that are still connecting, and note that their addresses did not work."""
        for sock in self.connecting:
            sock.close()
        self.connecting.clear()
        self._addresses.note_failures(self._tried)
        self._tried.clear()

    def _note_error(self, error: OSError) -> None:
        # Keep the error of a refused connection, which says more than a missing route.
        if self._problem is None or isinstance(error, ConnectionRefusedError):
            self._problem = error

    def _raise_if_all_failed(self) -> None:
        if not self.left and not self.connecting and self._problem is not None:
            raise self._problem


def connect_blocking(addresses: Addresses, until: float, check: Callable[[], None]) -> socket.socket:
    """Return a connected, non-blocking socket; `TimeoutError` after `until`. `check` is called meanwhile."""
    while (order := addresses.resolve(until - time.monotonic())) is None:
        check()
        if time.monotonic() >= until:
            raise TimeoutError
    with contextlib.closing(ConnectRace(addresses, order)) as race:
        next_at = time.monotonic()
        while True:
            check()
            now = time.monotonic()
            if now >= until:
                raise TimeoutError
            if race.left and now >= next_at:
                race.connect_next()
                next_at = now + STAGGER
            waiting = select.poll()
            for sock in race.connecting:
                waiting.register(sock, select.POLLOUT)
            wake_at = min(until, now + CHECK_EVERY, next_at if race.left else math.inf)
            ready = {number for number, _ in waiting.poll((wake_at - now) * 1000 + 1)}
            for sock in [sock for sock in race.connecting if sock.fileno() in ready]:
                if race.finish_attempt(sock):
                    return sock
                next_at = now


async def resolve_async(addresses: Addresses) -> list[Resolved]:
    """Return the addresses in the order to try; the lookup is in a thread."""
    # Not the loop's own lookup: uvloop's starts libuv's threads, and a forked child would hang at its end.
    order = addresses.resolve() if addresses.literal else None
    while order is None:
        order = await anyio.to_thread.run_sync(addresses.resolve, abandon_on_cancel=True)
    return order


async def connect_async(addresses: Addresses, order: Iterable[Resolved] | None = None) -> socket.socket:
    """Do the same as `connect_blocking`, in the event loop, without a deadline; `order`: the addresses, if not all."""
    loop = asyncio.get_running_loop()
    race = ConnectRace(addresses, await resolve_async(addresses) if order is None else order)
    writable: list[socket.socket] = []
    come = asyncio.Event()

    def on_writable(sock: socket.socket) -> None:
        loop.remove_writer(sock)
        writable.append(sock)
        come.set()

    try:
        while True:
            sock = race.connect_next()
            if sock is not None:
                loop.add_writer(sock, on_writable, sock)
            with anyio.move_on_after(STAGGER if race.left else None):
                await come.wait()
            come.clear()
            while writable:
                sock = writable.pop()
                if race.finish_attempt(sock):
                    return sock
    finally:
        for sock in race.connecting:
            loop.remove_writer(sock)
        race.close()
