"""Folds the events of nodes into a `TermView`, the state of a run as its coordinator knows it.

A node's state follows from its record:

    record                                         node
    ------------------------------------------     ------------------------------------------------------
    written by the arrival in the last round       live member of that round
    written by another arrival                     waiting for the next round; left out if it did not reach rank 0
    written with `left`                            has left by itself
    deleted without `left`                         gone; lost if it was a live member
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from rdzv.core.absent import AbsenceBook
from rdzv.core.state import NAMED_MOST, NodeRecord, Progress, find_ban
from rdzv.core.stopping import StopNegotiation
from rdzv.core.stuck.accusing import Accusations
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rdzv.core.round import Member, Round
    from rdzv.core.state import Ban, Head, LastCoordinator
    from rdzv.core.stopping import LastBegun
    from store.messages import Event

_WHY: dict[str, str] = {  # how a node's lease ended, in words
    "": "",
    "gone": "its process ended",
    "disconnected": "its connection closed, and it did not come back",
    "silent": "nothing was heard of it for its ttl",
}

UNSEEN = "it went while nobody coordinated"  # the reason if no coordinator saw the node go


class _GoneMember(NamedTuple):
    """A member that has gone: `left` if it left by itself, else it was lost."""

    left: bool
    why: str = ""


class StuckMember(NamedTuple):
    """For `TermView.apply_fact`: a member of this round must be expelled although its lease is live."""

    round: int
    arrival: int
    node_id: str
    why: str


class StandstillReport(NamedTuple):
    """For `TermView.apply_fact`: a sentence saying that no member of this round makes progress, or empty."""

    round: int
    said: str


class StopAnswer(NamedTuple):
    """For `TermView.apply_fact`: the step that a member says it has begun; None: all answers so far are read."""

    node_id: str = ""
    begun: LastBegun | None = None


class TermView:
    """A run's state as its coordinator knows it. Only the deciding task changes a view, never while `decide` runs.

    Without `tells_causes`, the store (etcd) does not say how a key's lease ended, so a deleted record's lease counts as
    expired, unless the record was written with `left` before.
    """

    def __init__(
        self, nodes_prefix: str, *, needed: int, expected: Iterable[str] = (), tells_causes: bool = True
    ) -> None:
        self._prefix = nodes_prefix
        self._accusations_prefix = f"{nodes_prefix}/accused/"
        self._needed = needed
        self._otherwise = "" if tells_causes else _WHY["silent"]
        self._before: tuple[str, str] = "", ""  # the previous coordinator, and why its term ended
        self.synced: bool = False
        self.seen: int = 0  # the revision of the latest applied event
        self.round: Round | None = None
        self.members: dict[str, Member] = {}  # all members of the last round
        self.live: set[str] = set()  # the members still in the last round
        self.waiting: dict[str, NodeRecord] = {}  # in order of arrival, without `left_out`
        self.left_out: dict[str, NodeRecord] = {}  # waiting nodes, omitted as they did not reach the last rank 0
        self.gave_up: dict[str, NodeRecord] = {}  # waiting nodes that gave up a round: members did not reach rank 0
        self._cut_off: dict[str, NodeRecord] = {}  # waiting nodes that did not reach some rank 0 that others reached
        self.left_early: bool = False  # True: a member left neither at the agreed step nor after its body
        self.why_lost: dict[str, str] = {}  # why members were expelled, set before their deletion is applied
        self.standstill: str = ""
        self.enough_since: float | None = None  # start of the last call: enough nodes wait; no arrival moves it (R11)
        self.arrived_at: float | None = None  # when this coordinator saw the last arrival
        self.absences: AbsenceBook = AbsenceBook(expected)
        self.accusations: Accusations = Accusations()
        self.agreement: StopNegotiation = StopNegotiation()
        self._stuck: dict[str, str] = {}  # members to expel, and why
        self._missed: dict[str, _GoneMember] = {}  # gone members, also if they came back; each counts once
        self._unnamed: dict[bool, int] = {True: 0, False: 0}  # the numbers of gone members not in `_missed`, by `left`
        self._lost_before: set[str] = set()  # nodes lost in the round before this, and not members of this
        self.records: dict[str, NodeRecord] = {}  # the records of live members and waiting nodes
        self._inherited: Progress | None = None
        self._inherited_at: float
        self._moves = False

    def take_over(
        self,
        round: Round | None,
        members: Iterable[Member],
        progress: Progress | None,
        *,
        progress_at: float,
        before: LastCoordinator | None = None,
        moves: bool = False,
    ) -> None:
        """Restore the previous coordinator's state; call this before the first event. `before` names that coordinator.

        `members` are all members of the last round, `round`. This node received `progress` at `progress_at`. With
        `moves`, the store is ending, so members that have gone unseen have left for the next store.
        """
        self._moves = moves
        if before is not None:
            self._before = before.node_id, _WHY[before.cause] or self._otherwise or UNSEEN
        self.round = round
        self.members = {member.node_id: member for member in members}
        if progress is not None and progress.round == self.last_number:
            # Keep the reported members in order, also those that have come back: a reported loss is not revoked.
            for left, node_ids in ((False, progress.lost_ids), (True, progress.departed_ids)):
                self._missed.update((node_id, _GoneMember(left)) for node_id in node_ids)
            self.absences.take_over(progress.absent, now=progress_at)
            self.why_lost = dict(progress.why_lost)
            self.left_early = progress.left_early
            self._inherited, self._inherited_at = progress, progress_at

    @property
    def last_number(self) -> int:
        """The number of the last round; -1 for none."""
        return self.round.number if self.round else -1

    @property
    def next_number(self) -> int:
        """The number of the next round, larger than any that the waiting nodes know (S13)."""
        return 1 + max((self.last_number, *(record.arrived_after for record in self.waiting.values())))

    @property
    def lost(self) -> list[str]:
        """The first `NAMED_MOST` lost members, in order."""
        return self._first_gone_members(left=False)

    @property
    def departed(self) -> list[str]:
        """The first `NAMED_MOST` departed members, in order."""
        return self._first_gone_members(left=True)

    @property
    def lost_count(self) -> int:
        """The number of lost members, named or not."""
        return self._count_gone_members(left=False)

    @property
    def departed_count(self) -> int:
        """The number of departed members, named or not."""
        return self._count_gone_members(left=True)

    @property
    def why_gone(self) -> dict[str, str]:
        """The known reasons why members have gone."""
        return {node_id: one.why for node_id, one in self._missed.items() if one.why}

    def _first_gone_members(self, *, left: bool) -> list[str]:
        return list(islice((node_id for node_id, one in self._missed.items() if one.left is left), NAMED_MOST))

    def _count_gone_members(self, *, left: bool) -> int:
        return self._unnamed[left] + sum(1 for one in self._missed.values() if one.left is left)

    @property
    def next_to_expel(self) -> tuple[str, str] | None:
        """The next live member to expel, and why."""
        believed = self.accusations.member_to_expel(round=self.last_number, live=self.live)
        return believed or next((one for one in self._stuck.items() if one[0] in self.live), None)

    def apply_fact(self, fact: StuckMember | StandstillReport | StopAnswer) -> None:
        """Apply a fact from another task, unless it is about another round or arrival."""
        match fact:
            case StopAnswer(node_id, begun):
                self.agreement.note_answer(node_id, begun)
            case StandstillReport(round=number, said=said) if number == self.last_number:
                self.standstill = said
            case StuckMember(round=number, arrival=arrival, node_id=node_id, why=why) if number == self.last_number:
                if node_id in self.live and self.records[node_id].arrival == arrival:
                    self._stuck.setdefault(node_id, why)

    def note_own_departure(self, node_id: str, *, stopped: bool) -> None:
        """If the own node's record is gone, note that it left; `stopped`: at the agreed step."""
        if node_id not in self.records:
            self.left_early |= not stopped
            self._note_gone(node_id, left=True, at=None, why="")

    def apply_node_event(
        self, event: Event, *, now: float, last_call_timeout: float, bans: Mapping[str, Ban] = MappingProxyType({})
    ) -> None:
        """Apply one event of the watch on nodes' records.

        `bans` tell why records were deleted. `last_call_timeout` and the previous coordinator's report tell when its
        last call began.
        """
        if event.kind == "reset":
            self.synced = False
            self.accusations.clear()
            self.records.clear()  # a snapshot of all existing records follows
            self.live.clear()
            self._clear_waiting()
            return
        if event.kind == "synced":
            self._on_synced(now, last_call_timeout)
            return
        self.seen = max(self.seen, event.revision)
        if event.key.startswith(self._accusations_prefix):
            self.accusations.apply_event(event)
            return
        node_id = event.key[len(self._prefix) :]
        if "/" not in node_id:  # neither a marker nor a key of another run below this run's keys
            self._apply_node(node_id, event, now, bans)
        if self.synced:
            self._update_shortage(now)

    def _apply_node(self, node_id: str, event: Event, now: float, bans: Mapping[str, Ban]) -> None:
        there, record = self.records.get(node_id), None
        if event.kind == "put":
            # If an unreadable value has replaced a node's record, the node counts as gone.
            with contextlib.suppress(RendezvousStateError):
                record = NodeRecord.unpack(event.value, node_id=node_id, arrival=event.revision)
        if record is not None and not record.left:
            self.arrived_at = now
            self._remove_node(node_id)
            self._add_record(record)
            return
        why = _WHY[event.cause] or (self._otherwise if event.kind == "delete" else "")
        ban = find_ban(bans, node_id, there.attributes if there is not None else {})
        if ban is not None and not event.cause:
            why = str(ban)
        elif event.kind == "delete":
            why = self.why_lost.get(node_id, why)
        if record is not None:
            why = record.why or why
            self.left_early |= node_id in self.members and node_id not in self._missed and not record.stopped
        self.records.pop(node_id, None)
        self._remove_node(node_id)
        if there is not None or node_id in self.members:
            self._note_gone(node_id, left=record is not None, at=now, why=why, address=there.address if there else "")

    def set_min_nodes(self, *, needed: int, now: float) -> None:
        """Set the fewest nodes of a round."""
        self._needed = needed
        if self.synced:
            self._update_shortage(now)

    def note_round(self, round: Round, members: Iterable[Member], *, now: float) -> None:
        """Record that a round was committed. If enough nodes still wait, the next last call begins."""
        lost = {node_id for node_id, one in self._missed.items() if not one.left}
        self.round = round
        self.members = {member.node_id: member for member in members}
        self._lost_before = lost - self.members.keys()
        self._missed.clear()
        self._unnamed = {True: 0, False: 0}
        self.absences.reset_for_round()
        self.why_lost.clear()
        self._stuck.clear()
        self.standstill, self.left_early = "", False
        self.enough_since = self._inherited = None
        waiting = self._all_waiting_records()
        self._clear_waiting()
        for record in waiting:
            self._add_record(record)
        self._update_shortage(now)

    @property
    def nodes_expected_back(self) -> set[str]:
        """The lost nodes that may come back; empty unless a waiting node's record says that an outage dropped the node.

        All nodes that an outage cut off may come back. Killed nodes look the same, so the last call limits the wait.
        A round may have completed during the outage, so nodes lost in the round before count, too.
        """
        if not any(record.lapsed_in >= max(self.last_number - 1, 0) for record in self.waiting.values()):
            return set()
        lost = {node_id for node_id, one in self._missed.items() if not one.left}
        return (lost | self._lost_before) - self.records.keys()

    def _on_synced(self, now: float, last_call_timeout: float) -> None:
        self.synced = True
        self.waiting = dict(sorted(self.waiting.items(), key=lambda item: item[1].arrival))
        said, self._inherited = self._inherited, None
        # Of gone members that the previous coordinator's report does not name, only the numbers are known.
        unnamed = max(said.departed - self.departed_count, 0) if said else 0
        for node_id in self.members:
            if node_id not in self.records and node_id not in self._missed:
                why = self._why_unseen(node_id)
                left = unnamed > 0 or (self._moves and why == UNSEEN)
                self._note_gone(node_id, left=left, at=None, why="" if left else why)
                unnamed -= 1
        self.absences.mark_unseen_except(self.records)
        self._update_shortage(now)
        if said is None:
            return
        for left, count in ((False, said.lost), (True, said.departed)):
            self._unnamed[left] = max(count - self._count_gone_members(left=left), 0)
        if said.last_call_left is not None:
            # If enough nodes that the report counted still wait, its last call continues; else a new one began later.
            standing = sum(1 for record in self.waiting.values() if record.arrival <= said.last_arrival)
            if standing >= self._needed:
                left_of_it = max(said.last_call_left - (now - self._inherited_at), 0.0)
                self.enough_since = now - max(last_call_timeout - left_of_it, 0.0)
        if said.absent.waited is not None:
            waited = said.absent.waited + (now - self._inherited_at)
            self.absences.note_shortage(short=self._too_few_wait, now=now, waited=waited)

    def _why_unseen(self, node_id: str) -> str:
        who, why = self._before
        return why if node_id == who else UNSEEN

    def _add_record(self, record: NodeRecord) -> None:
        self.records[record.node_id] = record
        self.absences.add_arrival(record.node_id)
        member = self.members.get(record.node_id)
        if member is not None and member.arrival == record.arrival:
            self.live.add(record.node_id)
            return
        self.waiting[record.node_id] = record
        if member is not None and (record.arrived_after < self.last_number or record.lapsed_in == self.last_number):
            # A member whose lease expired, or that never learned of the round, is lost: no other member waits for it.
            self._missed.setdefault(record.node_id, _GoneMember(left=False, why=self._why_unseen(record.node_id)))
        if record.gave_up:
            self.gave_up[record.node_id] = record
        if record.cut_off:
            self._cut_off[record.node_id] = record

    def _remove_node(self, node_id: str) -> None:
        self.live.discard(node_id)
        for place in (self.waiting, self.left_out, self.gave_up, self._cut_off):
            place.pop(node_id, None)

    def _clear_waiting(self) -> None:
        for place in (self.waiting, self.left_out, self.gave_up, self._cut_off):
            place.clear()

    def _all_waiting_records(self) -> list[NodeRecord]:
        return sorted((*self.waiting.values(), *self.left_out.values()), key=lambda record: record.arrival)

    def _leave_out_unreached(self) -> None:
        """Leave out nodes that did not reach the last round's rank 0, unless too few other nodes remain."""
        host = self.round.host if self.round is not None else ""
        cut_off = {node_id for node_id, record in self._cut_off.items() if host in record.cut_off}
        if len(self.waiting) + len(self.left_out) - len(cut_off) + len(self.live) < self._needed:
            cut_off = set()
        if cut_off != self.left_out.keys():
            everyone = self._all_waiting_records()
            self.waiting = {one.node_id: one for one in everyone if one.node_id not in cut_off}
            self.left_out = {one.node_id: one for one in everyone if one.node_id in cut_off}

    def _note_gone(self, node_id: str, *, left: bool, at: float | None, why: str, address: str = "") -> None:
        is_member = node_id in self.members
        self.absences.add_gone(node_id, left=left, is_member=is_member, address=address, now=at, why=why)
        if is_member:
            self._missed.setdefault(node_id, _GoneMember(left, why))

    @property
    def _too_few_wait(self) -> bool:
        return 0 < len(self.waiting) < self._needed and not self.live

    def _update_shortage(self, now: float) -> None:
        if self._cut_off:
            self._leave_out_unreached()
        self.absences.note_shortage(short=self._too_few_wait, now=now)
        if len(self.waiting) < self._needed:
            self.enough_since = None
        elif self.enough_since is None:
            self.enough_since = now


class CommitRejection(NamedTuple):
    """The error by which the store rejected a round; no round is committed before `until`."""

    until: float
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The input of `decide`, which does not change during the call; `decide` may run in another thread."""

    view: TermView
    head: Head
    told: Progress | None = None  # the last progress written, by this coordinator or the previous one
    told_at: float = 0.0
    resized_at: int = 0  # the revision of the last applied resize
    unbanned_at: int = 0  # the revision of the last lifted ban in the history
    obstacle: CommitRejection | None = None
