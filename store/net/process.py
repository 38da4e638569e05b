"""Shell: who this process is to others: its random identity, and whose loopback it shares.

By the identity a server knows which connections are of one process (R20), and a client that it was inherited.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from pathlib import Path

from store.errors import UsedAfterFork

__all__ = ["check_made_here", "loopback_id", "process_id"]

_id = os.urandom(16)


def process_id() -> bytes:
    """16 random bytes, the same for as long as this process lives; a child that it forks has others."""
    return _id


def check_made_here(made_in: bytes, name: str) -> None:
    """Refuse to use the client of a store of this name in a process that was forked from the one that it was made in.

    Raises:
        UsedAfterFork: So it is.
    """
    if made_in is not _id:
        raise UsedAfterFork(f"this client of {name} was made before fork(); make a new one in the child")


@functools.cache
def loopback_id() -> str:
    """Return what all processes say that share this one's loopback, and as far as can be known no others."""
    try:
        # Containers of one host have one kernel, and each its own loopback; every host numbers its first network alike.
        where = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/net").readlink())
    except OSError:
        where = socket.gethostname()
    return hashlib.sha256(where.encode()).hexdigest()[:8]


def _draw_again() -> None:
    global _id
    _id = os.urandom(16)
    loopback_id.cache_clear()  # a child may go to another network


os.register_at_fork(after_in_child=_draw_again)
