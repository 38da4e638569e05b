"""Pure: folds what happens to nodes into a `View`, the coordinator's picture of its run.

One event changes one node, so folding is a matter of a few dictionaries, however many nodes there are: ten thousand
arrivals cost ten thousand small steps. A node's record is all there is to it:

    record                                   the node is
    ------------------------------------     ------------------------------------------------------
    written by the arrival in the round      a live member of the last round
    written by another arrival               waiting for the next round, or left out of it if it did not reach rank 0
    written with `left`                      gone, on its own account (a coordinator's marker looks like this, too)
    deleted, before saying so                gone, and lost if it was a live member

`enough_since` is when the last call began: when the arrivals became enough. Later arrivals do not move it; falling
below the minimum ends it, and reaching it again begins it anew (promise R11).
"""

from __future__ import annotations

import contextlib
from types import MappingProxyType
from typing import TYPE_CHECKING

from rdzv.core.absent import AbsenceBook
from rdzv.core.state import NAMED_MOST, NodeRecord, Progress, ban_among
from rdzv.core.stuck.accusing import Accusation, Accusations
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rdzv.core.round import Member, Round
    from rdzv.core.state import Ban, LastCoordinator
    from store.messages import Event

__all__ = ["View"]

_WHY: dict[str, str] = {
    "": "",
    "gone": "its process ended",
    "disconnected": "its connection closed, and it did not come back",
    "silent": "nothing was heard of it for its ttl",
}
"""How a node's lease ended, in words."""

UNSEEN = "it went while nobody coordinated"
"""Of a member that was there when the last coordinator reported, and is not when the next one begins."""


class View:
    """What a coordinator knows.

    Args:
        nodes_prefix: What the keys of nodes start with.
        needed: How many arrivals are enough.
        expected: Who is missed by name from the beginning.
        tells_causes: Whether the store says how a key's lease ended. Where it does not (etcd), a record that goes by
            itself has lapsed: who leaves says so before.
    """

    def __init__(
        self, nodes_prefix: str, *, needed: int, expected: Iterable[str] = (), tells_causes: bool = True
    ) -> None:
        self._otherwise = "" if tells_causes else _WHY["silent"]
        self._why_unseen: dict[str, str] = {}
        self._prefix = nodes_prefix
        self._accusations_prefix = f"{nodes_prefix}/accused/"
        self.accusations: Accusations = Accusations()
        self._needed = needed
        self.synced: bool = False
        self.seen: int = 0  # the latest revision that has been folded in
        self.round: Round | None = None
        self.members: dict[str, Member] = {}  # of the last round, whether still in it or not
        self.live: set[str] = set()  # those who are
        self.waiting: dict[str, NodeRecord] = {}  # by order of arrival
        self.left_out: dict[str, NodeRecord] = {}  # those who wait, and did not reach the last round's rank 0
        self._cut_off: dict[str, None] = {}  # those who wait, and have said that they did not reach some rank 0
        self.gave_up: dict[str, None] = {}  # those that wait, and have said which round they have given up
        self.lost: list[str] = []
        self.lost_count: int = 0
        self.departed: list[str] = []
        self.departed_count: int = 0
        self.left_early: bool = False  # one of them, elsewhere than where all had agreed to stop
        self.why_lost: dict[str, str] = {}  # of those who were taken out of the round, though alive
        self.standstill: str = ""  # that nobody in it gets on, in words
        self.enough_since: float | None = None
        self.absences: AbsenceBook = AbsenceBook(expected)
        self._now = 0.0  # of the event that is folded in
        self._why = ""  # by the same
        self.arrived_at: float | None = None  # when the last node came, as far as this coordinator has seen
        self.why: dict[str, str] = {}  # of the members that have gone, as far as it is known
        self._gone_members: set[str] = set()  # each counts once, as lost or as departed
        self._lost_now: set[str] = set()  # of the last round
        self._lost_before: set[str] = set()  # of the one before, and not in the last
        self._records: dict[str, NodeRecord] = {}
        self._inherited: Progress | None = None
        self._inherited_at = 0.0

    def took_over(
        self,
        round: Round | None,
        members: Iterable[Member],
        progress: Progress | None,
        *,
        progress_at: float,
        before: LastCoordinator | None = None,
    ) -> None:
        """Go on where the last coordinator was; to be called before the first event.

        Args:
            round: The last completed round.
            members: Everyone in it.
            progress: What the last coordinator said.
            progress_at: When that was heard, on this node's clock.
            before: Who it was, and how its term ended.
        """
        if before is not None:
            self._why_unseen[before.node_id] = _WHY[before.cause] or self._otherwise or UNSEEN
        self.round = round
        self.members = {member.node_id: member for member in members}
        self._inherited = progress if progress is not None and progress.round == self.number else None
        self._inherited_at = progress_at
        if self._inherited is not None:
            # In the same order, and also those who have come again meanwhile: what was announced is not taken back.
            for node_id in self._inherited.lost_ids:
                self._note(node_id, left=False)
            for node_id in self._inherited.departed_ids:
                self._note(node_id, left=True)
            self.absences.take_over(self._inherited.absent, now=progress_at)
            self.why_lost = dict(self._inherited.why_lost)
            self.left_early = self._inherited.left_early

    @property
    def number(self) -> int:
        """The number of the last completed round; -1 for none."""
        return self.round.number if self.round else -1

    @property
    def next_number(self) -> int:
        """The number that the next round gets: above every round that anybody who comes has known (S10)."""
        return 1 + max((self.number, *(record.arrived_after for record in self.waiting.values())))

    def fold(
        self, event: Event, *, now: float, last_call_timeout: float, bans: Mapping[str, Ban] = MappingProxyType({})
    ) -> None:
        """Take in one event of the watch on nodes.

        Args:
            event: What happened.
            now: Seconds on this node's clock.
            last_call_timeout: How long a last call lasts, to reckon when an inherited one began.
            bans: Who is banned: that is why such a node's record goes.
        """
        if event.kind == "reset":
            self.synced = False
            self.accusations.clear()
            self._records.clear()  # what of it is not in the snapshot that follows has gone meanwhile
            self.live.clear()
            self.waiting.clear()
            self._forget_what_they_said()
            return
        if event.kind == "synced":
            self._synced(now, last_call_timeout)
            return
        self._now = now
        self._why = _WHY[event.cause] or (self._otherwise if event.kind == "delete" else "")
        self.seen = max(self.seen, event.revision)
        if event.key.startswith(self._accusations_prefix):
            self._accused(event)
            return
        node_id = event.key[len(self._prefix) :]
        if "/" in node_id:  # a coordinator's marker, or a key of another run, whose prefix is within this one
            if self.synced:
                self._count(now)
            return
        there = self._records.get(node_id)
        ban = ban_among(bans, node_id, there.attributes if there is not None else {})
        if ban is not None and not event.cause:
            self._why = str(ban)
        elif event.kind == "delete" and node_id in self.why_lost:
            self._why = self.why_lost[node_id]
        if event.kind == "put":
            try:
                record = NodeRecord.unpack(event.value, node_id=node_id, arrival=event.revision)
            except RendezvousStateError:
                # Not a node of ours: it takes part in nothing, and the arrival that stood there stands no more.
                self._gone(node_id)
            else:
                self._arrived(record)
        else:
            self._gone(node_id)
        if self.synced:
            self._count(now)

    def resized(self, *, needed: int, now: float) -> None:
        """From now on, so many arrivals are enough."""
        self._needed = needed
        if self.synced:
            self._count(now)

    def record(self, node_id: str) -> NodeRecord:
        """Return what a node that is here has said of itself, whether it is in the last round or waits for the next."""
        return self._records[node_id]

    def completed(self, round: Round, members: Iterable[Member], *, now: float) -> None:
        """A round was committed with these members. Spares left over may be enough for the next one's last call."""
        self.round = round
        self.members = {member.node_id: member for member in members}
        self.live.clear()
        self.absences.completed()
        self.lost.clear()
        self.departed.clear()
        self.why_lost.clear()
        self.standstill = ""
        self._gone_members.clear()
        self.why.clear()
        self._lost_before, self._lost_now = self._lost_now - self.members.keys(), set()
        self.lost_count = self.departed_count = 0
        self.left_early = False
        self._inherited = None
        self.enough_since = None
        waiting, self.waiting = self._everyone_waiting(), {}
        self._forget_what_they_said()
        for record in waiting:
            self._place(record)
        self._count(now)

    @property
    def expected_back(self) -> set[str]:
        """Who may come back from an outage: those who were lost in it, once one of them has come and says so.

        An outage that ends comes to an end for all. Whoever was merely killed is not told apart from them; a last call
        ends the wait. If the others have met without them, those of the round before count, too.
        """
        lapsed = any(record.lapsed_in >= max(self.number - 1, 0) for record in self.waiting.values())
        return {one for one in self._lost_now | self._lost_before if one not in self._records} if lapsed else set()

    def stand(self, members: Iterable[Member]) -> bool:
        """Return whether each of these, chosen a moment ago, waits still, by the same arrival."""
        arrivals = {node_id: record.arrival for node_id, record in self.waiting.items()}
        return all(arrivals.get(member.node_id) == member.arrival for member in members)

    def _synced(self, now: float, last_call_timeout: float) -> None:
        """Everything that was there has been seen; what of the last round is missing has gone."""
        self.synced = True
        # A snapshot comes in order of name; who is taken in first, and who is a spare, goes by arrival.
        self.waiting = dict(sorted(self.waiting.items(), key=lambda item: item[1].arrival))
        inherited = self._inherited
        # Departures beyond those that were named cannot be told from losses by name, only by number.
        unnamed = max(inherited.departed - self.departed_count, 0) if inherited else 0
        for node_id in self.members:
            if node_id not in self._records and node_id not in self._gone_members:
                self._miss(node_id, left=unnamed > 0, at=None)
                unnamed -= 1
        self.absences.look_again(self._records)
        if inherited is not None:
            self.lost_count = max(self.lost_count, inherited.lost)
            self.departed_count = max(self.departed_count, inherited.departed)
        self._count(now)
        if self.enough_since is not None and inherited is not None and self._goes_on(inherited):
            assert inherited.last_call_left is not None
            left = max(inherited.last_call_left - (now - self._inherited_at), 0.0)
            self.enough_since = now - max(last_call_timeout - left, 0.0)
        if inherited is not None and inherited.absent.waited is not None:
            waited = inherited.absent.waited + (now - self._inherited_at)
            self.absences.count_waiting(short=self._too_few_wait, now=now, waited=waited)
        self._inherited = None

    def _goes_on(self, inherited: Progress) -> bool:
        """Return whether the last call that ran when this was said still runs.

        It does if those who stood then and stand now are enough; else the count fell below the minimum while nobody
        was looking, and those who have come since begin a new one.
        """
        standing = sum(1 for record in self.waiting.values() if record.arrival <= inherited.last_arrival)
        return inherited.last_call_left is not None and standing >= self._needed

    def _accused(self, event: Event) -> None:
        self.accusations.delete(event.key)
        if event.kind == "put":
            with contextlib.suppress(RendezvousStateError):  # of a later release, perhaps
                self.accusations.put(event.key, Accusation.unpack(event.value))

    def _arrived(self, record: NodeRecord) -> None:
        if record.left:
            self._why = record.why or self._why
            if record.node_id in self.members and record.node_id not in self._gone_members:
                self.left_early |= not record.stopped
            self._gone(record.node_id, left=True)
            return
        self.arrived_at = self._now
        self._take_out(record.node_id)
        self._place(record)

    def _place(self, record: NodeRecord) -> None:
        self._records[record.node_id] = record
        self.absences.came(record.node_id)
        member = self.members.get(record.node_id)
        if member is not None and member.arrival == record.arrival:
            self.live.add(record.node_id)
        else:
            self.waiting[record.node_id] = record
            if member is not None and (record.arrived_after < self.number or record.lapsed_in == self.number):
                # It was lost while nobody looked, and is back; or the answer to its arrival was, and it does not know
                # that a round has taken that in. Those who are in the round wait for it in vain.
                self._miss_again(record.node_id)
            if record.gave_up:
                self.gave_up[record.node_id] = None
            if record.cut_off:
                self._cut_off[record.node_id] = None

    def _take_out(self, node_id: str) -> None:
        self.live.discard(node_id)
        for place in (self.waiting, self.left_out, self.gave_up, self._cut_off):
            place.pop(node_id, None)

    def _forget_what_they_said(self) -> None:
        self.left_out.clear()
        self.gave_up.clear()
        self._cut_off.clear()

    def _everyone_waiting(self) -> list[NodeRecord]:
        return sorted((*self.waiting.values(), *self.left_out.values()), key=lambda record: record.arrival)

    def _leave_out(self) -> None:
        """Leave out who did not reach the last round's rank 0 as others did, unless the others are too few."""
        host = self.round.host if self.round is not None else ""
        cut_off = {node_id for node_id in self._cut_off if host in self._records[node_id].cut_off}
        others = len(self.waiting) + len(self.left_out) - len(cut_off) + len(self.live)
        if others < self._needed:
            cut_off = set()
        if cut_off != self.left_out.keys():
            everyone = self._everyone_waiting()
            self.waiting = {one.node_id: one for one in everyone if one.node_id not in cut_off}
            self.left_out = {one.node_id: one for one in everyone if one.node_id in cut_off}

    def _gone(self, node_id: str, *, left: bool = False) -> None:
        """A node has gone. A member that had come again for the next round is missed like any other."""
        record = self._records.pop(node_id, None)
        self._take_out(node_id)
        if record is not None or node_id in self.members:
            self._miss(node_id, left=left, at=self._now, address=record.address if record is not None else "")

    def _miss(self, node_id: str, *, left: bool, at: float | None, address: str = "") -> None:
        """A node is not here any more, since then if that is known."""
        is_member = node_id in self.members
        unseen = "" if left else self._why_unseen.get(node_id, UNSEEN)
        why = self._why if at is not None else unseen
        self.absences.went(node_id, left=left, is_member=is_member, address=address, now=at, why=why)
        if is_member:
            if why and node_id not in self._gone_members and len(self.why) < NAMED_MOST:
                self.why[node_id] = why
            self._note(node_id, left=left)

    def _miss_again(self, node_id: str) -> None:
        """A member is here, and not in its round: it counts as lost, once."""
        if node_id not in self._gone_members and len(self.why) < NAMED_MOST:
            self.why[node_id] = self._why_unseen.get(node_id, UNSEEN)
        self._note(node_id, left=False)

    def _note(self, node_id: str, *, left: bool) -> None:
        if node_id in self._gone_members:
            return
        self._gone_members.add(node_id)
        if left:
            self.departed_count += 1
        else:
            self.lost_count += 1
            self._lost_now.add(node_id)
        names = self.departed if left else self.lost
        if len(names) < NAMED_MOST:
            names.append(node_id)

    @property
    def _too_few_wait(self) -> bool:
        return 0 < len(self.waiting) < self._needed and not self.live

    def _count(self, now: float) -> None:
        if self._cut_off or self.left_out:
            self._leave_out()
        self.absences.count_waiting(short=self._too_few_wait, now=now)
        if len(self.waiting) < self._needed:
            self.enough_since = None
        elif self.enough_since is None:
            self.enough_since = now
