"""Shell: which of this process's sockets are gloo's, and how they are shut down.

A gloo collective whose peer was killed fails by itself on the peer's neighbours only; the others wait until the group's
timeout, and PyTorch's own abort changes nothing about that (2.13). What ends it at once is to shut down the sockets
that the group has connected: then every collective on it raises `RuntimeError: ... Connection closed by peer`.

Gloo's sockets are known by their addresses, and never by when they came: other libraries of the process open sockets at
any time. Each member of a group listens at an address of its own, which it writes into the group's store, and reads
those of the others from there. So a socket is gloo's if one of its two ends is such an address. That holds for every
group over that store, whoever makes it. Where the addresses cannot be read, all sockets are left alone.

A listening socket is never touched: gloo aborts the process when its accept fails. Descriptors are looked at by the
system's own calls, since a `socket.socket` made of one makes it non-blocking for all who have it, where somebody has
called `socket.setdefaulttimeout`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import stat
import struct
import sys
from typing import Any, Final

__all__ = ["GlooSockets"]

Address = tuple[int, bytes]  # a port, and an address of 4 or 16 bytes

STORAGE_BYTES: Final = 128  # of a `sockaddr_storage`
ADDRESS_BYTES: Final = STORAGE_BYTES + 8  # gloo's own: that, and a number
HOST_BYTES_MAX: Final = 256  # of a name that comes before an address


class GlooSockets:
    """The sockets of the gloo groups whose addresses pass through one store."""

    def __init__(self) -> None:
        self._addresses: set[Address] = set()

    def heed(self, value: str | bytes) -> None:
        """Look at a value that was written or read: whether it says at what address a member's gloo listens."""
        if isinstance(value, bytes) and len(value) > ADDRESS_BYTES and (address := _listens_at(value)) is not None:
            self._addresses.add(address)

    def shut_down(self) -> None:
        """End the connections between these addresses; from any thread."""
        for name in os.listdir("/dev/fd"):
            # A copy, so that the descriptor which was looked at is the one that is shut down; closed since: no matter.
            with contextlib.suppress(OSError):
                copy = os.dup(int(name))
                try:
                    if stat.S_ISSOCK(os.fstat(copy).st_mode) and self._is_gloos(copy):
                        _libc().shutdown(copy, socket.SHUT_RDWR)
                finally:
                    os.close(copy)

    def _is_gloos(self, number: int) -> bool:
        peer = _address_of(number, "getpeername")  # None of one that listens
        return peer is not None and not self._addresses.isdisjoint((peer, _address_of(number, "getsockname")))


def _listens_at(value: bytes) -> Address | None:
    """The address in what a member writes of itself: its host's name, that, and more, each behind its length."""
    host = int.from_bytes(value[:8], sys.byteorder)
    if host <= HOST_BYTES_MAX and value[8 + host : 16 + host] == ADDRESS_BYTES.to_bytes(8, sys.byteorder):
        return _address_in(value[16 + host :])
    return None


def _address_in(storage: bytes) -> Address | None:
    """The address that a `sockaddr_storage` says; None if it is not of the internet."""
    family = storage[1] if sys.platform == "darwin" else int.from_bytes(storage[:2], sys.byteorder)
    (port,) = struct.unpack_from("!H", storage, 2)
    if family == socket.AF_INET:
        return (port, storage[4:8])
    return (port, storage[8:24]) if family == socket.AF_INET6 else None


def _address_of(number: int, end: str) -> Address | None:
    storage = ctypes.create_string_buffer(STORAGE_BYTES)
    length = ctypes.c_uint(STORAGE_BYTES)
    failed = getattr(_libc(), end)(number, storage, ctypes.byref(length))
    return None if failed else _address_in(storage.raw)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
