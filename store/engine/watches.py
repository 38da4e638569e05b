"""The watches by prefix, and the recent history from which a watch can resume (promise S4).

Watches are indexed by prefix, and prefixes by length. A changed key costs one lookup for each distinct length of the
watched prefixes in its group (the keys of one run, see `keyspace`), and of prefixes too short for a group. Prefixes of
thousands of lengths slow down only their own run.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from typing import TYPE_CHECKING

from store.engine.keyspace import events_of
from store.messages import key_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from store.engine.keyspace import Change
    from store.messages import Event

Watcher = tuple[int, int]  # a peer, and the id of its watch or wait

CLOSED_AT_ONCE = 512  # watches of a closed peer removed in one step: 0.5 ms
SWEPT_AT = 1024  # the history's list may keep this many empty entries, or half its length if more
WATCH_OVERHEAD = 1024  # bytes counted per watch, besides its prefix
COMPARISONS_MOST = 131_072  # comparisons of changed keys with watched prefixes, per request: about 20 ms
LONG_KEY = 1024  # characters of a key whose comparison takes twice as long as that of a short key
LENGTHS_FEW = 10  # the most lengths of a group's prefixes with which 2,048 keys of 2 kB stay below `COMPARISONS_MOST`
EVENT_OVERHEAD = 200  # bytes counted per event, besides key and value


def watch_bytes(prefix: str) -> int:
    """Return the bytes counted for an open watch."""
    return WATCH_OVERHEAD + key_size(prefix)


def event_bytes(change: Change) -> int:
    """Return the bytes of a change in the history."""
    return EVENT_OVERHEAD + key_size(change.key) + len(change.value)


class Watches:
    """The open watches of all peers."""

    def __init__(self, group_of: Callable[[str], str | None] = lambda _: None) -> None:
        self._group_of = group_of
        self.by_prefix: dict[str, dict[int, dict[int, None]]] = {}  # the ids of watches, by prefix and peer
        self._prefixes: dict[int, dict[int, str]] = {}  # watched prefixes, by peer and watch id
        self._lengths: dict[str, dict[int, int]] = {}  # by group: the number of prefixes of each length
        self._sorted_lengths: dict[str, list[int]] = {}  # by group, ascending, to skip lengths above a key's
        self._of_many_lengths: set[str] = set()  # groups whose prefixes have more than `LENGTHS_FEW` lengths
        self._count = 0
        self.bytes: int = 0

    def __len__(self) -> int:
        return self._count

    def count_of_peer(self, peer: int) -> int:
        """Return how many watches a peer has open."""
        return len(self._prefixes.get(peer, ()))

    def add(self, peer: int, watch_id: int, prefix: str) -> None:
        """Open a watch."""
        if prefix not in self.by_prefix:
            self.by_prefix[prefix] = {}
            group = self._group_of(prefix) or ""
            lengths = self._lengths.setdefault(group, {})
            if len(prefix) not in lengths:
                insort(self._sorted_lengths.setdefault(group, []), len(prefix))
            lengths[len(prefix)] = lengths.get(len(prefix), 0) + 1
            if len(lengths) > LENGTHS_FEW:
                self._of_many_lengths.add(group)
        self.by_prefix[prefix].setdefault(peer, {})[watch_id] = None
        self._prefixes.setdefault(peer, {})[watch_id] = prefix
        self._count += 1
        self.bytes += watch_bytes(prefix)

    def remove(self, peer: int, watch_id: int) -> bool:
        """Close a watch; return False if there is none of this id."""
        prefixes = self._prefixes.get(peer, {})
        prefix = prefixes.pop(watch_id, None)
        if prefix is None:
            return False
        if not prefixes:
            del self._prefixes[peer]
        by_peer = self.by_prefix[prefix]
        del by_peer[peer][watch_id]
        if not by_peer[peer]:
            del by_peer[peer]
        self._count -= 1
        self.bytes -= watch_bytes(prefix)
        if not by_peer:
            del self.by_prefix[prefix]
            self._forget_prefix_length(self._group_of(prefix) or "", len(prefix))
        return True

    def _forget_prefix_length(self, group: str, length: int) -> None:
        lengths = self._lengths[group]
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
            self._sorted_lengths[group].remove(length)
            if len(lengths) <= LENGTHS_FEW:
                self._of_many_lengths.discard(group)
            if not lengths:
                del self._lengths[group], self._sorted_lengths[group]

    def remove_peer_in_steps(self, peer: int) -> Iterator[None]:
        """Close all watches of a peer, in steps."""
        for count, watch_id in enumerate(tuple(self._prefixes.get(peer, ())), 1):
            self.remove(peer, watch_id)
            if count % CLOSED_AT_ONCE == 0:
                yield

    @property
    def is_lookup_cheap(self) -> bool:
        """True if watched prefixes have so few lengths that a request may change any number of keys."""
        return not self._of_many_lengths

    def changeable_key_count(self, keys: Collection[str]) -> int:
        """Return how many of these keys, at least 1, one request may change without too many lookups (S11)."""
        if self.is_lookup_cheap:
            return len(keys)
        cost = 0.0
        for count, key in enumerate(keys):
            group = self._group_of(key)
            compared = bisect_right(self._sorted_lengths.get("", ()), len(key) if group is None else len(group) - 1)
            if group is not None:
                compared += bisect_right(self._sorted_lengths.get(group, ()), len(key))
            cost += compared * (1 + len(key) / LONG_KEY)
            if cost > COMPARISONS_MOST and count:
                return count
        return len(keys)

    def match_watches(self, changes: Sequence[Change]) -> Sequence[tuple[Mapping[int, list[int]], tuple[Change, ...]]]:
        """Return pairs of watches, by peer, and the changes of one revision that all these watches get."""
        if len(changes) == 1:
            found: dict[int, list[int]] = {}
            for prefix in self._matching_prefixes(changes[0].key, -1):
                self._collect_watches_on(prefix, found)
            return [(found, tuple(changes))] if found else []
        # Sorted keys with a common prefix are adjacent.
        order = sorted(range(len(changes)), key=lambda place: changes[place].key)
        stretches: dict[tuple[int, int], dict[int, list[int]]] = {}
        # Watched prefixes of the current key, shortest first, each with its first key's place in `order`.
        begun: list[tuple[str, int]] = []
        for at in range(len(order) + 1):
            key = changes[order[at]].key if at < len(order) else None
            while begun and (key is None or not key.startswith(begun[-1][0])):
                prefix, start = begun.pop()
                self._collect_watches_on(prefix, stretches.setdefault((start, at), {}))
            if key is not None:
                begun += [(prefix, at) for prefix in self._matching_prefixes(key, len(begun[-1][0]) if begun else -1)]
        return [
            (watches, tuple([changes[place] for place in sorted(order[start:end])]))
            for (start, end), watches in stretches.items()
        ]

    def _collect_watches_on(self, prefix: str, found: dict[int, list[int]]) -> None:
        for peer, watch_ids in self.by_prefix[prefix].items():
            found.setdefault(peer, []).extend(watch_ids)

    def _matching_prefixes(self, key: str, beyond: int) -> list[str]:
        found = []
        group = self._group_of(key)
        # A watched prefix without a group is shorter than the name of any group whose keys it matches.
        for lengths, longest in (
            (self._sorted_lengths.get("", ()), len(key) if group is None else len(group) - 1),
            (self._sorted_lengths.get(group, ()) if group else (), len(key)),
        ):
            for length in lengths[bisect_right(lengths, beyond) :] if beyond >= 0 else lengths:
                if length > longest:
                    break
                prefix = key[:length]
                if prefix in self.by_prefix:
                    found.append(prefix)
        return found


class History:
    """The changes of each revision after `compacted`, bounded by bytes. `began`: the revision before all changes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._revisions: list[tuple[Change, ...]] = []  # entries before `_first` are empty; removed in batches
        self._first = 0
        self._sizes: deque[int] = deque()
        self.bytes: int = 0
        self.began: int = 0
        self.compacted: int = 0

    def restart_after(self, revision: int) -> None:
        """Begin an empty history after a revision."""
        self.began = self.compacted = revision

    def restore(self, saved: Iterable[tuple[Event, ...]], *, compacted: int) -> None:
        """Restore the changes of every revision after `compacted`."""
        self.compacted = compacted
        for events in saved:
            self.append(events)

    def append(self, changes: tuple[Change, ...]) -> None:
        """Append the changes of one revision; free the oldest revisions beyond the limit."""
        self._revisions.append(changes)
        size = event_bytes(changes[0]) if len(changes) == 1 else sum(map(event_bytes, changes))
        self._sizes.append(size)
        self.bytes += size
        while self.bytes > self._bytes_max:
            self.compacted += 1
            self._revisions[self._first] = ()
            self._first += 1
            self.bytes -= self._sizes.popleft()
        if self._first > SWEPT_AT and 2 * self._first > len(self._revisions):
            del self._revisions[: self._first]
            self._first = 0

    def page(
        self, revision: int, prefix: str, *, most: int, bytes_max: int
    ) -> tuple[list[tuple[Event, ...]], int] | None:
        """Return changes under `prefix` from `revision` on, and the revision to go on from; None if some are freed."""
        revision = max(revision, self.began + 1)
        if revision <= self.compacted:
            return None
        at = self._first + revision - self.compacted - 1  # revisions have no gaps
        found = []
        size = 0
        for changes in self._revisions[at : at + most]:
            revision += 1
            matching = [change for change in changes if change.key.startswith(prefix)]
            if matching:
                found.append(events_of(matching))
                size += sum(map(event_bytes, matching))
                if size >= bytes_max:
                    break
        return found, revision
