"""Pure: reading all keys under a prefix as they are at one revision, in steps (promise S11).

Between two steps others may write. What they overwrite or delete is noted here first, so that what is read is what was
there when the scan began. A scan costs writers one comparison of a prefix for as long as it lasts.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from store.engine.keyspace import answer_bytes

if TYPE_CHECKING:
    from store.engine.keyspace import Keyspace
    from store.messages import Entry

__all__ = ["PART_BYTES", "STEP_KEYS", "Picked", "Scan"]

STEP_KEYS = 2048  # looked up at once: about half a millisecond
PART_BYTES = 256 * 1024  # of one part, so that its frame stays small


class Scan:
    """What lies under a prefix at one revision.

    Attributes:
        revision: Of which it is.
        held_bytes: What it keeps only for itself, since others have overwritten or deleted it meanwhile.
    """

    def __init__(self, keys: Keyspace, prefix: str) -> None:
        self._keys = keys
        self._prefix = prefix
        self._after: str | None = None  # the last key that was looked up
        self._ends = False  # whether there is none after it
        self._found: deque[Entry] = deque()  # looked up, and not read yet
        self._before: dict[str, Entry | None] = {}  # what keys not looked up yet held when the scan began
        self.revision: int = keys.revision
        self.held_bytes: int = 0

    @property
    def done(self) -> bool:
        """Whether all was read."""
        return self._ends and not self._found

    def part(self, *, bytes_max: int = PART_BYTES) -> list[Entry]:
        """The next entries, in order."""
        if not self._found and not self._ends:
            self._look_up()
        part: list[Entry] = []
        size = 0
        while self._found and len(part) < STEP_KEYS and (not part or size + answer_bytes(self._found[0]) <= bytes_max):
            entry = self._found.popleft()
            size += answer_bytes(entry)
            part.append(entry)
        return part

    def note(self, key: str, before: Entry | None) -> None:
        """A key is about to be changed; `before` is what it holds."""
        ahead = not self._ends and (self._after is None or key > self._after)
        if ahead and key.startswith(self._prefix) and key not in self._before:
            self._before[key] = before
            self.held_bytes += answer_bytes(before)

    def _look_up(self) -> None:
        names = self._keys.index.stretch(self._prefix, after=self._after, most=STEP_KEYS)
        self._ends = len(names) < STEP_KEYS
        upto = None if self._ends else names[-1]
        entries = self._keys.entries
        changed = {key: entry for key, entry in self._before.items() if upto is None or key <= upto}
        if changed:
            found = [entries[key] for key in names if key not in changed]
            found += [entry for entry in changed.values() if entry is not None]
            self._found.extend(sorted(found, key=lambda entry: entry.key))
            self._before = {key: entry for key, entry in self._before.items() if key not in changed}
        else:
            self._found.extend([entries[key] for key in names])
        self._after = names[-1] if names else self._after


class Picked:
    """What several keys hold at one revision: looked up at once, and given in steps as a scan is."""

    def __init__(self, entries: tuple[Entry | None, ...], revision: int) -> None:
        self._entries = entries
        self._given = 0
        self.revision = revision

    @property
    def done(self) -> bool:
        """Whether all was given."""
        return self._given >= len(self._entries)

    def part(self) -> list[Entry | None]:
        """The next entries, in the order in which they were asked for."""
        part: list[Entry | None] = []
        size = 0
        for entry in self._entries[self._given : self._given + STEP_KEYS]:
            size += answer_bytes(entry)
            if part and size > PART_BYTES:
                break
            part.append(entry)
        self._given += len(part)
        return part

    def note(self, key: str, before: Entry | None) -> None:
        """A key is about to be changed, which makes no difference to what was found."""
