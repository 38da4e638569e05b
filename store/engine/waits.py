"""Pure: who waits for which keys to exist, and under which conditions.

A wait is known by its peer and the id of its request, as a watch is. It stands at one key that is missing, and moves on
to another one when that has come: so whoever writes a key that many wait for beside others pays for each of them once,
and not with every write. It is found by the keys of its conditions, too. Whether it is over is the engine's to say,
which has the keys.

One change may bear on any number of waits. If they are too many for one step, they are looked at in several, each as if
at once (`Postponed`, promise S11).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from store.messages import Entry, key_bytes

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from store.engine.keyspace import Change
    from store.engine.watches import Watcher
    from store.messages import Condition

__all__ = ["WAIT_OVERHEAD", "Parked", "Postponed", "Waits", "wait_bytes"]

_Places = dict[str, dict[tuple[int, int], None]]  # who stands at a key; dicts, for their order

FORGOTTEN_AT_ONCE = 256  # waits of one peer: half a millisecond
WAIT_OVERHEAD = 200  # bytes of bookkeeping per key that is waited for: two sets, and a dictionary of who waits


@dataclass(slots=True, kw_only=True)
class Parked:
    """A wait for keys that do not all exist yet; it ends early if `when` ceases to hold."""

    keys: tuple[str, ...]
    missing: int  # the place in `keys` of one that does not exist, at which the wait stands
    when: tuple[Condition, ...]

    def next_missing(self, entries: Container[str]) -> int | None:
        """The place of the next key that does not exist; None if all do."""
        count = len(self.keys)
        for place in range(self.missing, self.missing + count):
            if self.keys[place % count] not in entries:
                return place % count
        return None


def wait_bytes(keys: Iterable[str], when: Iterable[Condition]) -> int:
    """About how many bytes it takes to wait for these keys, under these conditions."""
    size = sum(WAIT_OVERHEAD + key_bytes(key) for key in keys)
    for condition in when:
        expected = condition.expected
        size += WAIT_OVERHEAD + key_bytes(condition.key) + (len(expected) if isinstance(expected, bytes) else 0)
    return size


class Waits:
    """The parked waits of all peers.

    Attributes:
        parked: What each waits for.
        bytes: What all of them cost to keep.
    """

    def __init__(self) -> None:
        self.parked: dict[Watcher, Parked] = {}
        self._at: _Places = {}  # by the missing key at which each stands
        self._under: _Places = {}  # by the keys of its conditions
        self._by: dict[int, dict[int, int]] = {}  # by peer, then request id: what each costs to keep
        self.bytes: int = 0

    def __len__(self) -> int:
        return len(self.parked)

    def of(self, peer: int) -> int:
        """How many waits a peer has parked."""
        return len(self._by.get(peer, ()))

    def bytes_of(self, peer: int) -> int:
        """What they cost to keep."""
        return sum(self._by.get(peer, {}).values())

    def add(self, watcher: Watcher, parked: Parked, *, cost: int) -> None:
        """Park a wait."""
        peer, request_id = watcher
        self.parked[watcher] = parked
        self._by.setdefault(peer, {})[request_id] = cost
        self.bytes += cost
        self._stand_at_its_keys(watcher, parked)

    def move(self, watcher: Watcher, missing: int) -> None:
        """A wait was looked at, and is not over: it stands at this key, which does not exist."""
        parked = self.parked[watcher]
        self._step_away(self._at, parked.keys[parked.missing], watcher)
        parked.missing = missing
        self._stand_at_its_keys(watcher, parked)

    def remove(self, watcher: Watcher) -> None:
        """A wait is over."""
        parked = self.parked.pop(watcher)
        peer, request_id = watcher
        self.bytes -= self._by[peer].pop(request_id)
        if not self._by[peer]:
            del self._by[peer]
        self._step_away(self._at, parked.keys[parked.missing], watcher)
        for condition in parked.when:
            self._step_away(self._under, condition.key, watcher)

    def _stand_at_its_keys(self, watcher: Watcher, parked: Parked) -> None:
        self._at.setdefault(parked.keys[parked.missing], {})[watcher] = None
        for condition in parked.when:
            self._under.setdefault(condition.key, {})[watcher] = None

    def _step_away(self, places: _Places, key: str, watcher: Watcher) -> None:
        standing = places.get(key)
        if standing is not None and standing.pop(watcher, self) is None and not standing:
            del places[key]

    def peer_closed(self, peer: int) -> Iterator[None]:
        """Forget all waits of a peer, in steps."""
        for count, request_id in enumerate(tuple(self._by.get(peer, ())), 1):
            if (peer, request_id) in self.parked:  # it was not answered meanwhile
                self.remove((peer, request_id))
            if count % FORGOTTEN_AT_ONCE == 0:
                yield

    def stirred(self, changes: Iterable[Change]) -> list[tuple[_Places, str]]:
        """Find where the waits stand that the changes of one revision bear on.

        A wait is affected if its key was put, or the key of a condition was changed. The caller takes it out of there
        and looks at it, now or later: it ends then, or moves. Until then it does not stand at that key.
        """
        found = []
        for change in changes:
            if (isinstance(change, Entry) or change.kind == "put") and change.key in self._at:
                found.append((self._at, change.key))
            if change.key in self._under:
                found.append((self._under, change.key))
        return found

    def stands(self, watcher: Watcher) -> bool:
        """Return whether a wait stands at all its keys; one that is to be looked at later does not."""
        parked = self.parked[watcher]
        return watcher in self._at.get(parked.keys[parked.missing], ()) and all(
            watcher in self._under.get(condition.key, ()) for condition in parked.when
        )

    def weigh(self, watchers: Iterable[Watcher]) -> int:
        """About what it takes to look at these waits: their keys and conditions."""
        return sum(len(parked.keys) + len(parked.when) for parked in map(self.parked.__getitem__, watchers))


class Postponed:
    """Waits that are looked at in several steps, each as if no time had passed since the change that bears on it.

    `Past` has what each key held before each later change. So a wait finds what was there at that revision, and then
    what came after it, one revision after the other. The first change's are looked at first: a wait that two changes
    bear on is looked at for both then.

    Attributes:
        heaps: Where those stood that each revision bears on, the first revision first.
    """

    def __init__(self) -> None:
        self.heaps: deque[tuple[int, list[dict[Watcher, None]]]] = deque()

    def __len__(self) -> int:
        return len(self.heaps)

    def add(self, places: list[dict[Watcher, None]], revision: int) -> None:
        """Look at these later, which a revision bears on."""
        self.heaps.append((revision, places))

    def next(self) -> tuple[Watcher, int]:
        """The next wait to be looked at, and since which revision."""
        revision, places = self.heaps[0]
        watcher, _ = places[-1].popitem()
        if not places[-1]:
            places.pop()
            if not places:
                self.heaps.popleft()
        return watcher, revision

    def again(self, watcher: Watcher, revision: int) -> None:
        """Go on with a wait in the next step: it has been looked at up to this revision."""
        self.heaps.appendleft((revision, [{watcher: None}]))
