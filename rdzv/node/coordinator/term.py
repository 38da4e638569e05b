"""A coordinator's term: the coordinator watches the nodes, and carries out what `decide` returns.

The deciding task calls `decide`, carries out the returned act, applies events until its view of the run includes its
own write, and decides anew. The term's other tasks only queue facts (`TermContext.queue_for_decision`).

The store rejects a coordinator's writes once another coordinator's term has begun. The keys of an attempt at a round
have the term in their names, so a coordinator never reads a dead coordinator's attempt (promise R7).

A round is committed by one transaction, conditional on all keys that the decision depends on. If a key has changed, the
commit fails, and the coordinator decides anew. A commit also writes the members' ranks, unless there are too many: then
they are written before.

If a commit has more conditions than a transaction may have (etcd: 126), the coordinator first writes a marker
among the nodes' keys. Once the watch has delivered the marker, the coordinator knows all earlier events, and decides
anew. A node lost during the commit's round trip may be in the round; it counts as lost after completion (promise R4).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio

from rdzv.core.decision import (
    RETRY_AFTER,
    ApplyResize,
    CommitRound,
    Expel,
    Idle,
    WriteRoundProgress,
    WriteRoundStop,
    decide,
    wait_reason_text,
    with_problem,
)
from rdzv.core.history import History, HistoryWriter, pack_history
from rdzv.core.ranks import member_with_most_steps
from rdzv.core.round import BUCKET_SIZE, SINCE_MOST, Member, Participant, Round, pack_arrivals, rank_bucket_number
from rdzv.core.state import NodeRecord, Phase, Progress, unpack_settings
from rdzv.core.view import CommitRejection, Picture, TermView
from rdzv.node.coordinator.facts import AccusationCheck, gather_stop_answers, report_stalls
from rdzv.node.coordinator.term_context import SharedStoreLease, TermContext
from rdzv.node.run.run_settings import SettingsChangedError, adopt_changed_settings
from rdzv.node.run.status import participant_of
from store import ConditionFailed, Delete, Entry, Get, Lease, LimitExceeded, Put, StoreError, when
from store.messages import Event
from store.net.tasks import cancel_and_wait, run_to_completion
from store.printable import make_logger, without_durations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rdzv.core.decision import Act
    from rdzv.node.link.role import CoordinatorLease
    from rdzv.node.link.store_session import StoreSession
    from rdzv.node.member.node_state import NodeState
    from store import Condition

log: Final = make_logger(__name__)

ORDER_WITHIN = 1.0  # seconds after which an unfinished `rank_order` call is reported as the reason for the wait
MARKERS = 1  # operations of a commit besides its puts: the deletion of the marker
SHARED_TTL_LEAST = 30.0  # seconds, at least, that the keys of a round's shared store stay without a coordinator
SHARED_TTL_FACTOR = 3  # the keys of a round's shared store outlive their readers: they stay for three member TTLs
CLOCK_OFF_MOST = 0.1  # seconds; a correction of the time of day by at most this waits for the next note
KEEP_TIME_EVERY = 60.0  # seconds, at most, between notes of the time of day; a store loses the note when it restarts
REFUSED_PAUSE = 0.2  # seconds until the coordinator decides anew after a refused write, if no event comes
OVERHEAD_BYTES = 40  # the size of a condition or a write in a transaction, without its key and value
WRITE_BYTES_MOST = 1024 * 1024  # bytes that the coordinator puts into one transaction; etcd accepts 1.5 MiB


class CoordinatorTerm:
    """One coordinator's term. Keys on `run_lease` outlive the term."""

    def __init__(self, link: StoreSession, role: CoordinatorLease, part: NodeState, *, run_lease: Lease) -> None:
        self._store = link.store
        self._keys = part.keys
        self._part = part
        self._follower = link.follower
        self._role = role
        rules, told = self._part.agreed.rules, self._store.tells_causes
        self._view = TermView(self._keys.nodes, needed=rules.needed, expected=rules.expected, tells_causes=told)
        self._context = TermContext(
            store=self._store, keys=self._keys, view=self._view, term=role.term, run_lease=run_lease
        )
        self._picture = Picture(view=self._view, head=self._follower.head)
        self._marked: CommitRound | None = None  # the round whose marker was written, but that is not committed
        self._said = ""
        self._made_room_of: Round | None = None
        self._failed_with: str | None = None
        self._shared = SharedStoreLease(self._store, ttl=max(SHARED_TTL_LEAST, SHARED_TTL_FACTOR * part.settings.ttl))
        self._history_writer = HistoryWriter()
        self._accusations = AccusationCheck(self._context, gone_ttl=max(part.settings.gone_ttl, link.reconnect_seconds))
        self._hour_changed = asyncio.Event()
        self._asking = asyncio.Event()  # set once members were asked where to stop

    async def lead(self, round_entry: Entry | None, progress_entry: Entry | None, history: Entry | None) -> None:
        """Decide and act until cancelled; raise `ConditionFailed` if the role is lost."""
        round = Round.unpack(round_entry.value, revision=round_entry.mod_revision) if round_entry else None
        begin = self._context.spawn
        tasks = [
            begin("look for stuck members", report_stalls, self._context, self._part.settings),
            begin("look into accusations", self._accusations.run),
            begin("watch the nodes", self._watch_nodes),
            begin("ask members for their steps", gather_stop_answers, self._context, self._asking),
            begin("clear away what is left", _delete_old_rounds, self._context, round),
            begin("keep what is shared", self._shared.renew_until_cancelled, round),
        ]
        try:
            with self._follower.listeners.subscribed(self._context.wakeup):
                await self._take_over(round, progress_entry, history)
                tasks.append(begin("keep the run's time of day", self._keep_time_of_day))
                await self._decide_repeatedly()
        finally:
            await cancel_and_wait(*tasks)
            with anyio.CancelScope(shield=True):
                await self._shared.revoke_unused()

    async def _take_over(self, round: Round | None, progress_entry: Entry | None, history: Entry | None) -> None:
        """Restore the previous coordinator's state from the store, while `_watch_nodes` opens its watch."""
        head = self._follower.head
        # Use the progress as stored: the head's watch may still deliver an older progress.
        progress = Progress.unpack_or_log(progress_entry.key, progress_entry.value) if progress_entry else None
        progress_at = head.progress_at if progress == head.progress else self._store.time()
        members: list[Member] = []
        if round is not None:
            for entry in await self._store.list(self._keys.ranks(round.number, round.term)):
                members.extend(Member.unpack_all(entry.value))
        before, moves = self._follower.before, head.moves
        self._view.take_over(round, members, progress, progress_at=progress_at, before=before, moves=moves)
        said_at = 0.0  # when the progress was written; 0.0 if this node did not see it being written
        if progress is not None:
            said_at = 0.0 if progress != head.progress or head.progress_found else progress.absent.said_at
            progress = progress.replace(absent=progress.absent.replace(said_at=0.0))
        if said_at:
            self._adjust_time_of_day(said_at, at=progress_at)
        self._update_picture(told=progress, told_at=progress_at)
        # If the history cannot be read, begin an empty one, which the next write stores.
        remembered = (History.unpack_or_log(history.key, history.value) if history else None) or History()
        waited = progress.absent.waited if progress is not None else None
        own = self._part.membership
        self._history_writer.take_over(
            remembered,
            began=self._follower.round_at,
            now=self._store.time(),
            ended=own.over_at if own is not None and round is not None and own.round.number == round.number else None,
            waited=waited or 0.0,
            hour=self._role.time_of_day_now() if said_at else None,
        )

    def _adjust_time_of_day(self, hour: float, *, at: float) -> None:
        """Set the run's time of day to `hour` at `at` on this node's clock. Send a large correction at once."""
        before, self._role.day_offset = self._role.day_offset, hour - at
        if abs(self._role.day_offset - before) > CLOCK_OFF_MOST:
            self._role.lease.renew_now()
            self._hour_changed.set()

    async def _keep_time_of_day(self) -> None:
        """Renew the run's lease with a note of the time of day, for readers while no node coordinates."""
        while True:
            self._hour_changed.clear()
            with contextlib.suppress(StoreError):  # try again later
                await self._context.run_lease.keep_alive(note=self._role.time_of_day_note(False))
            with anyio.move_on_after(KEEP_TIME_EVERY):
                await self._hour_changed.wait()

    async def _watch_nodes(self) -> None:
        async with self._store.watch(self._keys.nodes, snapshot=True) as watch:
            async for events in watch.batches():
                self._context.queue_for_decision(*events)

    async def _decide_repeatedly(self) -> None:
        await self._apply_facts_up_to(0)
        while True:
            head = self._follower.head
            self._update_picture(head=head)
            self._accusations.wake_if_accused()
            if head.stop is not None or self._view.agreement.has_written:
                self._asking.set()
            act = await self._next_act()
            if not isinstance(act, ApplyResize | Expel):
                self._history_writer.note_progress(act.progress, now=self._store.time())
            seen = await self._carry_out(act)
            if seen is None:  # a key has changed, so the store refused the write: wait until a watch delivers the key
                deadline = self._store.time() + REFUSED_PAUSE
                while not self._context.inbox and self._follower.head is head:
                    if not await self._context.wakeup.sleep_until(deadline):
                        break
            await self._apply_facts_up_to(seen or 0)

    def _update_picture(self, **changes: Any) -> None:
        """Replace the picture by a changed copy: `decide` may read the old one in a thread."""
        self._picture = replace(self._picture, **changes)

    async def _carry_out(self, act: Act) -> int | None:
        """Carry out an act; return the revision that the next decision must have seen, None if a condition failed."""
        match act:
            case Idle():
                self._log_commit_error(act.error)
                if act.progress.phase is Phase.GATHERING:  # make room in the store for newcomers' records
                    await self._delete_shared_keys()
                await self._context.wakeup.sleep_until(act.until)
                return 0
            case WriteRoundProgress():
                return await self._write_progress(act)
            case CommitRound():
                return await self._commit_or_free_space(act)
            case WriteRoundStop():
                return await self._write_stop_step(act)
            case Expel():
                return await self._expel(act)
            case ApplyResize():
                return await self._apply_resize(act)

    async def _expel(self, act: Expel) -> int | None:
        now, key = self._store.time(), self._keys.node(act.node_id)
        there = (when.mod_revision(key) == act.arrival,)
        revision = await self._context.write(Delete(key), self._progress_put(act.progress), also=there)
        if revision is not None:
            log.warning("run %s: node %s is taken out of the round: %s", self._keys.run_id, act.node_id, act.why)
            self._view.why_lost[act.node_id] = act.why
            self._update_picture(told=act.progress, told_at=now)
        return revision

    async def _apply_resize(self, act: ApplyResize) -> int:
        there = await self._store.get(self._keys.settings)
        if there is not None and self._part.agreed.accept_or_explain(there.value):
            raise SettingsChangedError(unpack_settings(there.value))
        self._update_picture(resized_at=act.revision)
        self._view.set_min_nodes(needed=self._part.agreed.rules.needed, now=self._store.time())
        return 0

    async def _next_act(self) -> Act:
        """Return the next act. A user's rank order runs in a thread, so that it delays no lease's renewal."""
        deciding_now = partial(decide, self._picture, self._part.agreed.rules, now=self._store.time())
        if not callable(self._part.settings.rank_order):
            return deciding_now()
        deciding = asyncio.create_task(self._part.loop.run_in_new_thread(deciding_now))
        try:
            done, _ = await asyncio.wait([deciding], timeout=ORDER_WITHIN)
            if done:
                return deciding.result()
            slow = f"rank_order has been running for more than {ORDER_WITHIN:g} s"
            told = self._picture.told or Progress(phase=Phase.GATHERING)
            progress = with_problem(told.replace(joined=len(self._view.waiting)), slow)
            if progress != self._picture.told:
                await self._write_progress(WriteRoundProgress(progress=progress))
            act = await deciding
            # The rank order has returned: if no act is due, replace the report that named it as slow.
            return WriteRoundProgress(progress=act.progress) if isinstance(act, Idle) else act
        finally:
            deciding.cancel()

    async def _apply_facts_up_to(self, revision: int) -> None:
        inbox = self._context.inbox
        while True:
            now = self._store.time()
            if inbox:
                self._update_picture(obstacle=None)  # the event may have made room in a full store
            while inbox:
                fact = inbox.popleft()
                if isinstance(fact, Event):
                    if fact.kind == "synced":
                        self._note_own_departure()
                    bans, last_call = self._follower.head.bans, self._part.agreed.rules.last_call
                    self._view.apply_node_event(fact, now=now, last_call_timeout=last_call, bans=bans)
                else:
                    self._view.apply_fact(fact)
            if self._context.failed is not None:
                raise self._context.failed
            if self._view.synced and self._view.seen >= revision:
                return
            await self._context.wakeup.sleep_until(None)

    def _note_own_departure(self) -> None:
        # A node elected while it leaves may have deleted its record before the watch began.
        own = self._part.membership
        if own is not None and own.round.number == self._view.last_number and own.over is not None and not own.dropped:
            self._view.note_own_departure(self._part.node_id, stopped=own.gate.is_at_stop)

    async def _write_stop_step(self, act: WriteRoundStop) -> int | None:
        keys, stop = self._keys, act.stop
        unchanged = self._context.round_condition, when.mod_revision(keys.stop) == act.over
        revision = await self._context.write(self._context.make_leased_put(keys.stop, stop.pack()), also=unchanged)
        if revision is None:
            return None
        self._view.agreement.note_written(stop.replace(revision=revision))
        if stop.decided:
            where = "at once" if stop.step is None else f"before step {stop.step}"
            log.info("run %s, round %d: all leave %s: %s", keys.run_id, stop.round, where, stop.why)
        return 0

    async def _write_progress(self, act: WriteRoundProgress) -> int:
        progress, unbans, now = act.progress, act.unbans, self._store.time()
        self._log_wait_reason(wait_reason_text(progress))
        writes: list[Put | Delete] = [self._progress_put(progress)]
        writes.extend(Delete(self._keys.unbans + name) for name in unbans)
        history = self._history_writer.history_with_incidents(
            progress,
            self._picture.head.closed,
            now=now,
            at=self._role.time_of_day_now(),
            why=self._view.why_gone,
            unbans=unbans.values(),
        )
        if history is not None:
            writes.append(self._context.make_leased_put(self._keys.history, pack_history(history)))
        if await self._context.write(*writes, also=(self._context.round_condition,)) is None:
            raise ConditionFailed("the run was forgotten under way: its round's record is gone")
        if history is not None:
            self._history_writer.note_written(history, now=now)
        unbanned_at = max([self._picture.unbanned_at, *(unban.revision for unban in unbans.values())])
        self._update_picture(told=progress, told_at=now, unbanned_at=unbanned_at)
        return 0

    def _progress_put(self, progress: Progress, *, hour: float | None = None) -> Put:
        said = progress.replace(absent=progress.absent.replace(said_at=hour or self._role.time_of_day_now()))
        return self._context.make_leased_put(self._keys.progress, said.pack())

    def _log_commit_error(self, error: BaseException | None) -> None:
        said = None if error is None else repr(error)
        if error is not None and said != self._failed_with:
            log.error("run %s: no round can be completed; it is tried again", self._keys.run_id, exc_info=error)
        self._failed_with = said

    def _log_wait_reason(self, reason: str) -> None:
        if without_durations(reason) != without_durations(self._said):
            self._said = reason
            log.info("run %s: %s", self._keys.run_id, reason)

    async def _commit_or_free_space(self, decision: CommitRound) -> int | None:
        """Commit a round. If the store is full, delete the last round's shared keys; the second time, report it."""
        no_more_room = self._view.round is self._made_room_of
        try:
            return await self._commit_round(decision)
        except LimitExceeded as error:
            attempt = self._keys.round_prefix(decision.number, self._context.term)
            await self._store.delete_prefix(attempt, when=self._context.term_conditions)
            if no_more_room:
                self._update_picture(obstacle=CommitRejection(self._store.time() + RETRY_AFTER, error))
            else:
                await self._delete_shared_keys()
            return 0

    async def _delete_shared_keys(self) -> None:
        """Delete the keys of the last round's shared store, once; its members no longer use them."""
        last = self._view.round
        if last is not None and last is not self._made_room_of:
            self._made_room_of = last
            await self._store.delete_prefix(
                self._keys.shared(last.number, last.term), when=self._context.term_conditions
            )

    async def _commit_round(self, decision: CommitRound) -> int | None:
        """Commit a round, or first the marker that it needs; return as `_carry_out` does."""
        context, keys, last = self._context, self._keys, self._view.round
        marked, self._marked = self._marked, None
        if marked is not None and marked.has_same_arrivals(decision):
            decision = replace(decision, members=marked.members)  # keep the written ranks, as a new order may differ
        elif marked is not None:
            # Delete the earlier attempt's ranks: the new ranks may fill fewer keys, and leave some of the old.
            await context.delete_round(marked.number, context.term)
            marked = None
        members = [
            Member(node_id=record.node_id, rank=rank, arrival=record.arrival)
            for rank, record in enumerate(decision.members)
        ]
        unchanged = (*context.term_conditions, self._context.round_condition)
        conditions = [
            *unchanged,
            when.value(keys.settings) == self._part.agreed.value,
            when.missing(keys.closed),
            *(when.missing(keys.moving),) * self._part.settings.endpoint.has_successors,
            *(when.mod_revision(keys.node(member.node_id)) == member.arrival for member in members),
        ]
        exact = len(conditions) <= self._store.operations_max
        round = await self._build_round(decision, members)
        nodes = {record.node_id: record.address for record in decision.members}
        now, hour = self._store.time(), time.time()
        history = self._history_writer.history_with_round(
            round.number,
            nodes,
            known=self._view.members,
            now=now,
            at=hour,
            arrived=self._view.arrived_at,
            lost_store=lost.host if (lost := self._follower.head.lost_store) is not None else "",
        )
        commit: list[Put | Delete] = [
            context.make_leased_put(keys.round, round.pack()),
            context.make_leased_put(keys.history, pack_history(history)),
        ]
        progress = decision.progress.for_round_commit(decision.number, size=len(members))
        if progress is not None:
            commit.append(self._progress_put(progress, hour=hour))
        ranks = _rank_puts(context, round, members, decision.members)
        at_once = _fits_one_transaction(conditions, [*ranks, *commit], count_most=self._store.writes_max - MARKERS)
        if at_once:
            commit = [*ranks, *commit]
        elif marked is None:
            for portion in _batch_writes(ranks, self._store.writes_max):
                await context.write(*portion)
        if not exact:
            if marked is None:
                self._marked = decision
                return await self._write_sync_marker()
            del conditions[self._store.operations_max :]
            commit.append(Delete(keys.marker))
        # During the commit, delete the last round's shared keys, so that a full store has room for the new round's.
        committing = self._store.transact(when=conditions, then=commit, otherwise=(Get(keys.settings),))
        result, _ = await run_to_completion(committing, self._delete_shared_keys())
        if not result.succeeded:
            text = "run %s: the commit of round %d was refused: something has just changed"
            log.info(text, keys.run_id, round.number)
            if not at_once:
                # Delete the refused round's ranks: the next attempt may not overwrite all of them.
                await self._store.delete_prefix(keys.round_prefix(round.number, context.term), when=unchanged)
            if adopt_changed_settings(result, self._part.agreed):
                self._view.set_min_nodes(needed=self._part.agreed.rules.needed, now=self._store.time())
            return None
        self._adjust_time_of_day(hour, at=now)
        committed = round.replace(revision=result.revision)
        rank_0 = f"rank 0 is {members[0].node_id} at {round.host}:{round.port}"
        log.info("run %s: round %d is complete with %d nodes, %s", keys.run_id, round.number, round.size, rank_0)
        now = self._store.time()
        self._view.note_round(committed, members, now=now)
        self._history_writer.note_written(history, now=now)
        if progress is not None:
            self._update_picture(told=progress, told_at=now)
            self._log_wait_reason(wait_reason_text(progress))
        self._follower.note_round(committed)
        if last is not None:
            await self._store.delete_prefix(keys.round_prefix(last.number, last.term), when=context.term_conditions)
        return 0

    async def _build_round(self, decision: CommitRound, members: list[Member]) -> Round:
        view, first = self._view, decision.members[0]
        joined = itertools.islice((one.node_id for one in members if one.node_id not in view.members), SINCE_MOST)
        is_first = view.round is None
        since = tuple(view.lost[:SINCE_MOST]), tuple(view.departed[:SINCE_MOST]), tuple(joined)
        round = Round(
            number=decision.number,
            term=self._context.term,
            size=len(members),
            buckets=-(-len(members) // BUCKET_SIZE),
            host=first.address,
            port=first.port,
            lease=await self._shared.acquire(),
            newest=member_with_most_steps(decision.members),
            in_steps=any(record.progress is not None for record in decision.members),
            since=((), (), ()) if is_first else since,
            checked=len(members) > 1 and all(record.checks for record in decision.members),
            **pack_arrivals([member.arrival for member in members]),
        )
        self._shared.used = True  # the round may have this lease even if the commit's answer is lost
        return round

    async def _write_sync_marker(self) -> int:
        """Write the marker, and return its revision. The watch delivers earlier events before the marker."""
        marker = NodeRecord(node_id="", incarnation="", left=True)  # `left` makes readers skip the marker
        in_office = self._context.term_conditions
        return await self._store.put(self._keys.marker, marker.pack(), lease=self._role.lease, when=in_office)


async def _delete_old_rounds(context: TermContext, round: Round | None) -> None:
    """Delete the keys of older rounds and of dead coordinators' attempts, without listing users' keys."""
    keys = context.keys
    attempts: dict[tuple[int, int], None] = {}
    try:
        for entry in await context.store.list(keys.rounds, keys_only=True):
            number, _, rest = entry.key.removeprefix(keys.rounds).partition("/")
            term_of = rest.partition("/")[0]
            if number.isdecimal() and term_of.isdecimal():  # the key is of an attempt at a round
                attempts[int(number), int(term_of)] = None
        for attempt in attempts:
            # Skip this term's attempts, which the deciding task writes and deletes itself.
            if attempt[1] != context.term and (round is None or attempt != (round.number, round.term)):
                await context.delete_round(*attempt)
    except ConditionFailed:
        pass  # another coordinator deletes these keys
    except StoreError as error:
        log.warning("run %s: leftovers of older rounds could not be deleted: %s", keys.run_id, error)


def _rank_puts(context: TermContext, round: Round, members: list[Member], records: Sequence[NodeRecord]) -> list[Put]:
    """Return the writes of a round's ranks, in keys by node id, and of its roster, in keys by rank."""
    keys, number, term = context.keys, round.number, round.term
    by_bucket: list[list[Member]] = [[] for _ in range(round.buckets)]
    for member in members:
        by_bucket[rank_bucket_number(member.node_id, round.buckets)].append(member)
    roster = [participant_of(record, rank) for rank, record in enumerate(records)]
    writes = []
    for index, bucket in enumerate(by_bucket):
        in_order = roster[index * BUCKET_SIZE : (index + 1) * BUCKET_SIZE]
        writes.append(context.make_leased_put(keys.ranks(number, term, index), Member.pack_all(bucket)))
        writes.append(context.make_leased_put(keys.roster(number, term, index), Participant.pack_all(in_order)))
    return writes


def _fits_one_transaction(conditions: Sequence[Condition], writes: Sequence[Put | Delete], *, count_most: int) -> bool:
    size = sum(len(condition.key) + OVERHEAD_BYTES for condition in conditions)
    size += sum(len(write.key) + len(write.value) + OVERHEAD_BYTES for write in writes if isinstance(write, Put))
    return len(writes) <= count_most and size <= WRITE_BYTES_MOST


def _batch_writes(writes: list[Put], count_most: int) -> Iterator[list[Put]]:
    portion: list[Put] = []
    size = 0
    for write in writes:
        if portion and (len(portion) == count_most or size + len(write.value) > WRITE_BYTES_MOST):
            yield portion
            portion, size = [], 0
        portion.append(write)
        size += len(write.value)
    if portion:
        yield portion
