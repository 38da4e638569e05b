"""Makes a node a member of the next round: it arrives, and waits for a round that contains its record.

A call of `next_rendezvous` writes a record, again if it is lost; cancellation, timeout and leaving withdraw it. During
an outage of the store, the node waits until the join timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.bootstrap_check import WITHIN, ReachVerdict, check_rank0_reach, is_host_reachable, judge_reach
from rdzv.core.absent import node_label
from rdzv.core.decision import EndJoining, JoinClock, Joiner, JoinerWaits, act_of_joiner
from rdzv.core.round import Participant, Round
from rdzv.core.state import find_ban
from rdzv.errors import RendezvousRefusedError, RendezvousSettingsError, RendezvousStateError, RendezvousTimeoutError
from rdzv.node.link.ports import NoFreePortError
from rdzv.node.link.wakeup import Wakeup
from rdzv.node.member.arrival_writer import ArrivalWriter, store_ending_error
from rdzv.node.member.health import refuse_if_unhealthy
from rdzv.node.member.lost_store import carry_over_run
from rdzv.node.member.node_state import NOT_WAITING
from rdzv.node.run.lease import is_store_full
from rdzv.node.run.run_settings import refuse_nested_prefix
from rdzv.node.run.status import find_member
from store import ConnectionLost, Put, StoreError, StoreReplaced, StoreTimeoutError, when
from store.keeping import RELEASE_SOON, RELEASE_WITHIN
from store.net.tasks import cancel_and_wait
from store.printable import make_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from rdzv.membership import Membership
    from rdzv.node.link.role import CoordinatorLease
    from rdzv.node.link.store_session import StoreSession
    from rdzv.node.member.leaving import RecordRemover
    from rdzv.node.member.node_state import NodeState

log: Final = make_logger(__name__)

NAMES_WITHIN = 2.0  # seconds to read nodes' names for a message; after that, the message has their ranks
HEARD_WITHIN = 4.0  # seconds after a failed check to publish or hear rank 0's verdict
HEAR_AFTER = 1.0  # seconds until a member asks for rank 0's verdict; most checks have passed by then
TICK = 0.25  # seconds; `_tried` grows in such steps, so that it counts no pause of the process
TRIED_LEAST = WITHIN / 2  # seconds; a node that tried less to reach rank 0 stops at the verdict, and is not left out
CUT_OFF_MOST = 8  # addresses, at most, that a node remembers because it did not reach rank 0 there
TRY_AGAIN_AFTER = 1.0  # seconds until a failed arrival is tried again; after a reconnect, at most
# Seconds until a node that was left out looks again for rank 0. They double after each look, and each time that the
# node is left out: its arrivals interrupt other nodes.
LOOK_AGAIN_FIRST, LOOK_AGAIN_MOST = 10.0, 600.0


@dataclass(eq=False)
class JoinAttempt:
    """One call of `next_rendezvous` over one connection to a store: makes a node a member of the next round."""

    part: NodeState
    leaving: RecordRemover
    link: StoreSession
    clock: JoinClock
    start_candidacy: Callable[[StoreSession, NodeState, CoordinatorLease | None], None] = field(kw_only=True)
    _me: Joiner = field(init=False)
    _tried: float = 0.0  # seconds that this process tried to reach rank 0, without its pauses

    def _new_joiner(self, *, was_member: bool, left_out: str = "") -> Joiner:
        part = self.part
        return Joiner(
            arrival=0, node_id=part.node_id, known_round=part.known_round, was_member=was_member, left_out=left_out
        )

    async def join(self, examine: Callable[[], Awaitable[str | None]] | None) -> Membership:
        """Join the next round, after the health check `examine`; raise StoreReplaced if the store was replaced."""
        part, link = self.part, self.link
        # `was_member`: the coordinator admits members of the last round, even if they left it, before newcomers.
        last, mine = link.follower.head.round, part.membership
        self._me = self._new_joiner(was_member=bool(last and mine and mine.round.revision == last.revision))
        part.refusal = None
        try:
            await refuse_nested_prefix(link.store, part.keys.prefix)
            await self._check_health(examine)
            while True:
                membership = await self._join_once()
                verdict = await self._rank0_reach_verdict(membership)
                if verdict is None:
                    part.unreached, part.cut_off, part.given_up, part.times_left_out = False, (), "", 0
                    return membership
                # Do not leave out a process paused during the check: it may reach rank 0 next time.
                is_left_out = membership.rank in verdict.left_out and self._tried >= TRIED_LEAST
                part.unreached = membership.rank == 0 and not verdict.left_out
                if is_left_out:
                    part.cut_off = (*part.cut_off, membership.round.host)[-CUT_OFF_MOST:]
                    part.times_left_out += 1
                part.given_up = f"round {membership.round.number} was given up: {verdict.why}"
                log.warning("run %s: %s", part.keys.run_id, part.given_up)
                self._me = self._new_joiner(was_member=not is_left_out, left_out=part.given_up if is_left_out else "")
        except BaseException as error:
            if isinstance(error, StoreReplaced):
                part.end_membership(f"the store is lost: {error}", dropped=True)
            with anyio.CancelScope(shield=True):
                if isinstance(error, RendezvousSettingsError | RendezvousRefusedError):
                    await link.step_down()  # a node that the run refuses must not coordinate
                is_late = isinstance(error, RendezvousTimeoutError)  # after a timeout, wait less for a silent store
                await self.leaving.leave(link, within=RELEASE_SOON if is_late else RELEASE_WITHIN)
            raise
        finally:
            part.wait_reason = NOT_WAITING
            part.port.release()

    async def _join_once(self) -> Membership:
        """Write this node's record until a round contains it; wait while the store is disconnected."""
        part, link, clock = self.part, self.link, self.clock
        part.lapses, told = 0, False
        leaving = part.announced_drain(link.follower.head)
        if leaving is not None:
            raise part.drained_error(leaving)
        while True:
            try:
                if not part.arrival.is_recorded(self._me.arrival):
                    await self._write_arrival()
                membership = await self._wait_for_round()
                if membership is not None:
                    return membership
                # The record was lost during the wait: arrive again. If its lease was lost, count that.
                part.lapses += part.arrival.lease is None
            except (StoreError, NoFreePortError) as error:
                lacks_room = is_store_full(error) and link.follower.head.round is not None
                is_away = isinstance(error, ConnectionLost | StoreTimeoutError) and link.store.failure is None
                lacks_port = isinstance(error, NoFreePortError)
                if not (lacks_room or is_away or lacks_port):
                    raise
                now = anyio.current_time()
                clock.set_suspended(suspended=False, now=now)
                what = "takes no arrival" if lacks_room else "is away"
                why = f"the store at {part.settings.endpoint.url} {what}: {error}"
                part.set_wait_reason(str(error) if lacks_port else why)
                if not clock.seconds_left(now):
                    raise part.timeout_error(link) from error
                if not is_away:  # wait for a free port, or until the coordinator makes room by deleting shared keys
                    if not told:
                        log.warning("run %s, node %s: %s; trying again", part.keys.run_id, part.node_id, error)
                    told = True
                    await self.leaving.withdraw(link)
                    if clock.seconds_left(now) < TRY_AGAIN_AFTER:
                        raise part.timeout_error(link) from error
                    await anyio.sleep(TRY_AGAIN_AFTER)
                elif await link.wait_until_connected(within=clock.seconds_left(now)):
                    left = clock.seconds_left(anyio.current_time())
                    await anyio.sleep(min(part.rng.uniform(0, TRY_AGAIN_AFTER), left))

    async def _write_arrival(self) -> None:
        part, link, now = self.part, self.link, self.link.store.time()
        self.clock.set_suspended(suspended=False, now=now)
        part.wait_reason = "waiting for the store to take its arrival"
        with anyio.CancelScope(deadline=now + self.clock.seconds_left(now)):
            await carry_over_run(part, link)
            async with self.part.loop.limit_concurrency():
                self._me, role = await ArrivalWriter(part, link, self.clock).write(self._me)
            # Only after the run has accepted this node and its settings may the node coordinate.
            if link.resign is None:
                self.start_candidacy(link, part, role)
            link.start_renewing_run()
            return
        raise part.timeout_error(link)

    async def _check_health(self, examine: Callable[[], Awaitable[str | None]] | None) -> None:
        part, link = self.part, self.link
        if examine is None:
            return
        part.wait_reason = "waiting for its own health check"
        with anyio.move_on_after(self.clock.seconds_left(anyio.current_time())) as limit:
            failure = await examine()
            lease = await link.run_lease()
            await refuse_if_unhealthy(link.store, part.keys, lease, node_id=part.node_id, failure=failure)
        if limit.cancelled_caught:
            raise part.timeout_error(link)

    async def _wait_for_round(self) -> Membership | None:
        """Wait for a round that contains this node's record; return None if the record was lost."""
        part, link, follower = self.part, self.link, self.link.follower
        wakeup, loop = Wakeup(), asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(part.listeners.subscribed(wakeup))
            looking = None
            if self._me.left_out:
                looking = asyncio.create_task(self._wait_for_rank_0(), name=f"look for rank 0 of {part.keys.run_id}")
                looking.add_done_callback(lambda _: wakeup.notify())
                stack.push_async_callback(cancel_and_wait, looking)
            while True:
                if looking is not None and looking.done():
                    await self.leaving.withdraw(link)
                    self._me = self._new_joiner(was_member=False)
                    return None
                error = follower.error or follower.unreadable or part.refusal
                if error is not None:
                    raise error
                me = self._me
                if not part.arrival.is_recorded(me.arrival):
                    return None
                now = link.store.time()
                match act_of_joiner(me, follower.head, now=now):
                    case Round() as round:
                        rank = round.rank_of(me.arrival) if round.arrivals else await self._read_rank(round)
                        if not part.arrival.is_recorded(me.arrival):
                            # the node lost its lease during the read, and with it its place in that round
                            continue
                        if rank is not None:
                            return part.become_member(round, rank, me, link, time=loop.time)
                        self._me = replace(me, passed_over=round.revision, known_round=round.number, was_member=False)
                        part.known_round = max(part.known_round, round.number)
                    case EndJoining(closed=closed, spare=spare):
                        raise part.closed_error(closed, spare=spare)
                    case JoinerWaits(reason=reason, suspended=suspended, until=until):
                        ban = find_ban(follower.head.bans, part.node_id, part.settings.attributes)
                        if ban is not None:
                            raise part.banned_error(ban)
                        leaving = part.announced_drain(follower.head)
                        if leaving is not None:
                            raise part.drained_error(leaving)
                        if follower.head.moves:
                            raise store_ending_error(part, link, me)
                        part.set_wait_reason(reason + link.describe_slowness(), lambda: self._wait_reason(loop.time()))
                        self.clock.set_suspended(suspended=suspended, now=now)
                        deadline = self.clock.deadline(now)
                        if await wakeup.sleep_until(until if deadline is None else deadline) or deadline is None:
                            continue
                        # freeze the present text, for the error: without the record, another would be computed
                        part.wait_reason = part.wait_reason
                        round_now = await self.leaving.withdraw_after_timeout(link, me)
                        if round_now is None:
                            raise part.timeout_error(link)
                        follower.note_round(round_now)  # a round committed just before the timeout

    async def _wait_for_rank_0(self) -> None:
        """Return once rank 0 answers at an address where this node did not reach it before."""
        part, follower = self.part, self.link.follower
        pause = LOOK_AGAIN_FIRST * 2 ** (part.times_left_out - 1)
        while True:
            pause = min(pause, LOOK_AGAIN_MOST)
            await anyio.sleep(pause)
            pause *= 2
            round = follower.head.round
            if round is not None and round.host in part.cut_off and await is_host_reachable(round.host, round.port):
                what = "run %s, node %s: rank 0 at %s:%d answers now; joining again"
                log.info(what, part.keys.run_id, part.node_id, round.host, round.port)
                part.cut_off, part.given_up = tuple(host for host in part.cut_off if host != round.host), ""
                return

    def _wait_reason(self, now: float) -> str | None:
        answer = act_of_joiner(self._me, self.link.follower.head, now=now)
        return answer.reason + self.link.describe_slowness() if isinstance(answer, JoinerWaits) else None

    async def _read_rank(self, round: Round) -> int | None:
        part, arrival = self.part, self._me.arrival
        async with self.part.loop.limit_concurrency():
            member = await find_member(self.link.store, part.keys, round, node_id=part.node_id, arrival=arrival)
        return None if member is None else member.rank

    async def _rank0_reach_verdict(self, membership: Membership) -> ReachVerdict | None:
        """Return rank 0's verdict if a member did not reach it. Return None after a loss, or in an unchecked round."""
        part, round = self.part, membership.round
        if not round.checked:
            return None
        part.wait_reason = f"waiting for all {round.size} members to reach rank 0 at {round.host}:{round.port}"
        part.port.release()
        checking = asyncio.create_task(
            self._check_rank0_reachable(membership), name=f"check the way to rank 0 of {part.keys.run_id}"
        )
        wakeup = Wakeup()
        checking.add_done_callback(lambda _: wakeup.notify())
        try:
            with part.listeners.subscribed(wakeup):
                while not checking.done():
                    if membership.over is not None or membership.lost_ids:
                        return None  # a member was lost: keep the round, as its caller will notice the loss
                    await wakeup.sleep_until(None)
            return checking.result()
        finally:
            await cancel_and_wait(checking)

    async def _check_rank0_reachable(self, membership: Membership) -> ReachVerdict | None:
        """Check that all members reach rank 0. If not, rank 0 publishes a verdict, for which other members wait."""
        part, link, round, rank = self.part, self.link, membership.round, membership.rank

        async def read_member_names(ranks: Collection[int]) -> list[str]:
            found: dict[int, str] = {}
            with anyio.move_on_after(NAMES_WITHIN), contextlib.suppress(StoreError):
                for entry in await link.store.list(part.keys.roster(round.number, round.term)):
                    for one in Participant.unpack_all(entry.value):
                        found[one.rank] = node_label(one.node_id, one.address)
            return [f"{found[rank]}, rank {rank}," if rank in found else f"rank {rank}" for rank in ranks]

        key = part.keys.rank0_report(round.number, round.term)
        heard: list[ReachVerdict] = []
        self._tried = 0.0

        async def count_reach_seconds() -> None:
            while not heard:
                await anyio.sleep(TICK)
                self._tried += TICK

        async def wait_for_rank0_verdict() -> None:
            """Wait for rank 0's verdict. Then rank 0 no longer listens, so a process that was paused stops trying."""
            await anyio.sleep(HEAR_AFTER)
            with contextlib.suppress(StoreError, RendezvousStateError):
                (entry,) = await link.store.wait([key], timeout=WITHIN + HEARD_WITHIN)
                heard.append(ReachVerdict.unpack(entry.value))
                if self._tried < TRIED_LEAST:
                    trying.cancel_scope.cancel()

        problem, missing = "this process was paused, or too busy, while rank 0 listened", list[int]()
        async with anyio.create_task_group() as trying:
            trying.start_soon(count_reach_seconds)
            if rank:
                trying.start_soon(wait_for_rank0_verdict)
            problem, missing = await check_rank0_reach(round, rank, read_member_names)
            trying.cancel_scope.cancel()
        if not problem:
            return None
        problem = f"node {part.node_id} (rank {rank}): {problem}"
        verdict = ReachVerdict(why=problem)
        # If rank 0 publishes no verdict in time, return this node's own, which leaves no node out.
        with anyio.move_on_after(HEARD_WITHIN), contextlib.suppress(StoreError, RendezvousStateError):
            if rank == 0:
                needed = part.agreed.rules.needed
                said = judge_reach(problem, missing, size=round.size, needed=needed, again=part.unreached)
                lease = await link.run_lease()
                unchanged = when.mod_revision(part.keys.round) == round.revision
                result = await link.store.transact(when=(unchanged,), then=(Put(key, said.pack(), lease=lease.id),))
                return said if result.succeeded else verdict
            log.warning("run %s: %s", part.keys.run_id, problem)
            if heard:
                return heard[0]
            (entry,) = await link.store.wait([key])
            verdict = ReachVerdict.unpack(entry.value)
        return verdict
