"""Finds gloo's sockets in this process, and shuts them down.

If a peer is killed, a gloo collective fails only on its neighbours. The other members wait for the group's timeout, and
PyTorch's abort (2.13) does not end their wait. Once the group's sockets are shut down, every collective on the group
raises `RuntimeError: ... Connection closed by peer`.

Other libraries may open sockets at any time, so gloo's sockets are recognised by their addresses. The members exchange,
in the group's store, the addresses where they listen. A socket is gloo's if one of its ends is an exchanged address.

A listening socket is never shut down, as gloo aborts the process when accept fails. Descriptors are read by system
calls: after `socket.setdefaulttimeout`, a `socket.socket` makes its descriptor non-blocking for all owners.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from typing import Final

Address = tuple[int, bytes]  # a port, and an address of 4 or 16 bytes

STORAGE_BYTES: Final = 128  # the size of a `sockaddr_storage`
ADDRESS_BYTES: Final = STORAGE_BYTES + 8  # the size of a gloo address: a `sockaddr_storage`, and a number
_libc: Final = ctypes.CDLL(None, use_errno=True)
HOST_BYTES_MAX: Final = 256  # the longest host name before a gloo address


class GlooSocketCloser:
    """The sockets of the gloo groups that exchange addresses through one store."""

    def __init__(self) -> None:
        self._addresses: set[Address] = set()

    def note_address(self, value: str | bytes) -> None:
        """Record the address of a member's gloo if this value of the store contains one."""
        if isinstance(value, bytes) and len(value) > ADDRESS_BYTES and (address := _value_address(value)) is not None:
            self._addresses.add(address)

    def shut_down(self) -> None:
        """Shut down the connections with a recorded address at one end; thread-safe."""
        for name in os.listdir("/dev/fd"):
            # Check and shut down a duplicate of the descriptor, as the original may be closed and reused meanwhile.
            with contextlib.suppress(OSError):
                copy = os.dup(int(name))
                try:
                    if stat.S_ISSOCK(os.fstat(copy).st_mode) and self._is_gloo_socket(copy):
                        _libc.shutdown(copy, socket.SHUT_RDWR)
                finally:
                    os.close(copy)

    def _is_gloo_socket(self, number: int) -> bool:
        peer = _socket_address(number, "getpeername")  # None for a listening socket
        return peer is not None and not self._addresses.isdisjoint((peer, _socket_address(number, "getsockname")))


def _value_address(value: bytes) -> Address | None:
    """Return the address in a member's value: host name, address, and more, each after its length."""
    host = int.from_bytes(value[:8], sys.byteorder)
    if host <= HOST_BYTES_MAX and value[8 + host : 16 + host] == ADDRESS_BYTES.to_bytes(8, sys.byteorder):
        return _parse_sockaddr(value[16 + host :])
    return None


def _parse_sockaddr(storage: bytes) -> Address | None:
    family = storage[1] if sys.platform == "darwin" else int.from_bytes(storage[:2], sys.byteorder)
    (port,) = struct.unpack_from("!H", storage, 2)
    if family == socket.AF_INET:
        return (port, storage[4:8])
    return (port, storage[8:24]) if family == socket.AF_INET6 else None


def _socket_address(number: int, end: str) -> Address | None:
    storage = ctypes.create_string_buffer(STORAGE_BYTES)
    failed = getattr(_libc, end)(number, storage, ctypes.byref(ctypes.c_uint(STORAGE_BYTES)))
    return None if failed else _parse_sockaddr(storage.raw)
