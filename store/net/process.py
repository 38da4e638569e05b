"""The identity of this process and of its loopback network."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import socket
from pathlib import Path

from store.errors import StoreUsageError, UsedAfterFork

_id = os.urandom(16)


def process_identity() -> bytes:
    """Return 16 random bytes, constant for the life of this process; a forked child has its own."""
    return _id


def check_not_forked(made_in: bytes, name: str) -> None:
    """Raise `UsedAfterFork` if a client was made before the `fork()` of this process."""
    if made_in is not _id:
        raise UsedAfterFork(f"this client of {name} was made before fork(); make a new one in the child")


def check_loop(loop: asyncio.AbstractEventLoop | None, name: str) -> None:
    """Raise `StoreUsageError` if `loop`, the client's event loop, is not the running one."""
    if loop is not asyncio.get_running_loop():
        raise StoreUsageError(
            f"this client of {name} is used outside the event loop that it was opened in: use it there, by "
            "asyncio.run_coroutine_threadsafe, or store.sync in a thread without a loop"
        )


def host_name() -> str:
    """Return this machine's name in printable letters without "/", as it becomes part of keys and of UTF-8 values."""
    return "".join(letter if letter.isprintable() and letter != "/" else "-" for letter in socket.gethostname())


@functools.cache
def loopback_id() -> str:
    """Return an id of this process's loopback network; processes that share the network have the same id."""
    try:
        # Both parts are needed: containers of one host share its boot id, and different hosts use equal network ids.
        where = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/net").readlink())
    except OSError:
        where = host_name()
    return hashlib.sha256(where.encode()).hexdigest()[:8]


def _renew_identity() -> None:
    global _id
    _id = os.urandom(16)
    loopback_id.cache_clear()  # a forked child may enter another network namespace


os.register_at_fork(after_in_child=_renew_identity)
