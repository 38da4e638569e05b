"""Shell: what every socket of ours needs: quick sending, early notice of a dead peer, care about `fork()` and signals.

A forked child shares its parent's sockets. It must not speak on them, and while it holds them open the parent's death
goes unnoticed at the other end. So every socket is remembered here for as long as it is open, and in a forked child
each is replaced by `/dev/null`, which keeps its number taken and harmless.

The handler of a signal may raise any exception, a `TimeoutError` say, in the midst of a call to the system. That is for
the caller, and must not be taken for the system's answer: see `raised_by_handler`.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = [
    "PASSED_ON",
    "SYSTEM_TELLS",
    "SystemErrorsSuppressed",
    "bound_sockets",
    "forget",
    "let_go_in_children",
    "open_files",
    "outstanding",
    "prepare",
    "raise_file_limit",
    "raised_by_handler",
    "raised_file_limit",
    "unread_bytes",
]

SIOCOUTQNSD = 0x894B  # <linux/sockios.h>: the bytes in a socket's queue that were never sent
TCP_INFO_PROBES = 3  # <linux/tcp.h>: the byte of tcp_info that counts the probes sent without an answer
SO_MEMINFO = 55  # <asm-generic/socket.h>: what the system keeps for a socket, as several numbers ...
MEMINFO_BYTES = 4  # ... of which the first is the memory that what was received takes
PROBES_ANSWERED = 1  # so many may be without an answer for a moment, at a peer that takes no more and is there
PASSED_ON = sys.platform == "linux"  # to each connection that a socket accepts, what that socket was prepared with
SYSTEM_TELLS = sys.platform == "linux"  # what it holds of what was sent
LISTEN_ATTEMPTS = 5  # to find one port that is free on several addresses
FILES_UNLIMITED = 1_048_576  # what "no limit" is taken for: Linux's own default for fs.nr_open

OPTIONS = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
OPTIONS += [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 30_000),
    )
    if hasattr(socket, name)  # macOS has other names and its own defaults
]

# Sockets by the objects that own them: asyncio's stand-ins for sockets take no weak references themselves.
_owned: weakref.WeakKeyDictionary[object, tuple[Any, ...]] = weakref.WeakKeyDictionary()
CALLED = frozenset(
    {"store", "socket", "ssl", "msgpack", "asyncio", "uvloop"}
)  # packages that raise errors of their own


def raised_by_handler(error: BaseException | None) -> bool:
    """Return whether a signal's handler has raised this error: the code that raised it is none that is called here."""
    if error is None or threading.current_thread() is not threading.main_thread():  # where handlers run
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in CALLED


class SystemErrorsSuppressed(contextlib.suppress):
    """Suppress errors of the system, and none that a signal's handler has raised."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return super().__exit__(kind, error, trace) and not raised_by_handler(error)


def prepare(sock: Any) -> None:
    """Prepare a TCP socket: no delays, and a peer gone without a word is noticed in half a minute."""
    with SystemErrorsSuppressed(OSError):  # it may have been closed already; its owner will notice
        for level, option, value in OPTIONS:
            sock.setsockopt(level, option, value)


def outstanding(sock: Any, buffered: int = 0) -> tuple[int, bool, bool]:
    """What of all that was sent the other side has not got yet.

    Where the system does not tell, that is what stands in our own buffer.

    Args:
        sock: The socket; None if it is no socket of the system's.
        buffered: Bytes that the system has not taken yet.

    Returns:
        How many bytes were not acknowledged: while they fall, the network works. Whether they only wait for the other
        side to read on: it takes no more for now, and answers the probes that ask whether it does again. And whether
        its system has certainly acknowledged all of it, and nothing that came back was lost.
    """
    under_way, unsent = (0, 0) if sock is None else _queued_bytes(sock)
    waiting = buffered + unsent
    acknowledged = sock is not None and SYSTEM_TELLS and not under_way + waiting and not _holds_unreadable(sock)
    return under_way + waiting, waiting > 0 and not under_way, acknowledged


def _queued_bytes(sock: Any) -> tuple[int, int]:
    """What the system holds of what was sent: bytes under way, not acknowledged yet, and bytes not sent yet.

    The latter alone means that the other side takes no more for now. But where it does not answer probes, the network
    is broken, and what was not sent counts as under way: so it is where the system cannot send at all, since the
    address that the connection was made from is not this machine's any more.
    """
    held = unsent = 0
    with SystemErrorsSuppressed(OSError, ValueError):  # it is closed, or the system is not Linux
        held, unsent = (
            struct.unpack("i", fcntl.ioctl(sock.fileno(), request, bytes(4)))[0]
            for request in (termios.TIOCOUTQ, SIOCOUTQNSD)
        )
    if unsent and _unanswered_probes(sock) > PROBES_ANSWERED:
        return held, 0
    return held - unsent, unsent


def _unanswered_probes(sock: Any) -> int:
    """How often in a row this system has asked in vain whether the other side takes more; 0 where that is not told."""
    option = getattr(socket, "TCP_INFO", None)
    if option is not None:
        with SystemErrorsSuppressed(OSError):
            return int(sock.getsockopt(socket.IPPROTO_TCP, option, TCP_INFO_PROBES + 1)[TCP_INFO_PROBES])
    return 0


def _holds_unreadable(sock: Any) -> bool:
    """Whether the system has received something that cannot be read, since what belongs before it was lost.

    So it is for a moment after any loss; and for ever where the network drops large packets and lets small ones pass.
    """
    held = b""
    with SystemErrorsSuppressed(OSError, ValueError):  # it is closed
        held = sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMINFO_BYTES)
    return any(held) and not unread_bytes(sock)


def unread_bytes(sock: Any) -> float:
    """How much has come that was not read yet; infinity where the system does not tell."""
    with SystemErrorsSuppressed(AttributeError, OSError, ValueError):  # none of the system's, or closed
        return float(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)))[0])
    return math.inf


def let_go_in_children(owner: object, *socks: Any) -> None:
    """Remember the sockets of `owner`, in case the process forks. Call `forget` when they are closed."""
    _owned[owner] = socks


def forget(owner: object) -> None:
    """The sockets of `owner` are closed. Some stand-ins keep the number, which may soon be another file's."""
    _owned.pop(owner, None)


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address that `host` stands for, all on one port.

    Args:
        host: "" stands for all interfaces, "localhost" for the loopback of both families.
        port: 0 stands for a free one.

    Raises:
        OSError: The host is unknown, or none of its addresses is this machine's, or the port is taken.
    """
    # Without a name this gives the loopback of both families, of which some systems' files name one.
    asked, flags = (None, 0) if host == "localhost" else (host or None, socket.AI_PASSIVE)
    found = socket.getaddrinfo(asked, port, type=socket.SOCK_STREAM, flags=flags)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    for attempt in range(LISTEN_ATTEMPTS):
        bound: list[socket.socket] = []
        try:
            for family, address in addresses:
                one_port = bound[0].getsockname()[1] if bound else port
                sock = _bound(family, (address[0], one_port, *address[2:]))
                if sock is not None:
                    bound.append(sock)
        except OSError as error:
            for sock in bound:
                sock.close()
            # "" and "localhost" are an IPv4 and an IPv6 address, and port 0 one port for each: it may be taken on one.
            if port or not bound or error.errno != errno.EADDRINUSE or attempt == LISTEN_ATTEMPTS - 1:
                raise
        else:
            if bound:
                return bound
            break
    raise OSError(errno.EADDRNOTAVAIL, f"{host!r} is no address of this machine: {os.strerror(errno.EADDRNOTAVAIL)}")


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket | None:
    """A socket that listens on this address; None if this machine does not have it, or nothing of its family."""
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # or "::" would take the port from "0.0.0.0"
        sock.setblocking(False)
        sock.bind(address)
        # Several sockets may be bound to one port until one of them listens; uvloop would not say that it cannot.
        sock.listen()
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        reason = os.strerror(error.errno or 0).lower()
        if error.errno == errno.EADDRINUSE:
            reason += "; choose another port, or 0 for a free one"
        raise OSError(error.errno, f"cannot listen on {address[0]} port {address[1]}: {reason}") from None
    return sock


def raise_file_limit() -> int:
    """Raise the limit of open files as far as the system lets us; how many that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_UNLIMITED if hard == resource.RLIM_INFINITY else hard
    for wanted in (most, 65_536, 10_240):  # macOS names no limit and refuses more than kern.maxfilesperproc
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
    """Raise the limit of open files as `raise_file_limit` does; the last who leaves gives back what was raised.

    Not to below what is open: a process that has more needs it.
    """
    global _limit_users, _limit_before
    if not _limit_users:
        _limit_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _limit_users += 1
    try:
        yield raise_file_limit()
    finally:
        _limit_users -= 1
        if not _limit_users and open_files() < _limit_before[0]:
            with contextlib.suppress(OSError, ValueError):
                hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (_limit_before[0], hard))


def open_files() -> int:
    """How many files this process has open; 0 where the system does not tell."""
    for listing in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(listing))
    return 0


def _let_go_in_child() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for socks in list(_owned.values()):
        for sock in socks:
            with contextlib.suppress(OSError, ValueError):
                number = sock.fileno()
                if number >= 0:
                    os.dup2(null, number, inheritable=False)
    os.close(null)
    _owned.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
