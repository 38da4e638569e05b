"""The frames that wait for one peer, in order, and their memory.

Frames that may be sent (`ready`) precede frames that are `held` until the step of their number is on disk.
`Outbox.bytes` includes the transport's unsent bytes. Large frames that differ only in their heads share their other
bytes, which the sum of all outboxes counts once.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from store.engine.sessions import ByteCount

# The most bytes handed to a transport at once. While a peer has more bytes of unsent answers, its requests wait.
PIECE_BYTES = 256 * 1024

_number = itemgetter(0)


def frame_memory(size: int) -> int:
    """Return the memory of a frame, with bookkeeping and a quarter more for the allocator."""
    return size + (size >> 2) + 64


class SharedChunks:
    """Bytes, in chunks, that several outboxes share."""

    __slots__ = ("__weakref__", "chunks", "holders", "size")

    def __init__(self, chunks: tuple[bytes, ...]) -> None:
        self.chunks: tuple[bytes, ...] = chunks
        self.size: int = sum(map(len, chunks))
        self.holders: int = 0  # frames in outboxes that have these chunks


class SharedFrame:
    """A frame with a head of its own, and shared bytes."""

    __slots__ = ("_head", "_rest")

    def __init__(self, head: bytes, rest: SharedChunks) -> None:
        self._head, self._rest = head, rest

    def __len__(self) -> int:
        return len(self._head) + self._rest.size

    def slice(self, start: int, end: int) -> bytes | memoryview:
        """Return the bytes from `start` to `end`, without a copy if possible."""
        pieces: list[memoryview] = []
        for chunk in (self._head, *self._rest.chunks):
            if start < len(chunk) and end > 0:
                pieces.append(memoryview(chunk)[max(start, 0) : end])
            start, end = start - len(chunk), end - len(chunk)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def hold(self, more: int) -> int:
        """Note that one outbox more (1) or less (-1) holds the frame; return the change of all outboxes' bytes."""
        is_last = self._rest.holders == (0 if more > 0 else 1)
        self._rest.holders += more
        return more * (frame_memory(len(self._head)) + is_last * frame_memory(self._rest.size))


Frame: TypeAlias = bytes | SharedFrame


class Outbox:
    """The frames that wait for one peer; `budget` sums the bytes of all outboxes."""

    __slots__ = ("_budget", "_cut", "_handed", "bytes", "held", "ready")

    def __init__(self, budget: ByteCount) -> None:
        self._budget = budget
        # `ready` and `held` are lists: an empty deque takes 760 bytes.
        self.ready: list[Frame] = []
        self.held: list[tuple[int, Frame]] = []
        self._cut = 0  # bytes of the first frame that were taken already
        self._handed = 0  # unsent bytes of the transport, if full
        self.bytes: int = 0

    def queue(self, frame: Frame) -> None:
        """Queue a frame after the ready ones, before held ones."""
        self.ready.append(frame)
        self._count_frame(frame, 1)

    def hold(self, frame: Frame, number: int) -> None:
        """Queue a frame at the end, to be held until step `number` is on disk."""
        self.held.append((max(number, self.held[-1][0] if self.held else 0), frame))
        self._count_frame(frame, 1)

    def release_held(self, number: int) -> bool:
        """Make frames ready that were held for steps up to `number`; return whether others are still held."""
        count = bisect_right(self.held, number, key=_number)
        self.ready += [frame for _, frame in self.held[:count]]
        del self.held[:count]
        return bool(self.held)

    def take_piece(self) -> bytes | memoryview:
        """Remove and return about `PIECE_BYTES` of the ready frames."""
        if len(self.ready[0]) > PIECE_BYTES:
            return self._take_frame_part(self.ready[0])
        count = taken = 0
        for frame in self.ready:
            if count and taken + len(frame) >= PIECE_BYTES:
                break
            count += 1
            taken += frame_memory(len(frame))
            self._count_frame(frame, -1)
        frames = [frame if isinstance(frame, bytes) else frame.slice(0, len(frame)) for frame in self.ready[:count]]
        del self.ready[:count]
        return frames[0] if count == 1 else b"".join(frames)

    def _take_frame_part(self, frame: Frame) -> bytes | memoryview:
        start, self._cut = self._cut, self._cut + PIECE_BYTES
        part = memoryview(frame)[start : self._cut] if isinstance(frame, bytes) else frame.slice(start, self._cut)
        if self._cut >= len(frame):
            self._cut = 0
            del self.ready[0]
            self._count_frame(frame, -1)
        return part

    def note_unsent(self, size: int) -> None:
        """Note how many bytes the transport has not sent."""
        self.bytes += size - self._handed
        self._budget.bytes += size - self._handed
        self._handed = size

    def clear(self, *, but_begun: bool = False) -> None:
        """Drop the frames; with `but_begun`, keep the rest of a frame that is partly sent."""
        begun = self.ready[:1] if but_begun and self._cut else []
        for frame in (*self.ready[len(begun) :], *(frame for _, frame in self.held)):
            self._count_frame(frame, -1)
        self.ready = begun
        self.held.clear()
        self._cut = self._cut if begun else 0

    def _count_frame(self, frame: Frame, more: int) -> None:
        size = more * frame_memory(len(frame))
        self.bytes += size
        self._budget.bytes += size if isinstance(frame, bytes) else frame.hold(more)
