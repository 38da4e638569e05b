"""Pure: what waits to be sent to one peer, in order, and what all of it together takes.

First comes what may be sent now, then what is held until the journal has come so far. A transport is handed one piece
at a time, since what it holds it copies; what it has not got rid of counts as waiting, too. Frames of several peers
that differ in their heads alone share the rest: each outbox counts it, and all of them together count it once.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from store.engine.sessions import Budget

__all__ = ["PIECE_BYTES", "Frame", "Outbox", "Shared", "SharedFrame", "weight"]

# What a transport is handed at once, and how far one peer's answers may run ahead of its reading.
PIECE_BYTES = 256 * 1024

_number = itemgetter(0)  # of a frame that is held


def weight(size: int) -> int:
    """What a frame of so many bytes counts as in an outbox.

    With its bookkeeping, and a quarter for what the allocator loses between frames, which has been seen to be an
    eighth: a limit that is met by the bytes alone is passed by the memory that they take.
    """
    return size + (size >> 2) + 64


class Shared:
    """Bytes, in chunks, that the frames of several outboxes end with."""

    __slots__ = ("__weakref__", "chunks", "holders", "size")

    def __init__(self, chunks: tuple[bytes, ...]) -> None:
        self.chunks: tuple[bytes, ...] = chunks
        self.size: int = sum(map(len, chunks))
        self.holders: int = 0  # frames that wait in an outbox


class SharedFrame:
    """A frame of a head of its own and of shared bytes."""

    __slots__ = ("_head", "_rest")

    def __init__(self, head: bytes, rest: Shared) -> None:
        self._head, self._rest = head, rest

    def __len__(self) -> int:
        return len(self._head) + self._rest.size

    def part(self, start: int, end: int) -> bytes | memoryview:
        """Return a part of it, without a copy if it lies in one chunk."""
        pieces: list[memoryview] = []
        for chunk in (self._head, *self._rest.chunks):
            if start < len(chunk) and end > 0:
                pieces.append(memoryview(chunk)[max(start, 0) : end])
            start, end = start - len(chunk), end - len(chunk)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def hold(self, more: int) -> int:
        """Let one outbox more, or less, hold it; return what that adds to what all of them hold together."""
        is_last = self._rest.holders == (0 if more > 0 else 1)
        self._rest.holders += more
        return more * (weight(len(self._head)) + is_last * weight(self._rest.size))


Frame: TypeAlias = bytes | SharedFrame


class Outbox:
    """What waits for one peer.

    Args:
        budget: In which it is counted with those of all others.

    Attributes:
        ready: What may be sent now.
        held: What comes after it, each once the journal has come so far.
        bytes: What waits, each frame by its `weight`, and what the transport has not got rid of.
    """

    __slots__ = ("_budget", "_cut", "_handed", "bytes", "held", "ready")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        # Lists: an empty deque takes 760 bytes, and most connections are idle.
        self.ready: list[Frame] = []
        self.held: list[tuple[int, Frame]] = []
        self._cut = 0  # how much of the first frame has been taken
        self._handed = 0
        self.bytes: int = 0

    def queue(self, frame: Frame) -> None:
        """Put a frame after those that may be sent, also before those that are held."""
        self.ready.append(frame)
        self._count(frame, 1)

    def hold(self, frame: Frame, number: int) -> None:
        """Put a frame at the end, to be released once the journal has made this number durable."""
        self.held.append((number, frame))
        self._count(frame, 1)

    def release(self, number: int) -> bool:
        """Release the frames that waited for this number; whether others still wait."""
        count = bisect_right(self.held, number, key=_number)
        self.ready += [frame for _, frame in self.held[:count]]
        del self.held[:count]
        return bool(self.held)

    def take(self) -> bytes | memoryview:
        """The next frames that may be sent, of about one piece; or a piece of one that is larger."""
        if len(self.ready[0]) > PIECE_BYTES:
            return self._take_part(self.ready[0])
        count = taken = 0
        for frame in self.ready:
            if count and taken + len(frame) >= PIECE_BYTES:
                break
            count += 1
            taken += weight(len(frame))
            self._count(frame, -1)
        frames = [frame if isinstance(frame, bytes) else frame.part(0, len(frame)) for frame in self.ready[:count]]
        del self.ready[:count]
        return frames[0] if count == 1 else b"".join(frames)

    def _take_part(self, frame: Frame) -> bytes | memoryview:
        """The next piece of a frame that is larger than one; it counts until the last of it is taken."""
        start, self._cut = self._cut, self._cut + PIECE_BYTES
        part = memoryview(frame)[start : self._cut] if isinstance(frame, bytes) else frame.part(start, self._cut)
        if self._cut >= len(frame):
            self._cut = 0
            del self.ready[0]
            self._count(frame, -1)
        return part

    def handed(self, size: int) -> None:
        """So much of what was taken is still in the hands of the transport."""
        self.bytes += size - self._handed
        self._budget.bytes += size - self._handed
        self._handed = size

    def clear(self, *, but_begun: bool = False) -> None:
        """Forget what waits, but for what the transport has; and, if asked to, the rest of a frame that has begun."""
        begun = self.ready[:1] if but_begun and self._cut else []
        for frame in (*self.ready[len(begun) :], *(frame for _, frame in self.held)):
            self._count(frame, -1)
        self.ready = begun
        self.held.clear()
        self._cut = self._cut if begun else 0

    def _count(self, frame: Frame, more: int) -> None:
        """Count a frame that has come, or gone."""
        size = more * weight(len(frame))
        self.bytes += size
        self._budget.bytes += size if isinstance(frame, bytes) else frame.hold(more)
