"""Pure: the absent nodes of a run: gone members of the last round, and expected nodes; by name, and in words.

Only the coordinator sees nodes arrive and go, so it keeps the `AbsenceBook`. Its report (`Absent`) is part of the
`Progress` that every node is sent. Only durations are sent, by the coordinator's clock; readers add the time since.
Durations go along with other news and never cause a new message.
"""

from __future__ import annotations

from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Final

from store.printable import in_words, printable
from store.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["LEFT", "LOST", "NAMED_MOST", "NAMED_OF_MANY", "AbsenceBook", "Absent", "Missing", "named"]

NAMED_MOST: Final = 64  # missing nodes that are named; if there are more, looking for single ones is pointless ...
NAMED_OF_MANY: Final = 8  # ... and this many are enough, also in one sentence
NAME_MOST: Final = 80  # characters of a name in a sentence
LOST: Final = "lost"
LEFT: Final = "left"
NEVER_SEEN: Final = "never seen"


class Missing(Record, kw_only=True):
    """A node that is not here."""

    node_id: str  #: its name
    how: str  #: "lost", "left", or "never seen"
    ago: float | None = None  #: seconds since it was lost or left; None if unknown
    address: str = ""  #: its last address, if known
    why: str = ""  #: why it was lost or left, in words, if known

    def where(self) -> str:
        """Return its last address, if known and different from its name: " at 10.0.0.3"."""
        return f" at {_name(self.address)}" if self.address not in ("", self.node_id) else ""

    def describe(self, *, elapsed: float | None = 0.0) -> str:
        """Return "lost 41 s ago: why", `elapsed` seconds after `ago` was measured; None leaves the duration out."""
        how = self.how if self.ago is None or elapsed is None else f"{self.how} {in_words(self.ago + elapsed)} ago"
        return f"{how}: {self.why}" if self.why else how


class Absent(Record, kw_only=True):
    """The nodes that are not here, as the coordinator sees it."""

    missing: tuple[Missing, ...] = ()  # the first ones, at most `NAMED_MOST`
    count: int = 0  # the number of all
    # Seconds for which too few nodes have waited; None if none waits or enough do.
    waited: float | None = None
    # Live members of the last round, if nodes wait for them to leave it and they are few.
    staying: tuple[str, ...] = ()
    staying_at: tuple[str, ...] = ()  # the address of each of these
    # Seconds since 1970 by the coordinator's clock; 0 if unknown. For readers that do not know the age of this.
    said_at: float = 0.0

    def without_durations(self) -> Absent:
        """Return the same without the fields that change by themselves."""
        missing = tuple(one.replace(ago=None) for one in self.missing)
        return self.replace(missing=missing, said_at=0.0, waited=None if self.waited is None else 0.0)

    def describe(self, *, elapsed: float | None = 0.0) -> str:
        """Return the missing nodes: "gpu-017 (lost 3 min ago) and gpu-023 (never seen)"; empty if none is known."""
        shown = [
            f"{_name(one.node_id)}{one.where()} ({one.describe(elapsed=elapsed)})"
            for one in self.missing[:NAMED_OF_MANY]
        ]
        return _listed(shown, self.count)

    def describe_wait(self, *, elapsed: float | None = 0.0) -> str:
        """Return for which nodes the run has waited, and for how long; empty if no missing node is known."""
        names = self.describe(elapsed=elapsed)
        if not names:
            return ""
        waited = "" if self.waited is None or elapsed is None else f" {in_words(self.waited + elapsed)}"
        return f"waiting{waited} for {names}"

    def describe_staying(self) -> str:
        """Return the members still in the last round, if they are few."""
        where = chain(self.staying_at, repeat(""))
        return _listed([_name(named(*one)) for one in zip(self.staying, where, strict=False)], len(self.staying))


def _name(text: str) -> str:
    return printable(text, most=NAME_MOST)


def _listed(shown: list[str], count: int) -> str:
    if count > len(shown):
        return f"{', '.join(shown)} and {count - len(shown)} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


class AbsenceBook:
    """A coordinator's record of absent nodes, with `expected` ones missed from the beginning; each event costs O(1)."""

    def __init__(self, expected: Iterable[str] = ()) -> None:
        self._expected = dict.fromkeys(expected)
        self._unseen = dict(self._expected)
        self._gone: dict[str, tuple[str, float | None, str, str]] = {}  # how, when, address, why
        self._short_since: float | None = None

    def take_over(self, absent: Absent, *, now: float) -> None:
        """Continue with the last coordinator's report, made at `now` on this node's clock."""
        for one in absent.missing:
            if one.how != NEVER_SEEN:
                self._unseen.pop(one.node_id, None)
                at = None if one.ago is None else now - one.ago
                self._gone[one.node_id] = one.how, at, one.address, one.why

    def came(self, node_id: str) -> None:
        """Record that a node is here."""
        self._unseen.pop(node_id, None)
        self._gone.pop(node_id, None)

    def went(
        self, node_id: str, *, left: bool, is_member: bool, address: str, now: float | None, why: str = ""
    ) -> None:
        """Record that a node has gone; a node that was neither a member nor expected is not missed."""
        if node_id not in self._gone and (is_member or node_id in self._expected):
            self._unseen.pop(node_id, None)
            self._gone[node_id] = LEFT if left else LOST, now, address, why

    def look_again(self, here: Iterable[str]) -> None:
        """Replace the set of nodes that are here."""
        present = set(here)
        self._unseen = {id: None for id in self._expected if id not in present and id not in self._gone}

    def completed(self) -> None:
        """Record a completed round: of the gone nodes, only expected ones are missed from now on."""
        self._gone = {node_id: how for node_id, how in self._gone.items() if node_id in self._expected}
        self._short_since = None

    def count_waiting(self, *, short: bool, now: float, waited: float | None = None) -> None:
        """Record if nodes wait and are too few; `waited`: seconds so far, by the last coordinator."""
        if not short:
            self._short_since = None
        elif self._short_since is None or waited is not None:
            self._short_since = now - (waited or 0.0)

    def report(self, *, now: float, staying: Mapping[str, str] | None = None) -> Absent:
        """Return the current report; `staying`: the members that must leave the last round, with their addresses."""
        count = len(self._gone) + len(self._unseen)
        gone = (
            Missing(node_id=node_id, how=how, ago=None if at is None else max(now - at, 0.0), address=address, why=why)
            for node_id, (how, at, address, why) in self._gone.items()
        )
        unseen = (Missing(node_id=node_id, how=NEVER_SEEN) for node_id in self._unseen)
        return Absent(
            missing=tuple(islice(chain(gone, unseen), count if count <= NAMED_MOST else NAMED_OF_MANY)),
            count=count,
            waited=None if self._short_since is None else max(now - self._short_since, 0.0),
            staying=tuple(staying or ()),
            staying_at=tuple((staying or {}).values()),
        )


def named(node_id: str, address: str | None) -> str:
    """Return a node's name, and its address if that is known and different."""
    return f"{node_id} ({address})" if address and address != node_id else node_id
