"""Shell: what every socket of ours needs: quick sending, early notice of a dead peer, and care about `fork()`.

A forked child shares its parent's sockets. It must not speak on them, and while it holds them open the parent's death
goes unnoticed at the other end. So every socket is remembered here for as long as it is open, and in a forked child
each is replaced by `/dev/null`, which keeps its number taken and harmless.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import weakref
from typing import Any

__all__ = ["forget", "free_port", "let_go_in_children", "prepare", "raise_file_limit"]

FILES_UNLIMITED = 1_048_576  # what "no limit" is taken for: Linux's own default for fs.nr_open

# Sockets by the objects that own them: asyncio's stand-ins for sockets take no weak references themselves.
_owned: weakref.WeakKeyDictionary[object, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def prepare(sock: Any) -> None:
    """Prepare a connected TCP socket: no delays, and a peer gone without a word is noticed in half a minute."""
    with contextlib.suppress(OSError):  # it may have been closed already; its owner will notice
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 15),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 30_000),
        ):
            option = getattr(socket, name, None)  # macOS has other names and its own defaults
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def let_go_in_children(owner: object, *socks: Any) -> None:
    """Remember the sockets of `owner`, in case the process forks. Call `forget` when they are closed."""
    _owned[owner] = socks


def forget(owner: object) -> None:
    """The sockets of `owner` are closed. Some stand-ins keep the number, which may soon be another file's."""
    _owned.pop(owner, None)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


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
