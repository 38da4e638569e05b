"""Sans-I/O: cuts a stream of bytes into frames: four bytes of length, big-endian, and a body."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from store.errors import LimitExceeded, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

_length = struct.Struct(">I")


class FrameReader:
    """Cuts a stream of bytes into frame bodies of at most `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._held = bytearray()
        self._wanted = 0  # bytes needed for the next frame, as far as known

    @property
    def held_bytes(self) -> int:
        """The received bytes of an incomplete frame."""
        return len(self._held)

    def single_frame(self, data: bytes) -> bytes | None:
        """Return the body if the bytes are exactly one frame; otherwise None, and the caller calls `feed`."""
        size = len(data) - 4
        if self._held or not 0 <= size <= self.bytes_max or _length.unpack_from(data) != (size,):
            return None
        return data[4:]

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        """Take bytes, and yield the complete bodies, which are valid until the next call.

        The caller exhausts the iterator before it calls `feed` again. Raise `ProtocolError` if a frame is too long.
        """
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:  # wait for the whole frame: else each piece would copy the earlier ones
                return
            data, self._held = self._held, bytearray()
        view = memoryview(data)
        at, end = 0, len(view)
        self._wanted = 4
        while end - at >= 4:
            (size,) = _length.unpack_from(view, at)
            if size > self.bytes_max:
                raise ProtocolError(_foreign_bytes_error(bytes(view[at : at + 8]), size, self.bytes_max))
            if end - at - 4 < size:
                self._wanted = 4 + size
                break
            yield view[at + 4 : at + 4 + size]
            at += 4 + size
        if at < end:
            self._held = bytearray(view[at:])


def _foreign_bytes_error(start: bytes, size: int, bytes_max: int) -> str:
    if start[:2] == b"\x16\x03":
        return "a TLS hello on a port without TLS: use tcp:// for this server, or start it with a certificate"
    if start[:1] in (b"\x15", b"\x14") and start[1:2] == b"\x03":
        return "a TLS record on a connection without TLS: use tcps:// for this server"
    if start[:4] in (b"GET ", b"POST", b"HEAD", b"PUT ", b"HTTP", b"OPTI"):
        return "HTTP on a port that speaks the rdzv protocol"
    return f"a frame of {size} bytes is announced, and {bytes_max} is the limit: not the protocol, or too much of it"


def frame(body: bytes, bytes_max: int | None = None) -> bytes:
    """Return a body as a frame; `LimitExceeded` if it is longer than `bytes_max`: the peer would disconnect."""
    size = len(body)
    if bytes_max is not None and size > bytes_max:
        raise LimitExceeded(
            f"the message has {size} bytes; the server takes frames of {bytes_max} (frame_bytes_max): "
            f"send less at once, or start the server with a higher limit"
        )
    return _length.pack(size) + body
