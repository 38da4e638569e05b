"""Shell: a node's part in its run: it arrives, waits for a round that holds it, is a member, and withdraws.

Where its record stands is `arrival.Arrival`, a pure machine; this room sends what that machine says is under way, and
tells it what became of it. One call of `next_rendezvous` writes one record, in one transaction that also checks the
run's settings. Then it waits for the head to change, and asks `follow` what that means. Being cancelled, timing out and
leaving take the record back; a commit that came first wins over a timeout, and the node returns with its round.

A store that is away is waited out, within the join timeout. Only one that has been replaced ends the call, and the node
joins anew, over a new link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rdzv._version import __version__
from rdzv.bootstrap_check import WITHIN, all_reach, reach
from rdzv.config.settings import describe_difference
from rdzv.core.addresses import address_of
from rdzv.core.decision import GIVEN_UP_MOST, JoinClock, Me, Parked, Refused, RoundToCheck, Rules, follow
from rdzv.core.named import named
from rdzv.core.ranks import order_named
from rdzv.core.state import NAMED_MOST, Ban, Closed, NodeRecord, Round, pack_settings, unpack_roster
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousRefusedError,
    RendezvousSettingsError,
    RendezvousTimeoutError,
)
from rdzv.membership import Membership
from rdzv.node.admission import agree_on_settings, is_too_long, report_health
from rdzv.node.agreement import Steps
from rdzv.node.arrival import Arrival, State
from rdzv.node.coordinator import Candidacy
from rdzv.node.status import find_member
from rdzv.node.store_session import is_away
from rdzv.node.wakeup import Listeners, Wakeup
from store import Entry, Get, LeaseNotFound, LimitExceeded, Put, StoreError, StoreReplaced, when
from store.net.tasks import cancel_and_wait
from store.printable import without_durations

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Collection

    from rdzv.config.settings import Settings
    from rdzv.core.keys import Keys
    from rdzv.node.loops import NodeLoop
    from rdzv.node.store_session import Link
    from store import Lease
    from store.client.keepalive import HeldLease
    from store.interface import Watch

__all__ = ["HeldPort", "Part"]

log = logging.getLogger(__name__)

HAND_OVER_WITHIN = 0.5  # seconds to see that our own departure has been reported, if we coordinate
WITHDRAW_WITHIN = 2.0  # seconds to take a record back; an unreachable store lets it lapse
UNREACHED_NAMED = 3  # members that have not come to rank 0: one sentence names these
TRY_AGAIN_AFTER = 1.0  # seconds, or as soon as the connection is back
IF_HOSTED = "if a node hosted this store, it ended with that node's process, as one of `rdzv serve` does not"
NOT_WAITING = "not waiting for anything"


class HeldPort:
    """A port of this machine, held until the node that promises it has its round.

    Args:
        among: The port, or the range of ports, to take it from, as `master_port` says; None: any free one.
    """

    def __init__(self, among: str | None = None) -> None:
        self._socket: socket.socket | None = None
        first, _, last = (among or "0").partition("-")
        self._ports = range(int(first), int(last or first) + 1)

    def hold(self) -> int:
        """The port; the same for as long as it is held. If all are taken it is the first: they may be free in time."""
        if self._socket is None:
            for port in self._ports:
                self._socket = _bound(port)
                if self._socket is not None:
                    break
            else:
                log.warning(
                    "somebody listens at each port of master_port=%s on this machine; should this node become rank 0, "
                    "the others meet at %d in vain unless it is free by then",
                    f"{self._ports[0]}-{self._ports[-1]}",
                    self._ports[0],
                )
                return self._ports[0]
        held: int = self._socket.getsockname()[1]
        return held

    def release(self) -> None:
        """Let whoever was promised it have it."""
        held, self._socket = self._socket, None
        if held is not None:
            held.close()


def _bound(port: int) -> socket.socket | None:
    """A socket bound to this port, which others may bind as well while nobody listens; None if somebody does."""
    sock = socket.socket()
    if port:  # nodes of one machine may share the port they promise: only one of them becomes rank 0
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("", port))
    except OSError:
        sock.close()
        return None
    return sock


class Part:
    """One node's part in one run; it outlives the link to a store, and is told over which one to act.

    Attributes:
        arrival: Where the node's record stands.
        membership: The last round it was in; it says itself whether the node still is.
        known_round: The last round that it knows of; -1 for none.
        listeners: Who is woken when any of this changes.
        refusal: What the run holds against this node since it has arrived.
        progress: What its next arrival says of the steps it has finished; see `NodeRecord`.
    """

    def __init__(
        self,
        settings: Settings,
        keys: Keys,
        *,
        node_id: str,
        listeners: Listeners,
        loop: NodeLoop,
        rng: random.Random,
        port: HeldPort | None = None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._node_id = node_id
        self._incarnation = f"{rng.getrandbits(64):016x}"
        self._loop = loop
        self._rng = rng
        self._agreed = pack_settings(settings.shared()) if settings.can_join else b""
        self._port = port or HeldPort(settings.master_port)
        self._withdrawing = asyncio.Lock()
        self.listeners = listeners
        self.arrival: Arrival[HeldLease] = Arrival()
        self.membership: Membership | None = None
        self.known_round = -1
        self._unreached = False  # as rank 0 of the last round, which was given up for it
        self._given_up = ""
        self._lapsed_in = -1  # the round that this node was dropped from
        self._reason = NOT_WAITING
        self._reason_now: Callable[[], str] | None = None  # where its durations run on
        self.refusal: RendezvousError | None = None
        self.progress: int | None = None

    # ------------------------------------------------------------------------------------------ joining

    async def join(
        self, link: Link, clock: JoinClock, examine: Callable[[], Awaitable[str | None]] | None
    ) -> Membership:
        """Come to be a member of the next round, over this link.

        Raises:
            StoreReplaced: The link is of no more use, and the node is to join over another one.
        """
        # Whether it is still in it or has left it: the coordinator takes both in before it takes newcomers.
        last, mine = link.follower.head.round, self.membership
        was_member = last is not None and mine is not None and mine.round.revision == last.revision
        me = Me(arrival=0, node_id=self._node_id, known_round=self.known_round, was_member=was_member)
        self.refusal = None
        try:
            await self._check_health(link, clock, examine)
            while True:
                membership = await self._join_as(link, clock, me)
                problem = await self._why_not_reached(link, membership)
                if not problem:
                    self._unreached, self._given_up = False, ""
                    return membership
                self._unreached = membership.rank == 0
                self._given_up = f"round {membership.round.number} was given up: {problem}"
                log.warning("run %s: %s", self._keys.run_id, self._given_up)
                clock.set(suspended=False, now=anyio.current_time())
                me = Me(arrival=0, node_id=self._node_id, known_round=self.known_round, was_member=True)
        except BaseException as error:
            refused = isinstance(error, RendezvousSettingsError | RendezvousRefusedError)
            if isinstance(error, StoreReplaced):
                self.end_membership(f"the store is lost: {error}", dropped=True)
            with anyio.CancelScope(shield=True):
                if refused:
                    await link.step_down()  # who may not take part decides nothing, not even for a moment
                await self.withdraw(link)
                await link.step_down()
            raise
        finally:
            self.reason = NOT_WAITING
            self._port.release()

    async def _join_as(self, link: Link, clock: JoinClock, me: Me) -> Membership:
        """Arrive, as often as it takes, and wait for a round that holds the arrival; wait out a store that is away."""
        while True:
            try:
                if not self.arrival.stands(me.arrival):
                    me = await self._arrive(link, clock, me)
                membership, me = await self._wait_for_round(link, clock, me)
                if membership is not None:
                    return membership
                # The lease was lost while we waited, or the record with it: arrive once more.
            except StoreError as error:
                if not is_away(error, link):
                    raise
                now = anyio.current_time()
                clock.set(suspended=False, now=now)
                self._wait_for(f"the store at {self._settings.endpoint.url} is away: {error}")
                if not clock.left(now):
                    raise self._timeout(link) from error
                if await link.in_reach_again(within=clock.left(now)):
                    await anyio.sleep(min(self._rng.uniform(0, TRY_AGAIN_AFTER), clock.left(anyio.current_time())))

    async def _why_not_reached(self, link: Link, membership: Membership) -> str:
        """Why this round is to be given up, if its members check whether all of them reach rank 0, and not all do."""
        round, rank = membership.round, membership.rank
        if not round.checked:
            return ""
        self.reason = f"waiting for all {round.size} members to reach rank 0 at {round.host}:{round.port}"
        self._port.release()
        names = partial(self._names_of, link, round)
        checking = asyncio.create_task(
            _check(round, rank, names), name=f"check the way to rank 0 of {self._keys.run_id}"
        )
        wakeup = Wakeup()
        checking.add_done_callback(lambda _: wakeup.changed())
        try:
            with self.listeners.listening(wakeup):
                while not checking.done():
                    if membership.over is not None or membership.lost_ids:
                        return ""  # its caller is told that, as of any round
                    await wakeup.sleep_until(None)
            problem = checking.result()
        finally:
            await cancel_and_wait(checking)
        return problem and f"node {self._node_id} (rank {rank}): {problem}"

    async def _names_of(self, link: Link, round: Round, ranks: Collection[int]) -> list[str]:
        """Who has these ranks in a round, and where, as far as the store says so in a short time."""
        found: dict[int, str] = {}
        with anyio.move_on_after(WITHDRAW_WITHIN), contextlib.suppress(StoreError):
            for entry in await link.store.list(self._keys.roster(round.number, round.term)):
                found |= {one.rank: named(one.node_id, one.address) for one in unpack_roster(entry.value)}
        return [f"{found[rank]}, rank {rank}," if rank in found else f"rank {rank}" for rank in ranks]

    async def _check_health(
        self, link: Link, clock: JoinClock, examine: Callable[[], Awaitable[str | None]] | None
    ) -> None:
        """Run the user's health check, if there is one, within the join timeout."""
        if examine is None:
            return
        self.reason = "waiting for its own health check"
        with anyio.move_on_after(clock.left(anyio.current_time())) as limit:
            failure = await examine()
            lease = await link.run_lease()
            await report_health(link.store, self._keys, lease, node_id=self._node_id, failure=failure)
        if limit.cancelled_caught:
            raise self._timeout(link)

    async def _arrive(self, link: Link, clock: JoinClock, me: Me) -> Me:
        """Arrive, within the join timeout: a store that does not answer does not suspend that."""
        clock.set(suspended=False, now=anyio.current_time())
        self.reason = "waiting for the store to take its arrival"
        with anyio.move_on_after(clock.left(anyio.current_time())):
            me = await self._write_arrival(link, clock, me)
            # Only from now on: the run has accepted this node, and with it the settings by which it would decide.
            link.run_for_coordinator(lambda: self._candidacy(link).run())
            link.keep_run()
            return me
        raise self._timeout(link)

    async def _write_arrival(self, link: Link, clock: JoinClock, me: Me) -> Me:
        """Write this node's record: an arrival of its own, on its lease, under the run's settings."""
        key = self._keys.node(self._node_id)
        banned = self._keys.banned(self._node_id)
        expected = self.arrival.revision
        while True:
            self._refuse_if_closed(link, me)
            lease, run_lease = await self._take_leases(link)
            record = await self._new_record(link)
            if self.arrival.lease is not lease:
                # It lapsed while we waited for the run's, or for the store, which may not know that yet, and take a
                # record on it: one that nobody keeps, and whose end nobody would hear of.
                expected = self.arrival.revision
                continue
            writes = [Put(key, record.pack(), lease=lease.id)]
            if not expected:
                # Unchanged, so that nobody rewrites the settings who has looked before we came.
                writes.append(Put(self._keys.settings, self._agreed, lease=run_lease.id))
            self.arrival.send(record)
            sent_at = link.store.time()
            try:
                result = await link.store.transact(
                    when=(
                        when.value(self._keys.settings) == self._agreed,
                        when.mod_revision(key) == expected,
                        when.missing(banned),
                    ),
                    then=writes,
                    otherwise=(Get(self._keys.settings), Get(key), Get(banned)),
                )
            except LeaseNotFound:
                self._note_lapse()
                self.arrival.lapsed()  # it lapsed just now; the keeper's word of it is on its way
                link.forget_run_lease()
                expected = 0
                continue
            link.answered_in(link.store.time() - sent_at)
            if result.succeeded:
                if self.arrival.written(result.revision):
                    self.end_membership("this node has gone on to the next round")
                    return replace(me, arrival=result.revision, known_round=self.known_round)
                expected = result.revision  # its lease was given up meanwhile: nobody keeps what is on it
                continue
            self.arrival.refused()
            settings_entry, there, ban = result.results
            if isinstance(ban, Entry):
                raise self._banned_error(Ban.unpack(ban.value))
            self._agreed = await agree_on_settings(
                link.store,
                self._keys,
                self._settings,
                run_lease,
                incarnation=self._incarnation,
                there=settings_entry,  # type: ignore[arg-type]  # results of Gets
            )
            expected = await self._claim_name(link, clock, there)  # type: ignore[arg-type]

    async def _take_leases(self, link: Link) -> tuple[HeldLease, Lease]:
        """This node's lease, and the run's; what is not there yet is asked for at once."""
        if self.arrival.lease is not None:
            return self.arrival.lease, await link.run_lease()
        asking = asyncio.create_task(link.run_lease(), name=f"ask for the lease of run {self._keys.run_id}")
        asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())  # if both fail, one is enough
        try:
            return await self._take_lease(link), await asking
        finally:
            await cancel_and_wait(asking)

    async def _new_record(self, link: Link) -> NodeRecord:
        """What this node says of itself, once the store has said, in this session, from where it sees it come."""
        settings, store = self._settings, link.store
        address, sends_from, store_at = settings.address, "", ""
        if address is None:
            if settings.endpoint.info.family == "tcp":
                # Never a host name instead: most hosts of the world cannot resolve it.
                await link.in_reach_again(within=math.inf)
            if link.failure is not None:
                raise link.failure
            address = store.seen_as or socket.gethostname()
            if store.ends is not None:
                seen_as, (sends_from, store_at) = address, store.ends
                address = address_of(seen_as=seen_as, sends_from=sends_from, store_at=store_at)
                if address != seen_as:  # the store is not where it seems to be, and that must mislead nobody
                    sends_from = store_at = ""
        return NodeRecord(
            release=__version__,
            node_id=self._node_id,
            incarnation=self._incarnation,
            arrived_after=self.known_round,
            address=address,
            port=self._port.hold(),
            payload=settings.payload,
            attributes=settings.attributes,
            requested_rank=settings.requested_rank,
            sends_from=sends_from,
            store_at=store_at,
            lapsed_in=self._lapsed_in,
            progress=self.progress,
            checks=bool(settings.bootstrap_check),
            unreached=self._unreached,
            gave_up=self._given_up[:GIVEN_UP_MOST],
        )

    async def _take_lease(self, link: Link) -> HeldLease:
        """A lease for this node's record, kept until it is released, or lost."""
        held: HeldLease | None = None
        gone = False  # a lease may be lost before we hear that we have it: to a process that is paused just then

        def lapsed(reason: str) -> None:
            nonlocal gone
            gone = True
            if held is not None and self.arrival.lease is held:
                self.arrival.lapsed()
                self.end_membership(reason, dropped=True)
                self.listeners.changed()

        while held is None or gone:
            gone = False
            try:
                held = await link.keeper.hold(
                    ttl=self._settings.ttl,
                    disconnect_ttl=self._settings.disconnect_ttl,
                    gone_ttl=max(self._settings.gone_ttl, link.reconnects_in),
                    on_lapse=lapsed,
                )
            except LimitExceeded as error:
                if not is_too_long(error):
                    raise  # no room, or a disk that is full: that is not what this node was told to ask for
                raise RendezvousSettingsError(
                    f"ttl={self._settings.ttl:g} s is not to be had: {error}; lower ttl"
                ) from error
        self.arrival.lease = held
        return held

    async def _claim_name(self, link: Link, clock: JoinClock, there: Entry | None) -> int:
        """Which record our arrival replaces, by its mod_revision; waits while another live node has our name."""
        while there is not None:
            holder = NodeRecord.unpack(self._node_id, there.value, arrival=there.mod_revision)
            if holder.left or holder.incarnation == self._incarnation:
                return there.mod_revision
            self._wait_for(f"the name {self._node_id} is held by a live node at {holder.address}; waiting for it to go")
            there = await self._changed_record(link, clock, there)
        return 0

    async def _changed_record(self, link: Link, clock: JoinClock, there: Entry) -> Entry | None:
        """What a record has become once it has changed: its holder may have come again, and then still has the name."""
        async with link.store.watch(there.key) as watch:
            entry = await link.store.get(there.key)  # it may have changed before the watch was open
            if entry is None or entry.mod_revision != there.mod_revision:
                return entry
            changed = Wakeup()
            noticing = asyncio.create_task(_first_change(watch, there.key, changed))
            try:
                with self.listeners.listening(changed):
                    while not noticing.done():
                        self._refuse_if_closed(link, Me(arrival=0))
                        if not await changed.sleep_until(clock.deadline(link.store.time())):
                            raise self._timeout(link)
            finally:
                await cancel_and_wait(noticing)
        return await link.store.get(there.key)

    def _candidacy(self, link: Link) -> Candidacy:
        settings = self._settings

        def overruled(theirs: dict[str, object]) -> None:
            """Somebody has rewritten the run's settings: this node is in it by mistake."""
            self.refusal = RendezvousSettingsError(
                f"run {self._keys.run_id} has got other settings: {describe_difference(settings.shared(), theirs)}"
            )
            self.listeners.changed()

        return Candidacy(
            link,
            keys=self._keys,
            rules=Rules(
                needed=settings.needed,
                capacity=settings.capacity,
                unit=settings.node_unit,
                last_call=settings.last_call_timeout,
                early_last_call=settings.early_last_call,
                order=order_named(settings.rank_order),
                expected=settings.expected,
            ),
            agreed=self._agreed,
            overruled=overruled,
            node_id=self._node_id,
            ttl=settings.ttl,
            gone_ttl=settings.gone_ttl,
            rng=self._rng,
            apart=self._loop.apart if callable(settings.rank_order) else None,
        )

    # ------------------------------------------------------------------------------------------ waiting for a round

    async def _wait_for_round(self, link: Link, clock: JoinClock, me: Me) -> tuple[Membership | None, Me]:
        """Wait for a round that holds us. None if our arrival was lost meanwhile, and must be made anew."""
        wakeup = Wakeup()
        with self.listeners.listening(wakeup):
            while True:
                if link.follower.error is not None:
                    raise link.follower.error
                if self.refusal is not None:
                    raise self.refusal
                if not self.arrival.stands(me.arrival):
                    return None, me
                now = link.store.time()
                match follow(me, link.follower.head, now=now):
                    case RoundToCheck(round=round):
                        member = await find_member(
                            link.store, self._keys, round, node_id=self._node_id, arrival=me.arrival
                        )
                        if not self.arrival.stands(me.arrival):
                            continue  # the lease was lost while we read: we were in it, perhaps, and are not any more
                        if member is not None:
                            return self._become_member(round, member.rank, me), me
                        me = replace(me, passed_over=round.revision, known_round=round.number, was_member=False)
                        self.known_round = max(self.known_round, round.number)
                    case Refused(closed=closed, spare=spare):
                        raise self._closed_error(closed, spare=spare)
                    case Parked(reason=reason, suspended=suspended, until=until):
                        ban = link.follower.head.bans.get(self._node_id)
                        if ban is not None:
                            raise self._banned_error(ban)
                        self._wait_for(reason + link.slowness())
                        self._reason_now = partial(self._parked_reason, link, me, asyncio.get_running_loop())
                        clock.set(suspended=suspended, now=now)
                        deadline = clock.deadline(now)
                        if await wakeup.sleep_until(until if deadline is None else deadline) or deadline is None:
                            continue
                        self.reason = self.reason  # as of now: what it will be once our record is gone is another's
                        round_now = await self._give_up(link, me)
                        if round_now is None:
                            raise self._timeout(link)
                        link.follower.take_round(round_now)  # it was committed in the last moment, and may hold us

    async def _give_up(self, link: Link, me: Me) -> Round | None:
        """Take the record back if no round has come meanwhile; the round, if one has: then it wins over the timeout."""
        if not link.in_reach:
            return None  # nobody knows, and nobody can be asked within the time; the record will be let lapse
        known = link.follower.head.round
        key = self._keys.node(self._node_id)
        assert self.arrival.record is not None
        assert self.arrival.lease is not None
        result = await link.store.transact(
            when=(
                when.mod_revision(self._keys.round) == (known.revision if known else 0),
                when.mod_revision(key) == me.arrival,
            ),
            then=(Put(key, replace(self.arrival.record, left=True).pack(), lease=self.arrival.lease.id),),
            otherwise=(Get(self._keys.round),),
        )
        if result.succeeded:
            await link.store.delete(key, when=(when.mod_revision(key) == result.revision,))
            self.arrival.gone()
            return None
        (entry,) = result.results
        if entry is None or isinstance(entry, int) or (known is not None and entry.mod_revision == known.revision):
            self.arrival.gone()  # the record itself has gone: nothing to take back
            return None
        return Round.unpack(entry.value, revision=entry.mod_revision)

    def _become_member(self, round: Round, rank: int, me: Me) -> Membership:
        """Be a member of the round that holds us."""
        self.arrival.taken_in()
        self._lapsed_in = -1
        self.membership = membership = Membership(round=round, rank=rank, arrival=me.arrival)
        self.known_round = max(self.known_round, round.number)
        log.info(
            "run %s, round %d: node %s has rank %d of %d",
            self._keys.run_id,
            round.number,
            self._node_id,
            rank,
            round.size,
        )
        return membership

    # ------------------------------------------------------------------------------------------ what it says

    @property
    def reason(self) -> str:
        """What it waits for, in words, as of now; from any thread."""
        reason_now = self._reason_now
        return self._reason if reason_now is None else reason_now()

    @reason.setter
    def reason(self, reason: str) -> None:
        self._reason, self._reason_now = reason, None

    def _parked_reason(self, link: Link, me: Me, loop: asyncio.AbstractEventLoop) -> str:
        answer = follow(me, link.follower.head, now=loop.time())
        return answer.reason + link.slowness() if isinstance(answer, Parked) else self._reason

    def _wait_for(self, reason: str) -> None:
        if without_durations(reason) != without_durations(self._reason):
            log.info("run %s, node %s: %s", self._keys.run_id, self._node_id, reason)
        self.reason = reason

    def timeout(self, *, in_reach: bool) -> RendezvousTimeoutError:
        """The error for a call whose time is over."""
        problem = "" if in_reach else "; the store is out of reach"
        if problem and self._settings.endpoint.info.family == "tcp":
            problem += f"; {IF_HOSTED}"
        reason = self.reason  # which has it already if that is what the coordinator says of all
        if self._given_up and self._given_up[:GIVEN_UP_MOST] not in reason:
            problem += f"; {self._given_up}"
        return RendezvousTimeoutError(
            f"run {self._keys.run_id}, node {self._node_id}: no round within "
            f"join_timeout={self._settings.join_timeout:g} s at {self._settings.endpoint.url}: "
            f"{reason}{problem}"
        )

    def _timeout(self, link: Link) -> RendezvousTimeoutError:
        return self.timeout(in_reach=link.in_reach)

    def _refuse_if_closed(self, link: Link, me: Me) -> None:
        head = link.follower.head
        if head.closed is not None and not (head.round and head.round.revision > me.arrival > 0):
            raise self._closed_error(head.closed, spare=False)

    def _banned_error(self, ban: Ban) -> RendezvousRefusedError:
        return RendezvousRefusedError(f"run {self._keys.run_id}: node {self._node_id} is {ban}")

    def _closed_error(self, closed: Closed, *, spare: bool) -> RendezvousError:
        reason = f": {closed.reason}" if closed.reason else ""
        by = f" by {closed.by}" if closed.by else ""
        message = f"run {self._keys.run_id} is closed{by}{reason}"
        if spare:
            return RendezvousGracefulExitError(
                f"{message}; node {self._node_id} was a spare and is not needed any more"
            )
        return RendezvousClosedError(message, reason=closed.reason, given_up=closed.given_up, status=closed.status)

    # ------------------------------------------------------------------------------------------ leaving

    async def withdraw(self, link: Link | None) -> None:
        """Take the record back, saying that it was on our own account; within a short time, or let it lapse."""
        async with self._withdrawing:  # a caller that gives up, and one that closes the handler, may both come
            self.end_membership("this node has left it")
            withdrawal = self.arrival.withdraw()
            try:
                if link is None or not withdrawal.needed:
                    return
                if not withdrawal.in_doubt and await self._take_back(link):
                    return
                # The record stands, or may; it must not be kept alive, and goes with its lease.
                assert withdrawal.lease is not None
                self.arrival.lease = None
                await withdrawal.lease.release()
            finally:
                if link is not None:
                    link.release_run()
                self.arrival.gone()

    async def _take_back(self, link: Link) -> bool:
        """Delete the record, and whether that was done in time."""
        record, lease, key = self.arrival.record, self.arrival.lease, self._keys.node(self._node_id)
        assert record is not None
        assert lease is not None
        with anyio.move_on_after(WITHDRAW_WITHIN, shield=True), contextlib.suppress(StoreError):
            # It stays on its lease: should we die before we delete it, it still goes.
            result = await link.store.transact(
                when=(when.mod_revision(key) == record.arrival,),
                then=(Put(key, replace(record, left=True).pack(), lease=lease.id),),
            )
            if result.succeeded:
                await link.store.delete(key, when=(when.mod_revision(key) == result.revision,))
            await self._see_departure_reported(link)
            return True
        return False

    async def _see_departure_reported(self, link: Link) -> None:
        """If we coordinate, wait until our own departure has been reported: a successor would take it for a loss."""
        membership, reported = self.membership, Wakeup()
        with link.follower.listeners.listening(reported), anyio.move_on_after(HAND_OVER_WITHIN):
            while membership is not None:
                head = link.follower.head
                ours = head.coordinator is not None and head.coordinator.node_id == self._node_id
                progress = head.progress
                if not ours or head.round is None or head.round.number != membership.round.number:
                    return
                reported_ids = progress.departed_ids if progress and progress.round == head.round.number else ()
                if self._node_id in reported_ids or len(reported_ids) == NAMED_MOST:
                    return
                await reported.sleep_until(None)

    def end_membership(self, reason: str, *, dropped: bool = False) -> None:
        """This node is no longer in its round: it went on, it left, or it was dropped without being asked."""
        membership = self.membership
        if membership is None or membership.over is not None:
            return
        if dropped:
            self._note_lapse()
        membership.end(reason, dropped=dropped)
        if dropped:
            log.warning(
                "run %s, round %d: node %s was dropped: %s",
                self._keys.run_id,
                membership.round.number,
                self._node_id,
                reason,
            )
        self.listeners.changed()

    def _note_lapse(self) -> None:
        """Remember that this node does not leave its round by itself: coming back, it says that others may, too."""
        if self.membership is not None and self.membership.over is None:
            self._lapsed_in = self.membership.round.number

    # ------------------------------------------------------------------------------------------ what others do to it

    async def notice(self, link: Link) -> None:
        """Compare what becomes known of the run with what this node believes to be, until the link is closed."""
        wakeup, follower = Wakeup(), link.follower
        resets, banned_at = follower.resets, 0
        steps = Steps(self._keys, self._node_id)
        again: float | None = None
        with self.listeners.listening(wakeup):
            while True:
                await wakeup.sleep_until(again)
                again = None
                try:
                    banned, banned_before = follower.own_ban, banned_at
                    if banned is not None and banned.revision > max(banned_before, self.arrival.revision):
                        await self._notice_ban(link, banned.ban)
                        banned_at = banned.revision
                    missed = follower.resets
                    if missed != resets:
                        await self._see_whether_it_stands(link)
                        resets = missed
                    if self.membership is not None and self.membership.over is None:
                        self._notice_as_member(link, self.membership)
                        again = await steps.heed(link, self.membership, lease=self.arrival.lease)
                        if self._drained(link):
                            await self.withdraw(link)
                except StoreError as error:
                    log.debug("what befalls node %s is not known: %s", self._node_id, error)
                    again = anyio.current_time() + TRY_AGAIN_AFTER

    def _notice_as_member(self, link: Link, membership: Membership) -> None:
        round = link.follower.head.round
        progress = link.follower.head.progress
        if link.follower.error is not None:
            self.end_membership(f"the store is lost: {link.follower.error}", dropped=True)
        elif round is not None and round.revision > membership.round.revision:
            self.end_membership(f"round {round.number} was completed without this node", dropped=True)
        elif progress is not None and progress.round == membership.round.number:
            membership.lose(progress.lost_ids)

    def _drained(self, link: Link) -> bool:
        """Whether this node was to leave by now, and is still a member."""
        leaving = link.follower.head.drains.get(self._node_id)
        return leaving is not None and leaving.until <= link.store.time() and self.arrival.state is State.TAKEN_IN

    async def _notice_ban(self, link: Link, ban: Ban) -> None:
        """This node was banned since it arrived, and may have been unbanned since: its record may have been deleted."""
        if ban.now and self.arrival.state is State.TAKEN_IN:
            self.arrival.gone()  # whoever banned it has deleted it, or is about to
            self.end_membership(f"this node is {ban}", dropped=True)
            await link.step_down()  # who was put out decides nothing for those who are in
        else:
            await self._see_whether_it_stands(link)

    async def _see_whether_it_stands(self, link: Link) -> None:
        """Look whether our record is still there: somebody may have deleted it while nobody told us."""
        record = self.arrival.record
        if record is None or self.arrival.state not in (State.STANDING, State.TAKEN_IN):
            return
        entry = await link.store.get(self._keys.node(self._node_id))
        if not self.arrival.stands(record.arrival) or (entry is not None and entry.mod_revision == record.arrival):
            return
        self.arrival.gone()
        self.end_membership("its record was deleted; it may have been banned for a while", dropped=True)
        self.listeners.changed()


async def _check(round: Round, rank: int, names_of: Callable[[Collection[int]], Awaitable[list[str]]]) -> str:
    """Whether all reach rank 0 of this round: in words what is wrong, or nothing; `names_of` tells who has a rank."""
    at = f"{round.host}:{round.port}"
    if rank:
        problem = await reach(round, rank)
        return problem and f"rank 0 at {at}: {problem}"
    try:
        missing = list(await all_reach(round))
    except OSError as error:
        return f"nobody can listen at {at}: {error.strerror or error}"
    if not missing:
        return ""
    more = f" and {len(missing) - UNREACHED_NAMED} more" if len(missing) > UNREACHED_NAMED else ""
    who = " and ".join(await names_of(missing[:UNREACHED_NAMED]))
    return f"{who}{more} did not come to {at} within {WITHIN:g} s"


async def _first_change(watch: Watch, key: str, changed: Wakeup) -> None:
    """Return, and say so, once this very key has changed: the watch also sees those that begin with it."""
    with contextlib.suppress(StoreError):
        async for event in watch:
            if event.key == key:
                break
    changed.changed()
