"""Pure: the keys of the store in sorted order, so that a prefix is one stretch of them.

A list of short sorted lists: inserting moves a few hundred pointers rather than a million. Order is by code point,
which is the order of the UTF-8 bytes, and so etcd's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SortedKeys"]

CHUNK_MAX = 1024  # where splitting and searching cost about the same


class SortedKeys:
    """A sorted set of strings with prefix iteration."""

    __slots__ = ("_chunks", "_firsts", "_length")

    def __init__(self) -> None:
        self._chunks: list[list[str]] = []
        self._firsts: list[str] = []  # the first key of each chunk
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, key: str) -> None:
        """Add a key that is not there yet."""
        self._length += 1
        if not self._chunks:
            self._chunks.append([key])
            self._firsts.append(key)
            return
        at = self._chunk_of(key)
        chunk = self._chunks[at]
        insort(chunk, key)
        self._firsts[at] = chunk[0]
        if len(chunk) > CHUNK_MAX:
            half = chunk[CHUNK_MAX // 2 :]
            del chunk[CHUNK_MAX // 2 :]
            self._chunks.insert(at + 1, half)
            self._firsts.insert(at + 1, half[0])

    def remove(self, key: str) -> None:
        """Remove a key that is there."""
        at = self._chunk_of(key)
        chunk = self._chunks[at]
        place = bisect_left(chunk, key)
        assert chunk[place] == key, f"{key!r} is not in the index"
        del chunk[place]
        self._length -= 1
        if chunk:
            self._firsts[at] = chunk[0]
        else:
            del self._chunks[at], self._firsts[at]

    def with_prefix(self, prefix: str) -> Iterator[str]:
        """The keys that start with `prefix`, in order. The index must not change meanwhile."""
        if not self._chunks:
            return
        at = self._chunk_of(prefix)
        place = bisect_left(self._chunks[at], prefix)
        for chunk in self._chunks[at:]:
            for key in chunk[place:] if place else chunk:
                if not key.startswith(prefix):
                    return
                yield key
            place = 0

    def stretch(self, prefix: str, *, after: str | None, most: int) -> list[str]:
        """The first keys, at `most` so many, that start with `prefix` and come after `after`, in order."""
        found: list[str] = []
        if not self._chunks:
            return found
        at = self._chunk_of(prefix if after is None else after)
        place = bisect_left(self._chunks[at], prefix) if after is None else bisect_right(self._chunks[at], after)
        while at < len(self._chunks) and len(found) < most:
            piece = self._chunks[at][place : place + most - len(found)]
            if piece and not piece[-1].startswith(prefix):
                size = len(prefix)
                return found + piece[: bisect_right(piece, prefix, key=lambda key: key[:size])]
            found += piece
            at, place = at + 1, 0
        return found

    def count(self, prefix: str) -> int:
        """How many keys start with `prefix`: the sizes of the chunks between, not a look at each key."""
        if not prefix or not self._chunks:
            return self._length
        size = len(prefix)

        def start(key: str) -> str:
            return key[:size]

        first = self._chunk_of(prefix)
        last = max(bisect_right(self._firsts, prefix, key=start) - 1, first)
        before = bisect_left(self._chunks[first], prefix)
        upto = bisect_right(self._chunks[last], prefix, key=start)
        return sum(map(len, self._chunks[first:last])) + upto - before

    def _chunk_of(self, key: str) -> int:
        """Which chunk holds `key`, or would."""
        at = bisect_left(self._firsts, key)
        if at < len(self._firsts) and self._firsts[at] == key:
            return at
        return max(at - 1, 0)
