"""Sockets that send at once and notice a dead peer early; their use with `fork()` and signals.

While a forked child holds its parent's sockets open, the peer does not notice the parent's death. So sockets are
registered here, and a forked child replaces them by `/dev/null`, which keeps their numbers in use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import resource
import socket
import struct
import sys
import termios
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

SIOCOUTQNSD = 0x894B  # <linux/sockios.h>: unsent bytes
TCP_INFO_PROBES = 3  # <linux/tcp.h>: the offset in tcp_info of the number of unanswered probes
SO_MEMINFO = 55  # <asm-generic/socket.h>: the memory that a socket uses
MEMINFO_BYTES = 4  # the size of SO_MEMINFO's first number: the memory of received data
UNANSWERED_PROBES_MOST = 1  # with more unanswered TCP probes, the peer counts as dead
PASSED_ON = sys.platform == "linux"  # True if accepted connections inherit their listener's options
SYSTEM_TELLS = sys.platform == "linux"  # True if the system tells how many bytes are not acknowledged
LISTEN_ATTEMPTS = 5  # attempts to find one port that is free on several addresses
SPARE_FILES = 64  # file descriptors that a server leaves to the rest of its process
FILES_UNLIMITED = 1_048_576  # stands for "no limit": Linux's default for fs.nr_open

OPTIONS = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
OPTIONS += [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000))
    if hasattr(socket, name)  # macOS lacks some of them
]

Sockets: TypeAlias = "Sequence[socket.socket]"

# The registered sockets. The keys are their owners, as asyncio's socket objects allow no weak references.
_owned: weakref.WeakKeyDictionary[object, tuple[Any, ...]] = weakref.WeakKeyDictionary()
CALLED = frozenset({"store", "socket", "ssl", "msgpack", "asyncio", "uvloop"})


def raised_by_signal(error: BaseException | None) -> bool:
    """Return True if a signal's handler raised this error: the raising code is in no package of `CALLED`."""
    if error is None or threading.current_thread() is not threading.main_thread():  # handlers run in the main thread
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in CALLED


def is_ctrl_c(error: BaseException) -> bool:
    """Return True for KeyboardInterrupt in the main thread; in other threads, a user's function raised it."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


class SuppressUnlessSignal(contextlib.suppress):
    """Suppresses errors, but not those of a signal's handler."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return super().__exit__(kind, error, trace) and not raised_by_signal(error)


def set_tcp_options(sock: Any) -> None:
    """Set the options of a TCP socket: no delays; notice a dead peer in half a minute."""
    with SuppressUnlessSignal(OSError):  # the socket is closed
        for level, option, value in OPTIONS:
            sock.setsockopt(level, option, value)


def unacknowledged(sock: Any, buffered: int = 0) -> tuple[int, bool, bool]:
    """Return the unacknowledged bytes, `buffered` ones included, and two flags.

    The first flag is True if the bytes only wait for the peer to read. The second flag is True if the peer's system has
    acknowledged all bytes, and no received data waits for a lost packet.
    """
    under_way, unsent = (0, 0) if sock is None else _queued_bytes(sock)
    waiting = buffered + unsent
    acknowledged = sock is not None and SYSTEM_TELLS and not under_way + waiting and not _has_out_of_order_data(sock)
    return under_way + waiting, waiting > 0 and not under_way, acknowledged


def _queued_bytes(sock: Any) -> tuple[int, int]:
    """Return the sent, unacknowledged bytes, and the unsent ones; if the peer counts as dead, all count as sent."""
    held = unsent = 0
    with SuppressUnlessSignal(OSError, ValueError):  # the socket is closed, or the system is not Linux
        held, unsent = (
            struct.unpack("i", fcntl.ioctl(sock.fileno(), request, bytes(4)))[0]
            for request in (termios.TIOCOUTQ, SIOCOUTQNSD)
        )
    if unsent and _unanswered_probes(sock) > UNANSWERED_PROBES_MOST:
        return held, 0
    return held - unsent, unsent


def _unanswered_probes(sock: Any) -> int:
    option = getattr(socket, "TCP_INFO", None)
    if option is not None:
        with SuppressUnlessSignal(OSError):
            return int(sock.getsockopt(socket.IPPROTO_TCP, option, TCP_INFO_PROBES + 1)[TCP_INFO_PROBES])
    return 0


def _has_out_of_order_data(sock: Any) -> bool:
    held = b""
    with SuppressUnlessSignal(OSError, ValueError):  # the socket is closed
        held = sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMINFO_BYTES)
    return any(held) and not unread_bytes(sock)


def unread_bytes(sock: Any) -> float:
    """Return the received bytes not read yet; infinity if unknown."""
    with SuppressUnlessSignal(AttributeError, OSError, ValueError):  # the socket is in memory, or closed
        return float(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)))[0])
    return math.inf


def close_in_children(owner: object, *socks: Any) -> None:
    """Register the open sockets of `owner`: forked children replace them by `/dev/null`. See `forget_sockets`."""
    _owned[owner] = socks


def forget_sockets(owner: object) -> None:
    """Unregister closed sockets, whose numbers may be reused."""
    _owned.pop(owner, None)


def listen_on(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on every address of `host` ("": all), on one port (0: a free one)."""
    # Ask for None instead of `localhost`, which in some hosts files has an address of one family only.
    asked, flags = (None, 0) if host == "localhost" else (host or None, socket.AI_PASSIVE)
    found = socket.getaddrinfo(asked, port, type=socket.SOCK_STREAM, flags=flags)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    for attempt in range(LISTEN_ATTEMPTS):
        bound: list[socket.socket] = []
        try:
            for family, address in addresses:
                one_port = bound[0].getsockname()[1] if bound else port
                sock = _bind_and_listen(family, (address[0], one_port, *address[2:]))
                if sock is not None:
                    bound.append(sock)
        except OSError as error:
            for sock in bound:
                sock.close()
            # A port that the system chose as free for IPv4 may be taken for IPv6: try another one.
            if port or not bound or error.errno != errno.EADDRINUSE or attempt == LISTEN_ATTEMPTS - 1:
                raise
        else:
            if bound:
                return bound
            break
    raise OSError(errno.EADDRNOTAVAIL, f"{host!r} is no address of this machine: {os.strerror(errno.EADDRNOTAVAIL)}")


def _bind_and_listen(family: int, address: tuple[Any, ...]) -> socket.socket | None:
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # or "::" would also take the IPv4 port
        sock.setblocking(False)
        sock.bind(address)
        # Listen at once: until one of them listens, several sockets may bind one port.
        sock.listen()
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        reason = os.strerror(error.errno or 0).lower()
        if error.errno == errno.EADDRINUSE:
            lack = port_shortage_text() if not address[1] else ""
            reason = lack or f"{reason}; choose another port, or 0 for a free one"
        raise OSError(error.errno, f"cannot listen on {address[0]} port {address[1]}: {reason}") from None
    return sock


def port_shortage_text() -> str:
    """Return an explanation, with the remedy, if no automatic port of this machine is free; else ""."""
    try:
        with socket.socket() as probe:
            probe.bind(("", 0))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "no automatic port of this machine is free; end connections, or widen net.ipv4.ip_local_port_range"
    return ""


def raise_file_limit() -> int:
    """Raise the limit of open files as far as possible; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_UNLIMITED if hard == resource.RLIM_INFINITY else hard
    for wanted in (most, 65_536, 10_240):  # macOS rejects limits above kern.maxfilesperproc
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            break
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, most), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return FILES_UNLIMITED if soft == resource.RLIM_INFINITY else soft


_limit_users = 0
_limit_before = (0, 0)


@contextlib.contextmanager
def raised_file_limit() -> Iterator[int]:
    """Raise the limit of open files in a block; the last block to end restores it, unless too many files are open."""
    global _limit_users, _limit_before
    if not _limit_users:
        _limit_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _limit_users += 1
    try:
        yield raise_file_limit()
    finally:
        _limit_users -= 1
        if not _limit_users and open_file_count() < _limit_before[0]:
            with contextlib.suppress(OSError, ValueError):
                hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (_limit_before[0], hard))


def open_file_count() -> int:
    """Return the number of open files of this process; 0 if unknown."""
    for listing in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(listing))
    return 0


def files_needed(connections: int) -> int:
    """Return the limit of open files that lets a server accept this many connections."""
    return open_file_count() + SPARE_FILES + connections


def _close_in_child() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for socks in list(_owned.values()):
        for sock in socks:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(null, sock.fileno(), inheritable=False)  # an OSError for -1: the socket is closed
    os.close(null)
    _owned.clear()


os.register_at_fork(after_in_child=_close_in_child)
