"""The keys of the store, their entries, their order, and their memory.

Memory is also counted by group (promise S6): the keys that begin with the same `GROUP_PARTS` parts are a group. The key
`/rdzv/job-7/head/round` is in the group `/rdzv/job-7/`. Keys that coordinate a run (`is_coordination_key`) may exceed
the limits a little: see docs/limits.md.

Keys are ordered by their UTF-8 bytes, in short sorted lists, so that an insert moves few pointers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

from store.messages import Entry, Event, key_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


ENTRY_OVERHEAD = 300  # bytes counted per key, besides key and value
GROUP_PARTS = 2  # parts, between slashes, of a group's name: one group per run
COORDINATION_KEYS = frozenset(  # the part after the group's name, in keys that coordinate a run
    ("answers", "begun", "head", "history", "lease", "nodes", "parent", "rounds", "settings", "tally", "unfit")
)
CHUNK_MAX = 1024  # keys per chunk; at this size, splitting a chunk costs as much as searching one
COMPARED_MOST = 50_000  # groups that `largest_group` compares, the oldest, in about 3 ms

Change = Entry | Event
"""A written key's entry, or an event."""


def events_of(changes: Iterable[Change]) -> tuple[Event, ...]:
    """Return the events of these changes."""
    return tuple([change.event if isinstance(change, Entry) else change for change in changes])


def entry_answer_bytes(entry: Entry | None) -> int:
    """Return the approximate bytes of an entry in an answer."""
    return 1 if entry is None else key_size(entry.key) + len(entry.value) + 40


@dataclass(slots=True, eq=False)
class GroupUsage:
    """The memory of one group's keys. `since`: when the group got its first key, or the server started."""

    name: str
    since: float
    keys: int = 0
    bytes: int = 0


class KeyGroupTable:
    """The groups that hold keys; `now` is the server's clock at the last request."""

    __slots__ = ("_index", "by_name", "now")

    def __init__(self) -> None:
        self.by_name: dict[str, GroupUsage] = {}
        self._index = SortedKeys()
        self.now: float = 0.0

    def group_name_of(self, key: str) -> str | None:
        """Return the name of a key's group, if any."""
        at = 1
        for _ in range(GROUP_PARTS):
            at = key.find("/", at) + 1
            if not at:
                return None
        return key[:at]

    def is_coordination_key(self, key: str) -> bool:
        """Return True if this key coordinates a run (`COORDINATION_KEYS`)."""
        name = self.group_name_of(key)
        return name is not None and key[len(name) :].partition("/")[0] in COORDINATION_KEYS

    def add_usage(self, key: str, keys: int, size: int) -> None:
        """Add keys and bytes, which may be negative, to the group of `key`."""
        name = self.group_name_of(key)
        if name is None:
            return
        group = self.by_name.get(name)
        if group is None:
            group = self.by_name[name] = GroupUsage(name, self.now)
            self._index.add(name)
        group.keys += keys
        group.bytes += size
        if not group.keys:
            del self.by_name[name]
            self._index.remove(name)

    def page(self, *, after: str, most: int) -> list[GroupUsage]:
        """Return up to `most` groups, in order, whose names follow `after`."""
        return [self.by_name[name] for name in self._index.page("", after=after, most=most)]

    def largest_group(self, *, by_keys: bool = False) -> GroupUsage | None:
        """Return the largest group, by bytes or keys, among the `COMPARED_MOST` oldest."""
        groups = islice(self.by_name.values(), COMPARED_MOST)
        return max(groups, key=lambda group: group.keys if by_keys else group.bytes, default=None)


class Keyspace:
    """The keys of a store; `answer_bytes_max` is the most bytes that any entry ever took in an answer."""

    __slots__ = ("answer_bytes_max", "bytes", "entries", "get", "groups", "index", "revision")

    def __init__(self) -> None:
        self.revision: int = 0
        self.entries: dict[str, Entry] = {}
        self.get: Callable[[str], Entry | None] = self.entries.get  # bound once: every request calls it
        self.groups: KeyGroupTable = KeyGroupTable()
        self.index: SortedKeys = SortedKeys()
        self.bytes: int = 0
        self.answer_bytes_max: int = entry_answer_bytes(None)

    def put(self, entry: Entry, before: Entry | None) -> None:
        """Store the new entry of a key; `before` is its current entry, if any."""
        if before is not None and len(entry.value) == len(before.value):
            self.entries[entry.key] = entry
            return
        self.answer_bytes_max = max(self.answer_bytes_max, entry_answer_bytes(entry))
        if before is None:
            self.index.add(entry.key)
            added = ENTRY_OVERHEAD + key_size(entry.key) + len(entry.value)
        else:
            added = len(entry.value) - len(before.value)
        self.bytes += added
        self.groups.add_usage(entry.key, int(before is None), added)
        self.entries[entry.key] = entry

    def remove(self, key: str) -> None:
        """Remove an existing key."""
        entry = self.entries.pop(key)
        self.index.remove(key)
        size = ENTRY_OVERHEAD + key_size(key) + len(entry.value)
        self.bytes -= size
        self.groups.add_usage(key, -1, -size)


class KeyChunk(list[str]):
    """A sorted list of keys, made at revision `born`; only snapshots of this revision or later may share it."""

    __slots__ = ("born",)

    def __init__(self, keys: Iterable[str] = (), *, born: int = 0) -> None:
        super().__init__(keys)
        self.born: int = born


class SortedKeys:
    """A sorted set of strings: all strings with the same prefix are adjacent."""

    __slots__ = ("_chunks", "_firsts", "_length")

    def __init__(self) -> None:
        self._chunks: list[KeyChunk] = []
        self._firsts: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, key: str) -> None:
        """Add a new key."""
        self._length += 1
        if not self._chunks:
            self._chunks.append(KeyChunk([key]))
            self._firsts.append(key)
            return
        at = self._chunk_index(key)
        chunk = self._chunks[at]
        insort(chunk, key)
        self._firsts[at] = chunk[0]
        if len(chunk) > CHUNK_MAX:
            half = KeyChunk(chunk[CHUNK_MAX // 2 :], born=chunk.born)
            del chunk[CHUNK_MAX // 2 :]
            self._chunks.insert(at + 1, half)
            self._firsts.insert(at + 1, half[0])

    def remove(self, key: str) -> None:
        """Remove an existing key."""
        at = self._chunk_index(key)
        chunk = self._chunks[at]
        place = bisect_left(chunk, key)
        assert chunk[place] == key, f"{key!r} is not in the index"
        del chunk[place]
        self._length -= 1
        if chunk:
            self._firsts[at] = chunk[0]
        else:
            del self._chunks[at], self._firsts[at]

    def page(self, prefix: str, *, after: str | None, most: int) -> list[str]:
        """Return up to `most` keys, in order, that start with `prefix` and follow `after`."""
        found: list[str] = []
        if not self._chunks:
            return found
        if after is not None and after < prefix:
            after = None  # begin at the first key with `prefix`
        at = self._chunk_index(prefix if after is None else after)
        place = bisect_left(self._chunks[at], prefix) if after is None else bisect_right(self._chunks[at], after)
        while at < len(self._chunks) and len(found) < most:
            chunk = self._chunks[at]
            end = min(place + most - len(found), len(chunk))
            if end > place and not chunk[end - 1].startswith(prefix):
                prefix_part = itemgetter(slice(len(prefix)))
                return found + chunk[place : bisect_right(chunk, prefix, place, end, key=prefix_part)]
            found += chunk[place:end]
            at, place = at + 1, 0
        return found

    def count(self, prefix: str) -> int:
        """Return how many keys start with `prefix`."""
        return self.chunks_under(prefix)[2] if prefix else self._length

    def chunks_under(self, prefix: str) -> tuple[list[KeyChunk], int, int]:
        """Return the chunks with keys under `prefix`, the first key's index in its chunk, and the keys' number."""
        if not self._chunks:
            return [], 0, 0
        prefix_part = itemgetter(slice(len(prefix)))
        first = self._chunk_index(prefix)
        last = max(bisect_right(self._firsts, prefix, key=prefix_part) - 1, first)
        place = bisect_left(self._chunks[first], prefix)
        upto = bisect_right(self._chunks[last], prefix, key=prefix_part)
        chunks = self._chunks[first : last + 1]
        return chunks, place, sum(map(len, chunks[:-1])) + upto - place

    def copy_shared_chunk(self, key: str, *, shared_until: int, revision: int) -> KeyChunk | None:
        """Copy a key's chunk if a snapshot of revision `shared_until` may share it; return the old chunk if copied."""
        at = self._chunk_index(key)
        if not self._chunks or (shared := self._chunks[at]).born > shared_until:
            return None
        self._chunks[at] = KeyChunk(shared, born=revision)
        return shared

    def _chunk_index(self, key: str) -> int:
        return max(bisect_right(self._firsts, key) - 1, 0)
