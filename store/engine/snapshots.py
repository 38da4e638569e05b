"""Reads many keys at one revision, in parts, while clients write (promises S6, S11).

A snapshot shares chunks of the index. The index copies a chunk before changing it. `OldEntries` keeps the earlier
entries that a snapshot may still read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from store.engine.keyspace import ENTRY_OVERHEAD, KeyChunk, entry_answer_bytes
from store.messages import key_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from store.engine.keyspace import Keyspace
    from store.messages import Entry

STEP_KEYS = 2048  # keys read in one step: 0.5 ms
PART_BYTES = 256 * 1024  # the most bytes of a part of an answer, unless one entry is larger
NAME_OVERHEAD = 80  # bytes counted per requested key, besides its size
FORGOTTEN_AT_ONCE = 2048  # earlier entries freed in one step: 1 ms

_revision = itemgetter(0)


class OldEntries:
    """Earlier entries of changed keys, for snapshots and postponed waits; the oldest are freed first."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._before: dict[str, list[tuple[int, Entry | None]]] = {}  # by key: (revision of a change, entry before it)
        self._order: deque[tuple[int, str]] = deque()

    def __bool__(self) -> bool:
        return bool(self._order)

    def keep(self, key: str, before: Entry | None, revision: int) -> None:
        """Keep `before`, the entry of a key that `revision` is about to change."""
        self._before.setdefault(key, []).append((revision, before))
        self._order.append((revision, key))

    def entry_at(self, key: str, revision: int) -> Entry | None:
        """Return the entry that a key had at a revision."""
        noted = self._before.get(key)
        if noted is not None and (place := bisect_right(noted, revision, key=_revision)) < len(noted):
            return noted[place][1]
        return self.entries.get(key)

    def changed_keys_after(self, names: set[str], revision: int) -> dict[int, list[str]]:
        """Map each revision after `revision` that changed some of these keys to the changed keys."""
        later: dict[int, list[str]] = {}
        for name in names & self._before.keys():
            noted = self._before[name]
            for changed_at, _ in noted[bisect_right(noted, revision, key=_revision) :]:
                later.setdefault(changed_at, []).append(name)
        return later

    def free(self, until: float) -> bool:
        """Free some entries that revisions up to `until` replaced; return True if more are left."""
        for _ in range(FORGOTTEN_AT_ONCE):
            if not self._order or self._order[0][0] > until:
                return False
            _, key = self._order.popleft()
            noted = self._before[key]
            del noted[0]
            if not noted:
                del self._before[key]
        return bool(self._order) and self._order[0][0] <= until


@dataclass(slots=True, eq=False, repr=False)
class Snapshot:
    """Entries at one revision, and the progress of reading them."""

    past: OldEntries
    chunks: deque[KeyChunk]
    place: int  # index of the next unread key in the first chunk
    left: int
    revision: int
    given: list[Entry | None] | None = None  # the entries of named keys; None for a prefix
    bytes: int = 0  # counted for the named keys
    reader: int = 0
    counted_from: int = 0  # bytes ever kept for snapshots when this one began

    @classmethod
    def from_prefix(cls, keys: Keyspace, past: OldEntries, prefix: str) -> Snapshot:
        """Return a snapshot of the keys under a prefix."""
        chunks, place, count = keys.index.chunks_under(prefix)
        return cls(past, deque(chunks), place=place, left=count, revision=keys.revision)

    @classmethod
    def of_keys(cls, keys: Keyspace, past: OldEntries, names: tuple[str, ...], entries: list[Entry | None]) -> Snapshot:
        """Return a snapshot of these keys."""
        size = sum(map(key_size, names)) + NAME_OVERHEAD * len(names)
        chunks = deque([KeyChunk(names)])
        return cls(past, chunks, place=0, left=len(entries), revision=keys.revision, given=entries, bytes=size)

    def next_part(self) -> list[Entry | None]:
        """Return the next unread entries, with None for each named key that does not exist."""
        part: list[Entry | None] = []
        size = 0
        while self.left and len(part) < STEP_KEYS:
            chunk, place = self.chunks[0], self.place
            upto = min(len(chunk), place + self.left, place + STEP_KEYS - len(part))
            if self.given is not None:
                found = self.given[place:upto]
            elif self.past:
                found = [self.past.entry_at(key, self.revision) for key in chunk[place:upto]]
            else:
                found = [self.past.entries[key] for key in chunk[place:upto]]
            for entry in found:
                size += entry_answer_bytes(entry)
                if part and size > PART_BYTES:
                    return part
                part.append(entry)
                self.place += 1
                self.left -= 1
            if self.place == len(chunk):
                self.chunks.popleft()
                self.place = 0
        return part

    def free_in_steps(self) -> Iterator[None]:
        """Free the snapshot's memory in steps."""
        while self.chunks:
            self.chunks.popleft()
            yield


class Snapshots:
    """The snapshots that are being read, oldest first, and the bytes kept only for them."""

    def __init__(self, keys: Keyspace) -> None:
        self._keys = keys
        self.unread: dict[Snapshot, None] = {}  # a set, in the order of revisions
        self._counted = 0  # bytes of all earlier entries and chunks ever kept for snapshots
        self._own = 0  # the sum of `Snapshot.bytes` of the unread snapshots

    @property
    def oldest_snapshot(self) -> Snapshot | None:
        """The oldest snapshot in progress, for which most memory is kept."""
        return next(iter(self.unread), None)

    @property
    def held_bytes(self) -> int:
        """An upper bound of the bytes kept only for snapshots: entries and chunks replaced since the oldest began."""
        oldest = self.oldest_snapshot
        return 0 if oldest is None else self._own + self._counted - oldest.counted_from

    def register(self, snapshot: Snapshot, *, reader: int) -> None:
        """Keep the entries of a snapshot, read by the peer `reader`, until `unregister`."""
        if snapshot not in self.unread:
            self.unread[snapshot] = None
            self._own += snapshot.bytes
            snapshot.reader, snapshot.counted_from = reader, self._counted

    def unregister(self, snapshot: Snapshot) -> None:
        """Unregister a snapshot that was read or dropped."""
        if self.unread.pop(snapshot, self) is None:
            self._own -= snapshot.bytes

    def preserve_for_snapshots(self, key: str, before: Entry | None, *, index_changes: bool) -> bool:
        """For snapshots, keep a key's chunk if the index changes; return True if a snapshot may still read `before`."""
        newest = next(reversed(self.unread)).revision
        if index_changes:
            shared = self._keys.index.copy_shared_chunk(key, shared_until=newest, revision=self._keys.revision + 1)
            if shared is not None:
                self._counted += shared.__sizeof__()
        if before is None or before.mod_revision > newest:
            return False
        self._counted += ENTRY_OVERHEAD + key_size(key) + len(before.value)
        return True
