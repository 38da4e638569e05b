"""Pure: reading many keys as they are at one revision, in parts, while others write (promises S6, S11).

Entries never change: a change puts another one in the place of one. So a snapshot only holds on to the chunks of the
index that it reads. Before a key comes or goes in a chunk that is still read, the index goes on with a copy of it; what
a key held before it was changed is noted (`past`). So a write pays once, however many read. What of all that is no
longer the store's own is counted.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from store.engine.keyspace import ENTRY_OVERHEAD, Chunk, answer_bytes
from store.messages import key_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from store.engine.keyspace import Keyspace
    from store.engine.past import Past
    from store.messages import Entry

__all__ = ["PART_BYTES", "STEP_KEYS", "Snapshot", "Snapshots"]

STEP_KEYS = 2048  # given at once: about half a millisecond
PART_BYTES = 256 * 1024  # of one part, so that its frame stays small
NAME_OVERHEAD = 80  # bytes of bookkeeping per name that was asked for: the text, and a place in two lists


class Snapshot:
    """Some entries as they are at one revision, in order, and which of them were read.

    Attributes:
        revision: Of which they are.
        reader: The peer that reads them, once they are kept for it.
        counted_from: How much had been counted when they began to be kept.
        bytes: What it takes by itself: the names that were asked for, one by one.
    """

    __slots__ = ("_chunks", "_given", "_left", "_past", "_place", "bytes", "counted_from", "reader", "revision")

    def __init__(self, past: Past, chunks: Iterable[Chunk], *, place: int, count: int, revision: int) -> None:
        self._past = past
        self._chunks = deque(chunks)
        self._given: list[Entry | None] | None = None  # what the keys of the only chunk hold
        self._place = place  # in the first of them
        self._left = count
        self.revision: int = revision
        self.reader: int = 0
        self.counted_from: int = 0
        self.bytes: int = 0

    @classmethod
    def under(cls, keys: Keyspace, past: Past, prefix: str) -> Snapshot:
        """What lies under a prefix."""
        chunks, place, count = keys.index.under(prefix)
        return cls(past, chunks, place=place, count=count, revision=keys.revision)

    @classmethod
    def of(cls, keys: Keyspace, past: Past, names: tuple[str, ...], entries: list[Entry | None]) -> Snapshot:
        """What these keys hold."""
        snapshot = cls(past, [Chunk(names)], place=0, count=len(entries), revision=keys.revision)
        snapshot._given = entries
        snapshot.bytes = sum(map(key_bytes, names)) + NAME_OVERHEAD * len(names)
        return snapshot

    @property
    def done(self) -> bool:
        """Whether all was read."""
        return not self._left

    def part(self) -> list[Entry | None]:
        """The next entries; those under a prefix are there, each of them."""
        part: list[Entry | None] = []
        size = 0
        while self._left and len(part) < STEP_KEYS:
            chunk, place = self._chunks[0], self._place
            upto = min(len(chunk), place + self._left, place + STEP_KEYS - len(part))
            if self._given is not None:
                found = self._given[place:upto]
            elif self._past:
                found = [self._past.as_of(key, self.revision) for key in chunk[place:upto]]
            else:
                found = [self._past.entries[key] for key in chunk[place:upto]]
            for entry in found:
                size += answer_bytes(entry)
                if part and size > PART_BYTES:
                    return part
                part.append(entry)
                self._place += 1
                self._left -= 1
            if self._place == len(chunk):
                self._chunks.popleft()
                self._place = 0
        return part

    def let_go(self) -> Iterator[None]:
        """Hold on to nothing any more, in steps: what has been overwritten since may be all that there was."""
        while self._chunks:
            self._chunks.popleft()
            yield


class Snapshots:
    """All that are being read, and what is kept for them alone.

    Attributes:
        unread: Those that are not read to their end, the oldest first.
    """

    def __init__(self, keys: Keyspace) -> None:
        self._keys = keys
        self.unread: dict[Snapshot, None] = {}
        self._newest = -1  # the revision of the last of them
        self._counted = 0  # bytes of all that was ever kept for a snapshot alone ...
        self._own = 0  # ... and of those that are unread, what each takes by itself

    @property
    def held_bytes(self) -> int:
        """What they hold that is not the store's own any more, at most: all that went since the oldest has begun."""
        oldest = next(iter(self.unread), None)
        return 0 if oldest is None else self._own + self._counted - oldest.counted_from

    @property
    def oldest_revision(self) -> float:
        """The first revision that is still read; infinite if none is."""
        oldest = next(iter(self.unread), None)
        return math.inf if oldest is None else oldest.revision

    @property
    def oldest_reader(self) -> int | None:
        """Who reads the one that has been there for longest, and so makes for most of it."""
        oldest = next(iter(self.unread), None)
        return None if oldest is None else oldest.reader

    def begin(self, snapshot: Snapshot, *, reader: int) -> None:
        """Keep what this one has not read, until its end."""
        if snapshot not in self.unread:
            self.unread[snapshot] = None
            self._own += snapshot.bytes
            self._newest = snapshot.revision
            snapshot.reader, snapshot.counted_from = reader, self._counted

    def end(self, snapshot: Snapshot) -> None:
        """This one has read all, or is read no further."""
        if self.unread.pop(snapshot, self) is None:
            self._own -= snapshot.bytes
            newest = next(reversed(self.unread), None)  # they begin in the order of their revisions
            self._newest = -1 if newest is None else newest.revision

    def changing(self, key: str, before: Entry | None, *, index_changes: bool) -> bool:
        """Keep what is read of a key's chunk before the key is changed; return whether `before` is read, too.

        `before` is what the key holds. `index_changes` says whether the key comes or goes.
        """
        if index_changes:
            keys = self._keys
            shared = keys.index.renew_chunk_of(key, shared_until=self._newest, revision=keys.revision + 1)
            if shared is not None:
                self._counted += shared.__sizeof__()
        if before is None or before.mod_revision > self._newest:
            return False
        self._counted += ENTRY_OVERHEAD + key_bytes(key) + len(before.value)
        return True
