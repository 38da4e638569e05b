"""Pure: earlier entries of changed keys, kept while a reader of an earlier revision needs them (S6, S11).

A note is one entry, so a write pays only for its own keys. Notes are freed oldest first, some in each step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from store.messages import Entry

FORGOTTEN_AT_ONCE = 2048  # notes: about a millisecond

_revision = itemgetter(0)  # of a note


class Past:
    """The notes on earlier revisions of `entries`."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._before: dict[str, list[tuple[int, Entry | None]]] = {}  # each key's entries before a revision, in order
        self._order: deque[tuple[int, str]] = deque()

    def __bool__(self) -> bool:
        return bool(self._order)

    def note(self, key: str, before: Entry | None, revision: int) -> None:
        """Note the entry `before` of a key that a revision is about to change."""
        self._before.setdefault(key, []).append((revision, before))
        self._order.append((revision, key))

    def as_of(self, key: str, revision: int) -> Entry | None:
        """Return the entry of a key at a revision."""
        noted = self._before.get(key)
        if noted is not None and (place := bisect_right(noted, revision, key=_revision)) < len(noted):
            return noted[place][1]
        return self.entries.get(key)

    def changed_after(self, names: set[str], revision: int) -> dict[int, list[str]]:
        """Return which of these keys each later revision changed."""
        later: dict[int, list[str]] = {}
        for name in names & self._before.keys():
            noted = self._before[name]
            for changed_at, _ in noted[bisect_right(noted, revision, key=_revision) :]:
                later.setdefault(changed_at, []).append(name)
        return later

    def forget(self, until: float) -> bool:
        """Free some notes up to this revision; return True if more are left."""
        for _ in range(FORGOTTEN_AT_ONCE):
            if not self._order or self._order[0][0] > until:
                return False
            _, key = self._order.popleft()
            noted = self._before[key]
            del noted[0]
            if not noted:
                del self._before[key]
        return bool(self._order) and self._order[0][0] <= until
