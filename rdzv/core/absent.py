"""A run's absent nodes: members that have gone from the last round, and expected nodes not yet seen.

Only the coordinator watches the nodes' records, so it reports absent nodes to all nodes in `Progress.absent`. Durations
are on the coordinator's clock; a reader adds the time since it received the report.
"""

from __future__ import annotations

from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Final

from store.printable import printable, time_text
from store.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NAMED_MOST: Final = 64  # if at most this many nodes are missing, a report names all
NAMED_OF_MANY: Final = 8  # nodes named in a message, or in a report of more than `NAMED_MOST`
NAME_MOST: Final = 80  # characters per id or address
LOST: Final = "lost"
LEFT: Final = "left"
NEVER_SEEN: Final = "never seen"


class Missing(Record, kw_only=True):
    """A missing node."""

    node_id: str
    how: str  #: "lost", "left", or "never seen"
    ago: float | None = None  #: seconds since the node was lost or left; None if unknown
    address: str = ""  #: the node's last address; empty if unknown
    why: str = ""  #: why the node was lost or left; empty if unknown

    def where(self) -> str:
        """Return " at 10.0.0.3"; empty if the address is unknown or equals the node's id."""
        return f" at {_shorten_name(self.address)}" if self.address not in ("", self.node_id) else ""

    def describe(self, *, elapsed: float | None = 0.0) -> str:
        """Return "lost 41 s ago: why". `elapsed` has the seconds since `ago` was measured; None omits the duration."""
        how = self.how if self.ago is None or elapsed is None else f"{self.how} {time_text(self.ago + elapsed)} ago"
        return f"{how}: {self.why}" if self.why else how


class AbsenceReport(Record, kw_only=True):
    """A coordinator's report of missing nodes."""

    missing: tuple[Missing, ...] = ()  # at most `NAMED_MOST`
    count: int = 0  # the number of all missing nodes
    waited: float | None = None  # seconds that too few nodes have waited, without live members; else None
    staying: tuple[str, ...] = ()  # the live members, if nodes wait to join; empty if more than `NAMED_OF_MANY`
    staying_at: tuple[str, ...] = ()  # the addresses of the `staying` members
    said_at: float = 0.0  # the Unix time of this report; 0 if unknown

    def without_durations(self) -> AbsenceReport:
        """Return the report without the fields that change with time alone."""
        missing = tuple(one.replace(ago=None) for one in self.missing)
        return self.replace(missing=missing, said_at=0.0, waited=None if self.waited is None else 0.0)

    def describe(self, *, elapsed: float | None = 0.0) -> str:
        """Return "gpu-017 (lost 3 min ago) and gpu-023 (never seen)"; empty if no node is named."""
        shown = [
            f"{_shorten_name(one.node_id)}{one.where()} ({one.describe(elapsed=elapsed)})"
            for one in self.missing[:NAMED_OF_MANY]
        ]
        return _join_names(shown, self.count)

    def describe_wait(self, *, elapsed: float | None = 0.0) -> str:
        """Return "waiting 3 min for gpu-017 (lost 3 min ago)"; empty if no node is named."""
        names = self.describe(elapsed=elapsed)
        if not names:
            return ""
        waited = "" if self.waited is None or elapsed is None else f" {time_text(self.waited + elapsed)}"
        return f"waiting{waited} for {names}"

    def staying_member_names(self) -> str:
        """Return the names of the `staying` members: "gpu-001 and gpu-002"."""
        addresses = chain(self.staying_at, repeat(""))
        return _join_names(list(map(_shorten_name, map(node_label, self.staying, addresses))), len(self.staying))


def _shorten_name(text: str) -> str:
    return printable(text, most=NAME_MOST)


def _join_names(shown: list[str], count: int) -> str:
    if count > len(shown):
        return f"{', '.join(shown)} and {count - len(shown)} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


class AbsenceBook:
    """A coordinator's record of absent nodes. Recording one arrival or departure costs O(1)."""

    def __init__(self, expected: Iterable[str] = ()) -> None:
        self._expected = dict.fromkeys(expected)
        self._unseen = dict(self._expected)
        self._gone: dict[str, tuple[str, float | None, str, str]] = {}  # by id: how, when, address, why
        self._short_since: float | None = None

    def take_over(self, absent: AbsenceReport, *, now: float) -> None:
        """Add the missing nodes of the previous coordinator's report, which this node received at `now`."""
        for one in absent.missing:
            if one.how != NEVER_SEEN:
                self._unseen.pop(one.node_id, None)
                at = None if one.ago is None else now - one.ago
                self._gone[one.node_id] = one.how, at, one.address, one.why

    def add_arrival(self, node_id: str) -> None:
        """Record an arrival."""
        self._unseen.pop(node_id, None)
        self._gone.pop(node_id, None)

    def add_gone(
        self, node_id: str, *, left: bool, is_member: bool, address: str, now: float | None, why: str = ""
    ) -> None:
        """Record that a node has gone; it counts as missing only if it is a member or an expected node."""
        if node_id not in self._gone and (is_member or node_id in self._expected):
            self._unseen.pop(node_id, None)
            self._gone[node_id] = LEFT if left else LOST, now, address, why

    def mark_unseen_except(self, here: Iterable[str]) -> None:
        """Count expected nodes as never seen, except gone nodes and the nodes in a snapshot (`here`)."""
        present = set(here)
        self._unseen = {id: None for id in self._expected if id not in present and id not in self._gone}

    def reset_for_round(self) -> None:
        """Record that a round has completed: of the gone nodes, only expected nodes still count as missing."""
        self._gone = {node_id: how for node_id, how in self._gone.items() if node_id in self._expected}
        self._short_since = None

    def note_shortage(self, *, short: bool, now: float, waited: float | None = None) -> None:
        """Record whether too few nodes wait (`short`); `waited` has the seconds that they have waited, if known."""
        if not short:
            self._short_since = None
        elif self._short_since is None or waited is not None:
            self._short_since = now - (waited or 0.0)

    def make_report(self, *, now: float, staying: Mapping[str, str] | None = None) -> AbsenceReport:
        """Return the report; `staying` maps ids to addresses, for `AbsenceReport.staying`."""
        count = len(self._gone) + len(self._unseen)
        gone = (
            Missing(node_id=node_id, how=how, ago=None if at is None else max(now - at, 0.0), address=address, why=why)
            for node_id, (how, at, address, why) in self._gone.items()
        )
        unseen = (Missing(node_id=node_id, how=NEVER_SEEN) for node_id in self._unseen)
        return AbsenceReport(
            missing=tuple(islice(chain(gone, unseen), count if count <= NAMED_MOST else NAMED_OF_MANY)),
            count=count,
            waited=None if self._short_since is None else max(now - self._short_since, 0.0),
            staying=tuple(staying or ()),
            staying_at=tuple((staying or {}).values()),
        )


def node_label(node_id: str, address: str | None) -> str:
    """Return "gpu-017 (10.0.0.3)"; the id alone if the address is unknown or equals the id."""
    return f"{node_id} ({address})" if address and address != node_id else node_id
