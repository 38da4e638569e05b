"""Pure: who waits for which keys to exist, and under which conditions.

A wait is known by its peer and the id of its request, as a watch is. It is found by every key that bears on it: those
it waits for, also the ones that are there already, which may go before the others come, and those of its conditions.
Whether it is over is the engine's to say, which has the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from store.messages import key_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from store.engine.watches import Watcher
    from store.messages import Condition, Event

__all__ = ["WAIT_OVERHEAD", "Parked", "Waits", "wait_bytes"]

WAIT_OVERHEAD = 200  # bytes of bookkeeping per key that is waited for: two sets, and a dictionary of who waits


@dataclass(slots=True, kw_only=True)
class Parked:
    """A wait for keys that do not all exist yet; it ends early if `when` ceases to hold."""

    keys: tuple[str, ...]
    names: frozenset[str]  # the same, to look things up in
    missing: set[str]
    when: tuple[Condition, ...]

    def bears(self) -> frozenset[str]:
        """The keys whose changes may end it."""
        return self.names.union(condition.key for condition in self.when)


def wait_bytes(keys: Iterable[str], when: Iterable[Condition]) -> int:
    """About how many bytes it takes to wait for these keys, under these conditions."""
    size = sum(WAIT_OVERHEAD + key_bytes(key) for key in keys)
    for condition in when:
        expected = condition.expected
        size += WAIT_OVERHEAD + key_bytes(condition.key) + (len(expected) if isinstance(expected, bytes) else 0)
    return size


class Waits:
    """The parked waits of all peers."""

    def __init__(self) -> None:
        self._parked: dict[Watcher, Parked] = {}
        self._on: dict[str, dict[Watcher, None]] = {}  # by key; dicts, for their order
        self._by: dict[int, dict[int, int]] = {}  # by peer, then request id: what each costs to keep
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, watcher: Watcher) -> bool:
        return watcher in self._parked

    @property
    def bytes(self) -> int:
        """What all of them cost to keep."""
        return self._bytes

    def of(self, peer: int) -> int:
        """How many waits a peer has parked."""
        return len(self._by.get(peer, ()))

    def bytes_of(self, peer: int) -> int:
        """What they cost to keep."""
        return sum(self._by.get(peer, {}).values())

    def add(self, watcher: Watcher, parked: Parked, *, cost: int) -> None:
        """Park a wait."""
        peer, request_id = watcher
        self._parked[watcher] = parked
        self._by.setdefault(peer, {})[request_id] = cost
        self._bytes += cost
        for key in parked.bears():
            self._on.setdefault(key, {})[watcher] = None

    def remove(self, watcher: Watcher) -> None:
        """A wait is over."""
        parked = self._parked.pop(watcher)
        peer, request_id = watcher
        self._bytes -= self._by[peer].pop(request_id)
        if not self._by[peer]:
            del self._by[peer]
        for key in parked.bears():
            waiting = self._on[key]
            del waiting[watcher]
            if not waiting:
                del self._on[key]

    def peer_closed(self, peer: int) -> None:
        """Forget all waits of a peer."""
        for request_id in list(self._by.get(peer, ())):
            self.remove((peer, request_id))

    def stirred(self, events: Iterable[Event]) -> dict[Watcher, Parked]:
        """The waits that the changes of one revision bear on, once all of these have been noted."""
        stirred: dict[Watcher, Parked] = {}
        for event in events:
            for watcher in self._on.get(event.key, ()):
                parked = stirred[watcher] = self._parked[watcher]
                if event.kind == "put":
                    parked.missing.discard(event.key)
                elif event.key in parked.names:
                    parked.missing.add(event.key)
        return stirred
