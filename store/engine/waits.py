"""The waits for keys to exist, and their conditions.

A wait is registered at the keys of its conditions, but at only one of its missing keys. When the missing key is
written, the wait moves to another. A write checks only the waits registered at its key. If a change affects too many
waits for one step, all of them are postponed (`PostponedWaits`, promise S11).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from store.messages import key_size

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from store.engine.keyspace import Change
    from store.engine.watches import Watcher
    from store.messages import Condition

_Places = dict[str, dict[tuple[int, int], None]]  # by key: the waits registered at it, in order

FORGOTTEN_AT_ONCE = 256  # waits of a closed peer removed in one step: 0.5 ms
WAIT_OVERHEAD = 500  # bytes counted per wait
NAME_OVERHEAD, CONDITION_OVERHEAD = 100, 400  # bytes counted per key and per condition of a wait


@dataclass(slots=True, kw_only=True)
class ParkedWait:
    """A wait for missing keys; it fails once a condition of `when` is false."""

    keys: tuple[str, ...]
    missing: int  # the index of the missing key at which the wait is registered
    when: tuple[Condition, ...]

    def missing_index(self, entries: Container[str]) -> int | None:
        """Return the index of the next missing key; None if all exist."""
        count = len(self.keys)
        for place in range(self.missing, self.missing + count):
            if self.keys[place % count] not in entries:
                return place % count
        return None


def wait_bytes(keys: Iterable[str], when: Iterable[Condition]) -> int:
    """Return the approximate bytes of a wait."""
    size = WAIT_OVERHEAD + sum(NAME_OVERHEAD + key_size(key) for key in keys)
    for condition in when:
        expected = condition.expected
        size += CONDITION_OVERHEAD + key_size(condition.key) + (len(expected) if isinstance(expected, bytes) else 0)
    return size


class Waits:
    """The unanswered waits of all peers, and the bytes that they take."""

    def __init__(self) -> None:
        self.parked: dict[Watcher, ParkedWait] = {}
        self._at: _Places = {}  # waits by missing key
        self._under: _Places = {}  # waits by the keys of their conditions
        self._by: dict[int, dict[int, int]] = {}  # the bytes of each wait, by peer and request id
        self.bytes: int = 0

    def count_of_peer(self, peer: int) -> int:
        """Return how many unanswered waits a peer has."""
        return len(self._by.get(peer, ()))

    def bytes_of(self, peer: int) -> int:
        """Return the bytes of a peer's waits."""
        return sum(self._by.get(peer, {}).values())

    def add(self, watcher: Watcher, parked: ParkedWait, *, cost: int) -> None:
        """Register a wait of `cost` bytes."""
        peer, request_id = watcher
        self.parked[watcher] = parked
        self._by.setdefault(peer, {})[request_id] = cost
        self.bytes += cost
        self._register_at_keys(watcher, parked)

    def move_to_key(self, watcher: Watcher, missing: int) -> None:
        """Register a wait at another missing key."""
        parked = self.parked[watcher]
        parked.missing = missing
        self._register_at_keys(watcher, parked)

    def remove(self, watcher: Watcher) -> None:
        """Remove a wait."""
        parked = self.parked.pop(watcher)
        peer, request_id = watcher
        self.bytes -= self._by[peer].pop(request_id)
        if not self._by[peer]:
            del self._by[peer]
        self._unregister_at(self._at, parked.keys[parked.missing], watcher)
        for condition in parked.when:
            self._unregister_at(self._under, condition.key, watcher)

    def _register_at_keys(self, watcher: Watcher, parked: ParkedWait) -> None:
        self._at.setdefault(parked.keys[parked.missing], {})[watcher] = None
        for condition in parked.when:
            self._under.setdefault(condition.key, {})[watcher] = None

    def _unregister_at(self, places: _Places, key: str, watcher: Watcher) -> None:
        standing = places.get(key)
        if standing is not None and standing.pop(watcher, self) is None and not standing:
            del places[key]

    def remove_peer_in_steps(self, peer: int) -> Iterator[None]:
        """Remove all waits of a peer, in steps."""
        for count, request_id in enumerate(tuple(self._by.get(peer, ())), 1):
            if (peer, request_id) in self.parked:  # not answered meanwhile
                self.remove((peer, request_id))
            if count % FORGOTTEN_AT_ONCE == 0:
                yield

    def find_affected_waits(self, changes: Iterable[Change]) -> list[tuple[_Places, str]]:
        """Return where the affected waits are registered: pairs of an index (`_at` or `_under`) and a key in it."""
        return [(places, each.key) for each in changes for places in (self._at, self._under) if each.key in places]

    def is_registered(self, watcher: Watcher) -> bool:
        """Return False if a wait is postponed: it is then unregistered at a changed key."""
        parked = self.parked[watcher]
        return watcher in self._at.get(parked.keys[parked.missing], ()) and all(
            watcher in self._under.get(condition.key, ()) for condition in parked.when
        )

    def cost_of_checking(self, watchers: Iterable[Watcher]) -> int:
        """Return the cost of checking these waits: the number of their keys and conditions."""
        return sum(len(parked.keys) + len(parked.when) for parked in map(self.parked.__getitem__, watchers))


class PostponedWaits:
    """Waits to check in later steps, each against the keys at the revision that affected it (`OldEntries`)."""

    def __init__(self) -> None:
        self.heaps: deque[tuple[int, list[dict[Watcher, None]]]] = deque()

    def __len__(self) -> int:
        return len(self.heaps)

    def add(self, places: list[dict[Watcher, None]], revision: int) -> None:
        """Postpone the waits in `places`, which `revision` affects."""
        self.heaps.append((revision, places))

    def next(self) -> tuple[Watcher, int]:
        """Remove and return the next wait, and the revision to check it from."""
        revision, places = self.heaps[0]
        watcher, _ = places[-1].popitem()
        if not places[-1]:
            places.pop()
            if not places:
                self.heaps.popleft()
        return watcher, revision

    def requeue(self, watcher: Watcher, revision: int) -> None:
        """Let the next step check a wait from this revision on."""
        self.heaps.appendleft((revision, [{watcher: None}]))
