"""Pure: reading many keys at one revision, in parts, while others write (promises S6, S11).

A snapshot holds only the index chunks that it reads. Before a key is added to such a chunk or removed, the index copies
the chunk; earlier entries of changed keys are noted (`past`). So a write pays once, however many read.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from store.engine.keyspace import ENTRY_OVERHEAD, Chunk, answer_bytes
from store.messages import key_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from store.engine.keyspace import Keyspace
    from store.engine.past import Past
    from store.messages import Entry

STEP_KEYS = 2048  # per step: about half a millisecond
PART_BYTES = 256 * 1024  # of one part, to keep its frame small
NAME_OVERHEAD = 80  # bytes per requested name: the text, and a place in two lists


@dataclass(slots=True, eq=False)
class Snapshot:
    """Entries at one revision, and the progress of reading them."""

    past: Past
    chunks: deque[Chunk]
    place: int  # in the first chunk
    left: int  # keys to be read
    revision: int
    given: list[Entry | None] | None = None  # the entries of the only chunk
    bytes: int = 0  # of requested names
    reader: int = 0
    counted_from: int = 0  # `Snapshots._counted` when this snapshot began

    @classmethod
    def under(cls, keys: Keyspace, past: Past, prefix: str) -> Snapshot:
        """Return a snapshot of the keys under a prefix."""
        chunks, place, count = keys.index.under(prefix)
        return cls(past, deque(chunks), place=place, left=count, revision=keys.revision)

    @classmethod
    def of(cls, keys: Keyspace, past: Past, names: tuple[str, ...], entries: list[Entry | None]) -> Snapshot:
        """Return a snapshot of these keys."""
        size = sum(map(key_bytes, names)) + NAME_OVERHEAD * len(names)
        chunks = deque([Chunk(names)])
        return cls(past, chunks, place=0, left=len(entries), revision=keys.revision, given=entries, bytes=size)

    def part(self) -> list[Entry | None]:
        """Return the next entries; under a prefix, none is None."""
        part: list[Entry | None] = []
        size = 0
        while self.left and len(part) < STEP_KEYS:
            chunk, place = self.chunks[0], self.place
            upto = min(len(chunk), place + self.left, place + STEP_KEYS - len(part))
            if self.given is not None:
                found = self.given[place:upto]
            elif self.past:
                found = [self.past.as_of(key, self.revision) for key in chunk[place:upto]]
            else:
                found = [self.past.entries[key] for key in chunk[place:upto]]
            for entry in found:
                size += answer_bytes(entry)
                if part and size > PART_BYTES:
                    return part
                part.append(entry)
                self.place += 1
                self.left -= 1
            if self.place == len(chunk):
                self.chunks.popleft()
                self.place = 0
        return part

    def let_go(self) -> Iterator[None]:
        """Free the memory in steps: it may be as large as the store."""
        while self.chunks:
            self.chunks.popleft()
            yield


class Snapshots:
    """The snapshots in progress, oldest first, and the memory kept for them alone."""

    def __init__(self, keys: Keyspace) -> None:
        self._keys = keys
        self.unread: dict[Snapshot, None] = {}
        self._newest = -1  # the revision of the newest
        self._counted = 0  # bytes ever kept for snapshots alone ...
        self._own = 0  # ... and the `bytes` of the unread ones

    @property
    def held_bytes(self) -> int:
        """The most that the snapshots hold alone: everything replaced since the oldest began."""
        oldest = next(iter(self.unread), None)
        return 0 if oldest is None else self._own + self._counted - oldest.counted_from

    @property
    def oldest_revision(self) -> float:
        """The first revision that is still read; infinite if none is."""
        oldest = next(iter(self.unread), None)
        return math.inf if oldest is None else oldest.revision

    @property
    def oldest_reader(self) -> int | None:
        """The peer of the oldest snapshot, which holds most."""
        oldest = next(iter(self.unread), None)
        return None if oldest is None else oldest.reader

    def begin(self, snapshot: Snapshot, *, reader: int) -> None:
        """Keep the entries of a snapshot until its end."""
        if snapshot not in self.unread:
            self.unread[snapshot] = None
            self._own += snapshot.bytes
            self._newest = snapshot.revision
            snapshot.reader, snapshot.counted_from = reader, self._counted

    def end(self, snapshot: Snapshot) -> None:
        """End a snapshot that was read or dropped."""
        if self.unread.pop(snapshot, self) is None:
            self._own -= snapshot.bytes
            newest = next(reversed(self.unread), None)  # `unread` is in the order of revisions
            self._newest = -1 if newest is None else newest.revision

    def changing(self, key: str, before: Entry | None, *, index_changes: bool) -> bool:
        """Keep a key's chunk for snapshots before the key changes; return True if they read `before`, too."""
        if index_changes:
            keys = self._keys
            shared = keys.index.renew_chunk_of(key, shared_until=self._newest, revision=keys.revision + 1)
            if shared is not None:
                self._counted += shared.__sizeof__()
        if before is None or before.mod_revision > self._newest:
            return False
        self._counted += ENTRY_OVERHEAD + key_bytes(key) + len(before.value)
        return True
