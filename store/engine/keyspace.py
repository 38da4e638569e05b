"""Pure: the keys of the store, what they hold, their order, and what all of it takes in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.engine.sorted_keys import SortedKeys
from store.fast_init import constructor
from store.messages import Entry, Event, key_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ENTRY_OVERHEAD", "Keyspace", "answer_bytes", "put_event"]

ENTRY_OVERHEAD = 300  # bytes of bookkeeping per key: the entry, two dictionaries, the index

_make_event = constructor(Event)


def put_event(entry: Entry) -> Event:
    """The change that left this entry behind."""
    return _make_event("put", entry.mod_revision, entry.key, entry.value, entry.create_revision, entry.lease)


def answer_bytes(entry: Entry | None) -> int:
    """About how many bytes an entry takes in an answer."""
    return 1 if entry is None else key_bytes(entry.key) + len(entry.value) + 40


class Keyspace:
    """The keys of a store as they are at `revision`.

    Attributes:
        revision: The number of changes there have been.
        entries: What each key holds.
        index: The keys in order.
        bytes: What all of them take, each counted with its bookkeeping.
    """

    __slots__ = ("bytes", "entries", "get", "index", "revision")

    def __init__(self) -> None:
        self.revision = 0
        self.entries: dict[str, Entry] = {}
        self.get: Callable[[str], Entry | None] = self.entries.get  # bound once: every request asks
        self.index = SortedKeys()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def put(self, entry: Entry, before: Entry | None) -> None:
        """Let a key hold this; `before` is what it holds now."""
        if before is None:
            self.index.add(entry.key)
            self.bytes += ENTRY_OVERHEAD + key_bytes(entry.key) + len(entry.value)
        else:
            self.bytes += len(entry.value) - len(before.value)
        self.entries[entry.key] = entry

    def pop(self, key: str) -> Entry | None:
        """Take a key away; what it held."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.index.remove(key)
            self.bytes -= ENTRY_OVERHEAD + key_bytes(key) + len(entry.value)
        return entry
