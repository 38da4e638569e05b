"""The decisions of the coordinator (`decide`) and of a waiting node (`act_of_joiner`), each with its reason.

`decide` returns the first act that is due, in the order of the union `Act`.

A run's phases:

    GATHERING   fewer than `needed` nodes have arrived     -> wait for arrivals
    LAST_CALL   enough, but fewer than `capacity`          -> wait until the last call is over
    TRAINING    a round has live members                   -> wait until they have left it
    CLOSED                                                 -> do nothing

A round completes once enough nodes have arrived, the last call is over, and the last round has no live member (promise
R2). The last call also runs while the last round has live members (R11).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from rdzv.core.absent import NAMED_OF_MANY
from rdzv.core.addresses import with_reachable_addresses
from rdzv.core.hosts.lost_store import ranks_in_lost_store
from rdzv.core.ranks import describe_domain_counts, fill_units
from rdzv.core.state import MOVES, NAMED_MOST, Closed, Head, Phase, Progress, leaving_in_words
from rdzv.errors import RendezvousSettingsError
from store.printable import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from rdzv.core.ranks import RankOrder
    from rdzv.core.round import Round
    from rdzv.core.state import NodeRecord, Unban
    from rdzv.core.stopping import RoundStop
    from rdzv.core.view import Picture, TermView


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings by which a coordinator decides."""

    needed: int  # the fewest nodes of a round
    capacity: int  # the most nodes
    unit: int = 1  # world sizes, `needed` and `capacity` are multiples of this number
    last_call: float = 30.0  # seconds
    early_last_call: bool = True  # end the last call of a re-rendezvous when no other node is expected
    order: RankOrder
    expected: tuple[str, ...] = ()  # nodes that count as missing while absent
    unit_within: str = ""  # an attribute with one value in all nodes of a unit; empty: units may mix values
    ttl: float = 0.0  # seconds within which a member cut off from the store stops

    def select_complete_units(self, records: Sequence[NodeRecord]) -> Sequence[NodeRecord]:
        """Return the nodes that form complete units; without `unit_within`, all."""
        return fill_units(records, unit=self.unit, attribute=self.unit_within) if self.unit_within else records

    def why_no_whole_units(self, records: Iterable[NodeRecord]) -> str:
        """Return why no round completes although at least `needed` nodes wait: the waiting nodes fill too few units."""
        counts = describe_domain_counts(records, attribute=self.unit_within)
        units = f"units of {plural(self.unit)} lie within one {self.unit_within} each"
        return f"{units}, and fewer than {self.needed} nodes fill whole ones: {counts}"

    def round_size(self, count: int) -> int:
        """Return a round's size if `count` nodes have arrived; 0 if too few."""
        return min(count - count % self.unit, self.capacity) if count >= self.needed else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResize:
    """Apply the run's new minimum and maximum of nodes, written at `revision`."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expel:
    """Remove a member from the round, and write the progress in the same transaction, which notifies the member."""

    node_id: str
    arrival: int
    why: str
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRound:
    """Commit this round; `members` are in order of rank."""

    number: int
    members: tuple[NodeRecord, ...]
    progress: Progress

    def has_same_arrivals(self, other: CommitRound) -> bool:
        """Return True if both rounds have the same number and arrivals."""
        arrivals = [sorted(record.arrival for record in one.members) for one in (self, other)]
        return self.number == other.number and arrivals[0] == arrivals[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRoundProgress:
    """Write the progress, and add the lifted bans, `unbans` by key, to the history."""

    progress: Progress
    unbans: Mapping[str, Unban] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRoundStop:
    """Write `stop`, the question or the decision (see `RoundStop`), if its key still has revision `over`."""

    stop: RoundStop
    over: int
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Do nothing until `until` on the coordinator's clock (None: no limit), or until the next event."""

    until: float | None
    progress: Progress
    error: BaseException | None = None  # the rank order's or commit's error, if any


Act = ApplyResize | Expel | CommitRound | WriteRoundProgress | WriteRoundStop | Idle

LAST_CALL_GRACE = 10.0  # seconds that join timeouts stay suspended after a last call, for the commit
MANY = 64  # from this many nodes on, a change that no node acts upon is reported less often
UNBANS_AT_ONCE = 16  # lifted bans that one write of the history adds, at most
RETRY_AFTER = 1.0  # seconds without an event until a failed rank order, or a rejected commit, is tried again
PROBLEM_MOST = 200  # characters of `Progress.problem`, which every node receives
GIVEN_UP_MOST = 300  # characters of `Progress.given_up` and `NodeRecord.gave_up`, which name nodes


def decide(picture: Picture, rules: Rules, *, now: float) -> Act:
    """Return the first act due at `now` on the coordinator's clock."""
    view, head, closed = picture.view, picture.head, picture.head.closed is not None
    if head.resized is not None and head.resized.revision > picture.resized_at:
        return ApplyResize(revision=head.resized.revision)
    if view.next_to_expel is not None:
        node_id, why = view.next_to_expel
        record, progress = view.records[node_id], _progress_of(view, rules, closed=closed, now=now, drained=head.drains)
        progress = progress.after_expulsion(node_id, address=record.address, why=why)
        return Expel(node_id=node_id, arrival=record.arrival, why=why, progress=progress)
    act = decide_round(view, rules, head, now=now)
    if isinstance(act, CommitRound):
        if picture.obstacle is None or now >= picture.obstacle.until:
            return act
        until, error = picture.obstacle
        progress = with_problem(act.progress, f"the store does not take it: {error}")
        act = Idle(until=until, progress=progress, error=error)
    progress, unbans = act.progress, _unbans_to_note(picture)
    due = next_progress_write_at(
        picture.told, picture.told_at, progress, nodes=progress.joined + progress.live, now=now
    )
    if unbans or (due is not None and due <= now):
        return WriteRoundProgress(progress=progress, unbans=unbans)
    if view.round is not None and view.round.in_steps and (stop := _stop(view, view.round, head, progress)) is not None:
        return WriteRoundStop(stop=stop[0], over=stop[1], progress=progress)
    return replace(act, until=min((at for at in (act.until, due) if at is not None), default=None))


def _unbans_to_note(picture: Picture) -> dict[str, Unban]:
    if picture.view.round is None:
        return {}  # the history begins with the first round
    new = [it for it in picture.head.unbans.items() if it[1].revision > picture.unbanned_at]
    return dict(sorted(new, key=lambda it: it[1].revision)[:UNBANS_AT_ONCE])


def _stop(view: TermView, round: Round, head: Head, progress: Progress) -> tuple[RoundStop, int] | None:
    """Return the `RoundStop` to write, and the revision that it replaces; None if none is due."""
    return view.agreement.next_stop_record(
        round.number,
        head.stop,
        why=reason_to_leave_round(progress, head, live=view.live),
        for_newcomers=not (head.closed or head.moves or progress.draining or len(view.live) > progress.capacity),
        closing=head.closed is not None,
        members=[node_id for node_id in view.live if view.records[node_id].progress is not None],
        some_have_gone=bool(view.departed_count or view.lost_count),
    )


def decide_round(view: TermView, rules: Rules, head: Head, *, now: float) -> Idle | CommitRound:
    """Return the next round if it can complete now, else an `Idle` whose progress says why not."""
    assert view.synced, "the picture is complete: a node that it lacks would count as gone"
    progress = _progress_of(view, rules, closed=head.closed is not None, now=now, drained=head.drains)
    if progress.phase in (Phase.CLOSED, Phase.GATHERING):
        return Idle(until=None, progress=progress)
    if head.moves:
        return Idle(until=None, progress=with_problem(progress, MOVES))
    ends = math.inf if view.enough_since is None else view.enough_since + rules.last_call
    placed = len(rules.select_complete_units([*view.waiting.values()]))
    full = rules.round_size(placed) == rules.capacity
    # Nodes of a restarted job may have the former names, but know no round and arrive one by one: keep the last call.
    regroup = any(
        id in view.members and record.arrived_after >= view.last_number for id, record in view.waiting.items()
    )
    # In a re-rendezvous, expect no further node if no lost member may come back.
    nobody_else = rules.early_last_call and regroup and not view.nodes_expected_back
    is_news = view.round is None or view.round.revision < head.lost_store_told
    lost = head.lost_store if is_news else None
    survivors = ranks_in_lost_store(view.waiting.values(), lost)
    if lost is not None:
        missing, ends_at = lost.awaited - len(survivors), head.lost_store_at + rules.ttl
        if missing > 0 and now < ends_at:
            of_round = f"of {plural(lost.awaited)} of round {lost.round}, whose store was lost"
            return Idle(until=ends_at, progress=with_problem(progress, f"{missing} {of_round}, may still be at work"))
        nobody_else |= rules.early_last_call and bool(survivors)
    if view.live:
        # Wake at the end of a last call, to report it.
        still = now < ends < math.inf and not full
        return Idle(until=ends if still else None, progress=progress)
    if not rules.round_size(placed):
        return Idle(until=None, progress=with_problem(progress, rules.why_no_whole_units(view.waiting.values())))
    if full or nobody_else or now >= ends:
        try:
            # Once a round has completed in this store, use that round's ranks, not ranks of the lost store.
            ranked = survivors if view.round is None else {}
            complete = _new_commit(view, rules, progress, ranked, after=-1 if lost is None else lost.round)
        except BaseException as error:  # noqa: BLE001  the order may be a user's function
            stuck = with_problem(progress, f"rank_order fails with {type(error).__name__}: {error}")
            return Idle(until=now + RETRY_AFTER, progress=stuck, error=error)
        try:
            return replace(complete, members=with_reachable_addresses(complete.members))
        except RendezvousSettingsError as error:
            return Idle(until=None, progress=with_problem(progress, str(error)))
    return Idle(until=ends, progress=progress)


def with_problem(progress: Progress, problem: str) -> Progress:
    """Return the progress with a problem that prevents the next round, and without a last call."""
    return progress.replace(problem=problem[:PROBLEM_MOST], last_call_left=None)


def _progress_of(view: TermView, rules: Rules, *, closed: bool, now: float, drained: Collection[str]) -> Progress:
    joined, live = len(view.waiting), len(view.live)
    left = None
    if view.enough_since is not None and rules.round_size(joined) < rules.capacity:
        left = max(view.enough_since + rules.last_call - now, 0.0)
    if closed:
        phase = Phase.CLOSED
    elif live:
        phase = Phase.TRAINING
    elif joined >= rules.needed:
        phase = Phase.LAST_CALL
    else:
        phase = Phase.GATHERING
    # No spares while too few nodes are here: a spare's join timeout would be suspended, but must run (R1).
    here = [*(view.records[node_id] for node_id in view.live), *view.waiting.values()] if rules.unit_within else ()
    room = rules.round_size(len(rules.select_complete_units(here)) if rules.unit_within else live + joined)
    spares = min(live + joined - room, joined) if room else 0
    spares_after, spare_ids = _find_spares(view, rules, spares)
    left_out = len(view.left_out)
    given_up = min(view.gave_up.values(), key=lambda record: (not record.unreached, record.arrival), default=None)
    return Progress(
        phase=phase,
        round=view.last_number,
        joined=joined + left_out,
        needed=rules.needed,
        capacity=rules.capacity,
        live=live,
        waiting=max(room - live, 0) if live else 0,
        spares=spares + left_out,
        spares_after=spares_after,
        spare_ids=(*view.left_out, *spare_ids)[:NAMED_MOST],
        last_call_left=None if closed else left,
        lost=view.lost_count,
        lost_ids=tuple(view.lost),
        departed=view.departed_count,
        departed_ids=tuple(view.departed),
        last_arrival=next(reversed(view.waiting.values())).arrival if view.waiting else 0,
        absent=view.absences.make_report(now=now, staying=_live_member_addresses(view, joined - spares)),
        given_up=given_up.gave_up[:GIVEN_UP_MOST] if given_up is not None else "",
        why_lost=tuple((name, why) for name, why in view.why_lost.items() if name in view.lost)[:NAMED_OF_MANY],
        standstill=view.standstill if live else "",
        left_early=view.left_early,
        draining=tuple(sorted(node_id for node_id in drained if node_id in view.live))[:NAMED_MOST],
    )


def _live_member_addresses(view: TermView, coming: int) -> dict[str, str]:
    if coming <= 0 or len(view.live) > NAMED_OF_MANY:
        return {}
    return {node_id: view.records[node_id].address for node_id in sorted(view.live)}


def _find_spares(view: TermView, rules: Rules, spares: int) -> tuple[int | None, tuple[str, ...]]:
    """Return `spares_after` and `spare_ids` of a `Progress`. No member of the last round is a spare."""
    if spares <= 0:
        return None, ()
    newcomers = [record for id, record in view.waiting.items() if id not in view.members]
    count = len(newcomers) - spares
    after = newcomers[count - 1].arrival if count > 0 else 0
    if not after or not hasattr(rules.order, "choose"):
        return after, ()
    kept = [view.records[id] for id in view.members if id in view.live or id in view.waiting]
    try:
        admitted = {record.arrival for record in _choose_members(rules, newcomers, kept, count)}
    except BaseException:  # noqa: BLE001  the order may be a user's function; completing the round reports its error
        return after, ()
    names = tuple(record.node_id for record in newcomers if record.arrival not in admitted)
    return (None, names) if len(names) <= NAMED_MOST else (0, ())


def _choose_members(
    rules: Rules, candidates: Sequence[NodeRecord], kept: Sequence[NodeRecord], count: int
) -> Sequence[NodeRecord]:
    choose = getattr(rules.order, "choose", None)
    if choose is None or not 0 < count < len(candidates):
        return candidates[: max(count, 0)]
    chosen: Sequence[NodeRecord] = tuple(choose(tuple(candidates), tuple(kept), count))
    arrivals = {record.arrival for record in chosen}
    if not len(chosen) == len(arrivals) == count or arrivals - {record.arrival for record in candidates}:
        raise RendezvousSettingsError(
            f"rank_order chose {plural(len(chosen))}; it must choose {count} of {len(candidates)}, each once"
        )
    return chosen


def _new_commit(
    view: TermView, rules: Rules, progress: Progress, survivors: Mapping[str, int], *, after: int
) -> CommitRound:
    """Return the round to commit. `survivors` maps nodes of the lost store's round `after` (-1: none) to ranks."""
    arrivals = list(view.waiting.values())
    room = rules.round_size(len(rules.select_complete_units(arrivals)))
    previous = {**survivors, **{node_id: member.rank for node_id, member in view.members.items()}}
    kept = [record for record in arrivals if record.node_id in previous]
    newcomers = [record for record in arrivals if record.node_id not in previous]
    # If the run was resized to fewer nodes, the members of the lowest ranks stay, not the first to arrive.
    kept.sort(key=lambda record: previous[record.node_id])
    if rules.unit_within:
        chosen = list(rules.select_complete_units([*kept, *newcomers])[:room])
    else:
        chosen = [*_choose_members(rules, kept, (), room), *_choose_members(rules, newcomers, kept, room - len(kept))]
    chosen.sort(key=lambda record: record.arrival)
    ordered = tuple(rules.order(tuple(chosen), previous))
    # A node that members could not reach as rank 0 does not become rank 0 again, unless this holds for all nodes. Then
    # take the node with the highest last rank: it was rank 0 longest ago.
    oldest = max(ordered, key=lambda record: previous.get(record.node_id, -1))
    reached = next((record for record in ordered if not record.unreached), oldest)
    if reached is not ordered[0]:
        ordered = (reached, *(record for record in ordered if record is not reached))
    ordered = tuple(rules.select_complete_units(ordered))  # make each unit's ranks adjacent
    if sorted(record.arrival for record in ordered) != [record.arrival for record in chosen]:
        raise RendezvousSettingsError(
            f"rank_order made {len(ordered)} ranks of {plural(len(chosen))}; it must give each node it gets once"
        )
    return CommitRound(number=max(view.next_number, after + 1), members=ordered, progress=progress)


def next_progress_write_at(
    last: Progress | None, last_at: float, current: Progress, *, nodes: int, now: float
) -> float | None:
    """Return when `current` must be written, if `last` was written at `last_at`; None if nothing has changed.

    A change of a field in `_coarse_progress`, such as the phase, is written at once. Another change is written 1 ms
    per node after the last write, at least 50 ms and at most 5 s, so that a thousand arrivals do not send each node a
    thousand messages. With at least `MANY` nodes, a change that no node acts upon waits three times as long. During a
    last call, its remaining time is written again after a tenth of that time, but after at least 1 s.
    """
    if last is None or _coarse_progress(last) != _coarse_progress(current):
        return now
    if _without_times(last) != _without_times(current):
        seldom = 3 if nodes >= MANY and _acted_upon(last) == _acted_upon(current) else 1
        return max(last_at + seldom * min(max(0.05, 0.001 * nodes), 5.0), now)
    if current.last_call_left is not None and current.phase is Phase.LAST_CALL:
        return max(last_at + max(1.0, current.last_call_left / 10), now)
    return None


# Members and spares act on these fields of `Progress`.
_acted_upon = attrgetter("waiting", "spares_after", "spare_ids", "lost", "lost_ids", "departed", "departed_ids")
_exact_fields = attrgetter("phase", "round", "problem", "given_up", "why_lost", "standstill", "draining")


def _without_times(progress: Progress) -> Progress:
    return progress.replace(last_call_left=None, absent=progress.absent.without_durations())


def _coarse_progress(progress: Progress) -> tuple[object, ...]:
    some = (progress.waiting > 0, progress.lost > 0, progress.departed > 0)
    no_spares = progress.spares_after is None and not progress.spare_ids
    return *_exact_fields(progress), *some, no_spares, progress.last_call_left is None


def wait_reason_text(progress: Progress | None, *, elapsed: float | None = 0.0) -> str:
    """Return why a run waits, in words (R16). `elapsed` has the seconds since the report; None omits durations."""
    if progress is None:
        return "waiting for a coordinator"
    if progress.problem:
        return f"{plural(progress.joined)} wait for a round, and it cannot be completed: {progress.problem}"
    missing = progress.absent.describe(elapsed=elapsed)
    missing = missing and f"; missing: {missing}"
    given_up = progress.given_up and f"; {progress.given_up}"
    match progress.phase:
        case Phase.CLOSED:
            return "the run is closed"
        case Phase.GATHERING:
            awaited = progress.absent.describe_wait(elapsed=elapsed)
            return f"{progress.joined} of at least {plural(progress.needed)}{awaited and f'; {awaited}'}{given_up}"
        case Phase.LAST_CALL:
            left = "" if elapsed is None else f", {max((progress.last_call_left or 0.0) - elapsed, 0.0):.1f} s left"
            count = f"{progress.joined} of at most {plural(progress.capacity)}"
            return f"last call{left}; {count}{missing}{given_up}"
        case Phase.TRAINING:
            coming = progress.joined - progress.spares
            if not coming:
                spares = f", and {plural(progress.spares, 'spare')}{given_up}" if progress.spares else ""
                standstill = progress.standstill and f"; {progress.standstill}"
                return f"round {progress.round} stands with {plural(progress.live)}{spares}{missing}{standstill}"
            staying = progress.absent.staying_member_names()
            members = f"{plural(progress.live, 'live member')} to leave{staying and f': {staying}'}"
            return f"{plural(coming)} waiting for round {progress.round}'s {members}{given_up}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """The facts that `act_of_joiner` needs about a waiting node."""

    arrival: int  # the revision of the node's record
    node_id: str = ""
    known_round: int = -1  # the last round that the node knew at its arrival or ignored; -1: none
    was_member: bool = False  # the node was in `known_round`, and not left out
    left_out: str = ""  # why the others go on without this node, by a verdict of rank 0; else empty
    passed_over: int = 0  # the revision of the last round without this node since its arrival; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinerWaits:
    """An answer of `act_of_joiner`: the node waits until the `Head` changes."""

    reason: str
    suspended: bool = False  # True: the join timeout does not run meanwhile (promise R1)
    until: float | None = None  # when to call `act_of_joiner` again if the head has not changed; None: never


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJoining:
    """An answer of `act_of_joiner`: the run is closed. `spare`: this node was a spare at the closing."""

    closed: Closed
    spare: bool = False


def act_of_joiner(me: Joiner, head: Head, *, now: float) -> JoinerWaits | Round | EndJoining:
    """Return the next act of an arrived node: wait (`JoinerWaits`), read the round, or end (`EndJoining`)."""
    round = head.round
    if round is not None and round.revision > max(me.arrival, me.passed_over):
        return round  # even if the run is closed now: no commit succeeds after a closing, so the round came first
    # A node that was a spare at the closing ends as a spare, even if members have left since.
    over = head.closed_over if head.closed is not None else None
    spare = _is_spare(me, head.progress if over is None else over)
    if head.closed is not None:
        return EndJoining(closed=head.closed, spare=spare)
    progress = head.progress
    elapsed = now - head.progress_at
    if spare:
        assert progress is not None
        why = me.left_out if me.node_id in progress.spare_ids else ""
        return JoinerWaits(reason=f"a spare: {why}" if why else _explain_spare(progress), suspended=True)
    reason = wait_reason_text(progress, elapsed=elapsed)
    if head.coordinator is None and progress is not None:
        reason = f"waiting for a new coordinator; at last, {reason}"
    if progress is None or progress.phase is not Phase.LAST_CALL or progress.problem:
        return JoinerWaits(reason=reason)
    # A last call outlives its coordinator. The join timeout runs again `LAST_CALL_GRACE` after the last call.
    over_at = head.progress_at + (progress.last_call_left or 0.0)
    if now < over_at + LAST_CALL_GRACE:
        return JoinerWaits(reason=reason, suspended=True, until=over_at + LAST_CALL_GRACE)
    who = f", and {head.coordinator.node_id}, which coordinates," if head.coordinator is not None else ", and nobody"
    return JoinerWaits(
        reason=f"the last call of {plural(progress.joined)} was over {now - over_at:.0f} s ago{who} has completed "
        f"{'no' if head.coordinator is not None else 'the'} round since"
    )


def _explain_spare(progress: Progress) -> str:
    there = progress.live + progress.joined
    taken = there - progress.spares
    if taken >= progress.capacity:
        return f"a spare: all {plural(progress.capacity)} that a round takes are there"
    return f"a spare: a round would take {taken} of the {plural(there)} that are there"


def _is_spare(me: Joiner, progress: Progress | None) -> bool:
    if progress is not None and me.node_id in progress.spare_ids:
        return True
    if progress is None or progress.spares_after is None:
        return False
    if me.was_member and me.known_round == progress.round:
        return False  # a member of the last round is admitted before newcomers, so it is no spare
    return me.arrival > progress.spares_after and progress.joined > 0


def reason_to_leave_round(progress: Progress, head: Head, *, live: Collection[str]) -> str:
    """Return why the live members should leave the last round together; empty if they should not."""
    if not live:
        return ""
    if head.closed is not None:
        return f"the run is closed{f': {head.closed.reason}' if head.closed.reason else ''}"
    leaving = [node_id for node_id in head.drains if node_id in live]
    if leaving:
        return leaving_in_words(leaving[:NAMED_MOST], head.drains[leaving[0]].reason)
    if head.moves:
        return MOVES
    if len(live) > progress.capacity:
        reason = head.resized.reason if head.resized is not None else ""
        return f"the run was resized to at most {plural(progress.capacity)}{f': {reason}' if reason else ''}"
    return f"{plural(progress.waiting)} waiting to join" if progress.waiting else ""


class JoinClock:
    """A node's join timeout; it does not run while its wait is suspended (promise R1)."""

    def __init__(self, timeout: float, *, now: float) -> None:
        self._timeout = timeout
        self._used = 0.0
        self._since: float | None = now  # when the clock last started; None while suspended

    def set_suspended(self, *, suspended: bool, now: float) -> None:
        """Stop the clock while the wait is suspended, else let it run."""
        if suspended and self._since is not None:
            self._used += now - self._since
            self._since = None
        elif not suspended and self._since is None:
            self._since = now

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the timeout, at least 0."""
        running = 0.0 if self._since is None else now - self._since
        return max(self._timeout - self._used - running, 0.0)

    def deadline(self, now: float) -> float | None:
        """Return when the timeout ends; None while suspended."""
        return None if self._since is None else now + self.seconds_left(now)
