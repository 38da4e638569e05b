"""Shell: a node: registers, follows, returns the round, passes changes on.

A handler holds, from `connect` to `aclose`: a store client, a keeper for its membership lease, a `Follower` of the
run's head, and a `Candidacy` for coordinating it. They belong together in a `Link`, because they end together when the
store is replaced: then the node is out of its round, is told so, and `next_rendezvous` makes a new link.

`next_rendezvous` writes one record, the node's arrival, in one transaction that also checks the run's settings. Then it
waits for the head to change, and asks `follow` what it means. Being cancelled, timing out and leaving take the record
back; a commit that came first wins over a timeout, and the node returns with its round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import anyio

from rdzv.core.decision import JoinClock, Me, Parked, Refused, RoundToCheck, Rules, changes_since, follow
from rdzv.core.keys import Keys
from rdzv.core.ranks import order_named
from rdzv.core.state import (
    NAMED_MOST,
    Assignment,
    Ban,
    Change,
    Closed,
    Head,
    NodeRecord,
    Participant,
    Round,
    RunStatus,
    pack_settings,
    unpack_roster,
)
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousRefusedError,
    RendezvousSettingsError,
    RendezvousStateError,
    RendezvousTimeoutError,
    RoundSupersededError,
)
from rdzv.interface import RendezvousHandler
from rdzv.membership import Membership, RendezvousInfo
from rdzv.node.admission import agree_on_settings, check_health, check_node_id, put_ban
from rdzv.node.coordinator import Candidacy
from rdzv.node.ports import HeldPort
from rdzv.node.status import find_member, read_history, read_status
from rdzv.node.store_session import Link
from rdzv.node.wakeup import Listeners, Wakeup
from rdzv.shared_store.store import SharedStore
from store import ConnectionLost, Entry, Get, LeaseNotFound, Put, StoreError, StoreReplaced, when

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from types import TracebackType

    from rdzv.config.settings import Settings
    from rdzv.core.history import Chapter
    from store import BlockingStore, Store
    from store.client.keepalive import HeldLease, Keeper
    from store.interface import Watch

__all__ = ["Handler", "RendezvousInfo"]

log = logging.getLogger(__name__)

HAND_OVER_WITHIN = 0.5  # seconds to see that our own departure has been reported, if we coordinate
WITHDRAW_WITHIN = 2.0  # seconds to take a record back; an unreachable store lets it lapse


class Handler(RendezvousHandler):
    """One node's part in the rendezvous of a run; made by `rdzv.connect`.

    Args:
        settings: What the user chose.
        open_store: Makes the store client; entered at the first connect, and again if the store was replaced.
        open_keeper: Makes the keeper of the membership lease, given the client.
        open_blocking_store: Makes a blocking client of the same store, for the shared store of blocking callers.
        rng: For jitter, and for the node's name if none is given.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        open_store: Callable[[], contextlib.AbstractAsyncContextManager[Store]],
        open_keeper: Callable[[Store], Keeper],
        open_blocking_store: Callable[[], BlockingStore] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._open_store = open_store
        self._open_keeper = open_keeper
        self._open_blocking_store = open_blocking_store
        self._rng = rng or random.Random()
        self._keys = Keys(settings.prefix, settings.run_id)
        self._node_id = settings.node_id or f"{socket.gethostname()}-{os.getpid()}-{self._rng.getrandbits(24):06x}"
        self._incarnation = f"{self._rng.getrandbits(64):016x}"
        self._link: Link | None = None
        self._link_stack = contextlib.AsyncExitStack()
        self._stack = contextlib.AsyncExitStack()
        self._membership: Membership | None = None
        self._record: NodeRecord | None = None  # as it stands in the store, if it does
        self._known_round = -1
        self._listeners = Listeners()
        self._connecting = asyncio.Lock()
        self._connecting_scope: anyio.CancelScope | None = None
        self._arriving = False  # an arrival was sent, and its answer has not come
        self._joining = False
        self._closed = False
        self._reason = "not waiting for anything"
        self._port = HeldPort()
        self._pid = os.getpid()

    # ------------------------------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        try:
            await self._connect()
        except BaseException:
            await self.aclose()  # nobody else will, and a store that was started for us would be served for ever
            raise
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Await this once the handler has let go of everything; the last one given comes first."""
        self._stack.push_async_callback(close)

    async def aclose(self) -> None:
        """Leave for good: the round, the run's coordination, and the store. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._listeners.changed()
        if self._connecting_scope is not None:
            self._connecting_scope.cancel()
        letting_go = asyncio.create_task(self._let_go(), name=f"let go of run {self.run_id}")
        try:
            with anyio.CancelScope(shield=True):
                # In a task of its own, because a native cancel pierces the shield; it takes a few seconds at most.
                await asyncio.wait([letting_go])
        except asyncio.CancelledError:
            await asyncio.wait([letting_go])
            raise
        finally:
            await self._stack.aclose()
        letting_go.result()

    async def _let_go(self) -> None:
        try:
            await self._withdraw()
        finally:
            await self._disconnect()

    async def _connect(self) -> Link:
        """The link to the store; a new one if there is none, or if the store it led to has been replaced."""
        self._check_usable()
        if self._link is not None and self._link.follower.error is None:
            return self._link
        async with self._connecting:
            self._check_usable()
            if self._link is not None and self._link.follower.error is not None:
                await self._disconnect(self._link.follower.error)
            if self._link is None:
                with anyio.CancelScope() as self._connecting_scope:
                    self._link = await self._new_link()
                self._connecting_scope = None
                self._check_usable()  # closed while we connected
            assert self._link is not None
            return self._link

    async def _new_link(self) -> Link:
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(self._open_store())
                link = Link(client, self._open_keeper(client), self._keys)
                stack.push_async_callback(link.aclose)
                link.start(link.follower.run(), f"follow run {self.run_id}")
                stack.enter_context(link.follower.listeners.listening(self._listeners))
                link.start(self._notice_being_dropped(link), f"notice being dropped from run {self.run_id}")
                with anyio.fail_after(self._settings.join_timeout):
                    await link.follower.synced.wait()
                self._raise_if_broken(link)
                self._link_stack = stack.pop_all()
        except (StoreError, TimeoutError) as error:
            raise self._connection_error(error) from error
        return link

    async def _let_go_of(self, link: Link, error: Exception) -> None:
        """Make no more use of a link, if it is still the one in use."""
        async with self._connecting:
            if self._link is link:
                await self._disconnect(error)

    async def _disconnect(self, error: Exception | None = None) -> None:
        """End the link; the membership with it, if the store was lost."""
        if error is not None:
            self._end_membership(f"the store is lost: {error}", dropped=True)
        self._link = None
        self._record = None
        stack, self._link_stack = self._link_stack, contextlib.AsyncExitStack()
        with anyio.CancelScope(shield=True):
            await stack.aclose()

    def _raise_if_broken(self, link: Link) -> None:
        if link.follower.error is not None:
            raise link.follower.error

    def _connection_error(self, error: BaseException) -> RendezvousError:
        """The error to raise when the store fails us."""
        what = str(error) or "the store does not answer"
        if self._link is not None and not self._in_reach() and self._settings.endpoint.info.family == "tcp":
            what += "; if a node hosted this store, it ended with that node's process, as one of `rdzv serve` does not"
        return RendezvousConnectionError(f"run {self.run_id}, node {self.node_id}: {what}")

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise RendezvousStateError(
                f"this handler of run {self.run_id} was made before fork(); make a new one in the child"
            )
        if self._closed:
            raise RendezvousStateError(f"this handler of run {self.run_id} is closed; connect again")

    @property
    def run_id(self) -> str:
        """Which run this is."""
        return self._settings.run_id

    @property
    def node_id(self) -> str:
        """What this node is called in the run."""
        return self._node_id

    def open_blocking_store(self) -> BlockingStore:
        """A blocking client of the same store, the caller's to close."""
        if self._open_blocking_store is None:
            raise RendezvousStateError(f"run {self.run_id}: this handler was made without a way to block")
        return self._open_blocking_store()

    @property
    def settings(self) -> Settings:
        """What was chosen."""
        return self._settings

    # ------------------------------------------------------------------------------------------ joining

    async def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if in one, and return once this node is a member of the next.

        Raises:
            RendezvousClosedError: The run is closed; the message has the reason.
            RendezvousTimeoutError: It did not happen within `join_timeout`; the message says what was missing.
            RendezvousSettingsError: The run was started with other settings, or this handler with too few to join.
            RendezvousGracefulExitError: This node was a spare, and the run is closed.
            RendezvousConnectionError: The store cannot be reached.
            RendezvousRefusedError: This node is banned, or failed its health check; the message has the reason.
            RendezvousStateError: Another call of this handler is joining already.
        """
        if self._joining:
            raise RendezvousStateError(f"node {self.node_id} is joining run {self.run_id} already; one call at a time")
        if not self._settings.can_join:
            raise RendezvousSettingsError(
                f"min_nodes is missing: without it run {self.run_id} can be looked at, but not joined; "
                f"add ?min_nodes=2, say"
            )
        self._joining = True
        try:
            return await self._join()
        finally:
            self._joining = False
            self._reason = "not waiting for anything"
            self._port.release()

    async def _join(self) -> RendezvousInfo:
        clock = JoinClock(self._settings.join_timeout, now=anyio.current_time())
        link = await self._connect()
        while True:
            try:
                return await self._join_over(link, clock)
            except StoreReplaced as error:
                # It asked for the next round, and asks for it there: above every round it knows (promise S10).
                log.warning("run %s, node %s: %s; it joins the run in the new one", self.run_id, self._node_id, error)
                await self._let_go_of(link, error)
            clock.set(suspended=False, now=anyio.current_time())
            with anyio.move_on_after(clock.left(anyio.current_time())) as limit:
                link = await self._connect()
            if limit.cancelled_caught:
                raise self._timeout()

    async def _join_over(self, link: Link, clock: JoinClock) -> RendezvousInfo:
        """Join over one link to the store; `StoreReplaced` if that is of no more use."""
        # Whether it is still in it or has left it: the coordinator takes both in before it takes newcomers.
        last, mine = link.follower.head.round, self._membership
        was_member = last is not None and mine is not None and mine.round.revision == last.revision
        me = Me(arrival=0, node_id=self._node_id, known_round=self._known_round, was_member=was_member)
        try:
            await self._check_health(link, clock)
            link.stand(self._candidacy(link))
            me = await self._arrive(link, clock, me)
            while True:
                assignment = await self._assignment(link, clock, me)
                if assignment is not None:
                    return self._take_part(link, me, assignment)
                # The lease was lost while we waited, or the record with it: arrive once more.
                me = await self._arrive(link, clock, me)
        except BaseException as error:
            if isinstance(error, StoreReplaced):
                self._end_membership(f"the store is lost: {error}", dropped=True)
            with anyio.CancelScope(shield=True):
                await self._withdraw()
                await link.step_down()  # who is not in decides nothing for those who are
            if isinstance(error, StoreError) and not isinstance(error, StoreReplaced):
                raise self._connection_error(error) from error
            raise

    def _candidacy(self, link: Link) -> Candidacy:
        settings = self._settings
        return Candidacy(
            link.store,
            link.leadership,
            keys=self._keys,
            rules=Rules(
                needed=settings.needed,
                capacity=settings.capacity,
                unit=settings.node_unit,
                last_call=settings.last_call_timeout,
                early_last_call=settings.early_last_call,
                order=order_named(settings.rank_order),
                keep=settings.closed_ttl,
            ),
            node_id=self._node_id,
            follower=link.follower,
            rng=self._rng,
        )

    async def _check_health(self, link: Link, clock: JoinClock) -> None:
        """Run the user's health check within the join timeout; one that blocks the loop cannot be held to it."""
        self._reason = "waiting for its own health check"
        with anyio.move_on_after(clock.left(anyio.current_time())) as limit:
            await check_health(link.store, self._keys, self._settings, node_id=self._node_id)
        if limit.cancelled_caught:
            raise self._timeout()

    async def _arrive(self, link: Link, clock: JoinClock, me: Me) -> Me:
        """Arrive, within the join timeout: a store that does not answer does not suspend that."""
        clock.set(suspended=False, now=anyio.current_time())
        self._reason = "waiting for the store to take its arrival"
        with anyio.move_on_after(clock.left(anyio.current_time())):
            return await self._write_arrival(link, clock, me)
        raise self._timeout()

    async def _write_arrival(self, link: Link, clock: JoinClock, me: Me) -> Me:
        """Write this node's record: an arrival of its own, on its lease, under the run's settings."""
        ours = pack_settings(self._settings.shared())
        key = self._keys.node(self._node_id)
        expected = self._record.arrival if self._record is not None else 0
        while True:
            self._refuse_if_closed(link, me)
            lease = link.lease or await self._take_lease(link)
            record = self._new_record(link)
            self._arriving = True
            try:
                result = await link.store.transact(
                    when=(
                        when.value(self._keys.settings) == ours,
                        when.mod_revision(key) == expected,
                        when.missing(self._keys.banned(self._node_id)),
                    ),
                    then=(Put(key, record.pack(), lease=lease.id),),
                    otherwise=(Get(self._keys.settings), Get(key), Get(self._keys.banned(self._node_id))),
                )
            except LeaseNotFound:
                link.lease = None  # it lapsed just now; the keeper's word of it is on its way
                continue
            self._arriving = False
            if result.succeeded and link.lease is not lease:
                expected = result.revision  # the lease was given up meanwhile: nobody keeps what is on it
            elif result.succeeded:
                self._record = replace(record, arrival=result.revision)
                self._end_membership("this node has gone on to the next round")
                return replace(me, arrival=result.revision, known_round=self._known_round)
            else:
                settings_entry, there, ban = result.results
                if isinstance(ban, Entry):
                    raise self._banned_error(Ban.unpack(ban.value))
                await agree_on_settings(
                    link.store,
                    self._keys,
                    self._settings,
                    node_id=self._node_id,
                    there=settings_entry,  # type: ignore[arg-type]  # results of Gets
                )
                expected = await self._claim_name(link, clock, there)  # type: ignore[arg-type]

    def _new_record(self, link: Link) -> NodeRecord:
        settings = self._settings
        return NodeRecord(
            node_id=self._node_id,
            incarnation=self._incarnation,
            arrived_after=self._known_round,
            address=settings.address or getattr(link.store, "seen_as", None) or socket.gethostname(),
            port=self._port.hold(),
            payload=settings.payload,
            attributes=settings.attributes,
            requested_rank=settings.requested_rank,
        )

    async def _take_lease(self, link: Link) -> HeldLease:
        """A lease for this node's record, kept by the keeper until it is released, or lost."""
        held: HeldLease | None = None
        gone = False  # a lease may be lost before we hear that we have it: to a process that is paused just then

        def lapsed(reason: str) -> None:
            nonlocal gone
            gone = True
            if held is not None and link.lease is held and self._link is link:
                link.lease = None
                self._record = None
                self._end_membership(reason, dropped=True)
                self._listeners.changed()

        while held is None or gone:
            gone = False
            held = await link.keeper.hold(
                ttl=self._settings.ttl, disconnect_ttl=self._settings.disconnect_ttl, on_lapse=lapsed
            )
        link.lease = held
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
                with self._listeners.listening(changed):
                    while not noticing.done():
                        self._check_usable()
                        self._refuse_if_closed(link, Me(arrival=0))
                        if not await changed.sleep_until(clock.deadline(link.store.time())):
                            raise self._timeout()
            finally:
                noticing.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([noticing])
        return await link.store.get(there.key)

    async def _assignment(self, link: Link, clock: JoinClock, me: Me) -> Assignment | None:
        """Wait for a round that holds us. None if our arrival was lost meanwhile, and must be made anew."""
        wakeup = Wakeup()
        with self._listeners.listening(wakeup):
            return await self._follow_until_assigned(link, clock, me, wakeup)

    async def _follow_until_assigned(self, link: Link, clock: JoinClock, me: Me, wakeup: Wakeup) -> Assignment | None:
        while True:
            self._check_usable()
            self._raise_if_broken(link)
            if not self._stands(me):
                return None
            now = link.store.time()
            match follow(me, link.follower.head, now=now):
                case RoundToCheck(round=round):
                    rank = await self._find_rank(link, round, me)
                    if not self._stands(me):
                        continue  # the lease was lost while we read: we were in it, perhaps, and are not any more
                    if rank is not None:
                        return Assignment(round=round, rank=rank)
                    me = replace(me, passed_over=round.revision, known_round=round.number, was_member=False)
                    self._known_round = max(self._known_round, round.number)
                case Refused(closed=closed, spare=spare):
                    raise self._closed_error(closed, spare=spare)
                case Parked(reason=reason, suspended=suspended):
                    ban = link.follower.head.bans.get(self._node_id)
                    if ban is not None:
                        raise self._banned_error(ban)
                    self._wait_for(reason)
                    clock.set(suspended=suspended, now=now)
                    if await wakeup.sleep_until(clock.deadline(now)):
                        continue
                    round_now = await self._give_up(link, me)
                    if round_now is None:
                        raise self._timeout()
                    link.follower.take_round(round_now)  # it was committed in the last moment, and may hold us

    def _stands(self, me: Me) -> bool:
        """Whether this arrival is still the node's, as far as we know."""
        return self._record is not None and self._record.arrival == me.arrival

    async def _find_rank(self, link: Link, round: Round, me: Me) -> int | None:
        """Our rank in a round; None if we are not in it."""
        member = await find_member(link.store, self._keys, round, node_id=self._node_id, arrival=me.arrival)
        return member.rank if member is not None else None

    async def _give_up(self, link: Link, me: Me) -> Round | None:
        """Take the record back if no round has come meanwhile; the round, if one has: then it wins over the timeout."""
        if not self._in_reach():
            return None  # nobody knows, and nobody can be asked within the time; the record will be let lapse
        known = link.follower.head.round
        key = self._keys.node(self._node_id)
        assert self._record is not None
        assert link.lease is not None
        result = await link.store.transact(
            when=(
                when.mod_revision(self._keys.round) == (known.revision if known else 0),
                when.mod_revision(key) == me.arrival,
            ),
            then=(Put(key, replace(self._record, left=True).pack(), lease=link.lease.id),),
            otherwise=(Get(self._keys.round),),
        )
        if result.succeeded:
            await link.store.delete(key, when=(when.mod_revision(key) == result.revision,))
            self._record = None
            return None
        (entry,) = result.results
        if entry is None or isinstance(entry, int) or (known is not None and entry.mod_revision == known.revision):
            self._record = None  # the record itself has gone: nothing to take back
            return None
        return Round.unpack(entry.value, revision=entry.mod_revision)

    def _take_part(self, link: Link, me: Me, assignment: Assignment) -> RendezvousInfo:
        """Become a member of the round that holds us."""
        round = assignment.round
        fence = (
            when.mod_revision(self._keys.round) == round.revision,
            when.mod_revision(self._keys.node(self._node_id)) == me.arrival,
        )
        membership = Membership(round=round, rank=assignment.rank, arrival=me.arrival)
        shared = SharedStore(
            link.store,
            prefix=self._keys.shared(round.number, round.term),
            fence=fence,
            lease=round.lease,
            superseded=lambda: membership.over,
        )
        membership.on_over.append(shared.supersede)
        self._membership = membership
        self._known_round = max(self._known_round, round.number)
        log.info(
            "run %s, round %d: node %s has rank %d of %d",
            self.run_id,
            round.number,
            self._node_id,
            assignment.rank,
            round.size,
        )

        async def read_roster() -> list[Participant]:
            prefix = self._keys.roster(round.number, round.term)
            try:
                entries = await link.store.list(prefix)
            except StoreError as error:
                raise self._connection_error(error) from error
            roster = [one for entry in entries for one in unpack_roster(entry.value)]
            if len(roster) != round.size:
                raise RoundSupersededError(
                    f"round {round.number} of run {self.run_id} has been replaced by a later one, its roster with it; "
                    f"call next_rendezvous"
                )
            return sorted(roster, key=lambda participant: participant.rank)

        return RendezvousInfo(
            run_id=self.run_id,
            round=round.number,
            node_id=self._node_id,
            rank=assignment.rank,
            world_size=round.size,
            store=shared,
            bootstrap_address=(round.host, round.port),
            _membership=membership,
            _read_roster=read_roster,
        )

    def _wait_for(self, reason: str) -> None:
        words = reason.partition(" s left")[2] or reason
        if words != (self._reason.partition(" s left")[2] or self._reason):
            log.info("run %s, node %s: %s", self.run_id, self._node_id, reason)
        self._reason = reason

    def _timeout(self) -> RendezvousTimeoutError:
        problem = "" if self._in_reach() else "; the store is out of reach"
        return RendezvousTimeoutError(
            f"run {self.run_id}, node {self._node_id}: no round within join_timeout={self._settings.join_timeout:g} s "
            f"at {self._settings.endpoint.url}: {self._reason}{problem}"
        )

    def _in_reach(self) -> bool:
        return self._link is not None and bool(getattr(self._link.store, "connected", True))

    def _refuse_if_closed(self, link: Link, me: Me) -> None:
        head = link.follower.head
        if head.closed is not None and not (head.round and head.round.revision > me.arrival > 0):
            raise self._closed_error(head.closed, spare=False)

    def _banned_error(self, ban: Ban) -> RendezvousRefusedError:
        return RendezvousRefusedError(f"run {self.run_id}: node {self._node_id} is {ban}")

    def _closed_error(self, closed: Closed, *, spare: bool) -> RendezvousError:
        reason = f": {closed.reason}" if closed.reason else ""
        by = f" by {closed.by}" if closed.by else ""
        message = f"run {self.run_id} is closed{by}{reason}"
        if spare:
            return RendezvousGracefulExitError(
                f"{message}; node {self._node_id} was a spare and is not needed any more"
            )
        return RendezvousClosedError(message, reason=closed.reason)

    # ------------------------------------------------------------------------------------------ leaving

    async def leave(self) -> None:
        """Leave this round; the node may come again. Without a round it does nothing.

        Raises:
            RendezvousStateError: A call of `next_rendezvous` is under way; cancel that instead.
        """
        self._check_usable()
        if self._joining:
            raise RendezvousStateError(f"node {self._node_id} is joining run {self.run_id}; cancel that call instead")
        await self._withdraw()
        if self._link is not None:
            await self._link.step_down()

    async def _withdraw(self) -> None:
        """Take the record back, saying that it was on our own account; within a short time, or let it lapse."""
        link, record, arriving = self._link, self._record, self._arriving
        self._record, self._arriving = None, False
        self._end_membership("this node has left it")
        if link is None:
            return
        if arriving and link.lease is not None:
            lease, link.lease = link.lease, None
            await lease.release()  # whatever was written is on it, and goes with it
            return
        if record is None or link.lease is None:
            return
        key = self._keys.node(self._node_id)
        with anyio.move_on_after(WITHDRAW_WITHIN, shield=True), contextlib.suppress(StoreError):
            # It stays on its lease: should we die before we delete it, it still goes.
            result = await link.store.transact(
                when=(when.mod_revision(key) == record.arrival,),
                then=(Put(key, replace(record, left=True).pack(), lease=link.lease.id),),
            )
            if result.succeeded:
                await link.store.delete(key, when=(when.mod_revision(key) == result.revision,))
            await self._see_departure_reported(link)
            return
        if link.lease is not None:  # the record still stands, and must not be kept alive
            lease, link.lease = link.lease, None
            await lease.release()

    async def _see_departure_reported(self, link: Link) -> None:
        """If we coordinate, wait until our own departure has been reported: a successor would take it for a loss."""
        membership, reported = self._membership, Wakeup()
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

    def _end_membership(self, reason: str, *, dropped: bool = False) -> None:
        """This node is no longer in its round: it went on, it left, or it was dropped without being asked."""
        membership = self._membership
        if membership is None or membership.over is not None:
            return
        membership.over, membership.dropped = reason, dropped
        membership.tell(reason)
        if dropped:
            log.warning(
                "run %s, round %d: node %s was dropped: %s", self.run_id, membership.round.number, self._node_id, reason
            )
        self._listeners.changed()

    async def _notice_being_dropped(self, link: Link) -> None:
        """Compare the head with our membership whenever it changes."""
        wakeup = Wakeup()
        with link.follower.listeners.listening(wakeup):
            while True:
                await wakeup.sleep_until(None)
                membership = self._membership
                if membership is None or membership.over is not None:
                    continue
                round = link.follower.head.round
                ban = link.follower.head.bans.get(self._node_id)
                if ban is not None and ban.now:
                    self._record = None  # whoever banned it has deleted it
                    self._end_membership(f"this node is {ban}", dropped=True)
                    await link.step_down()  # who was put out decides nothing for those who are in
                elif link.follower.error is not None:
                    self._end_membership(f"the store is lost: {link.follower.error}", dropped=True)
                elif round is not None and round.revision > membership.round.revision:
                    self._end_membership(f"round {round.number} was completed without this node", dropped=True)

    # ------------------------------------------------------------------------------------------ what is known

    async def num_nodes_waiting(self) -> int:
        """How many arrivals a regroup now would admit, as far as the coordinator has told; no round trip."""
        link = await self._connect()
        progress = link.follower.head.progress
        membership = self._membership
        if progress is None or (membership is not None and progress.round != membership.round.number):
            return 0
        return progress.waiting

    def num_nodes_changed(self, *, on_loss: bool = True) -> int:
        """How many nodes wait to come in, or have gone: above 0, this member should meet the others again.

        Answered from what was pushed, at once and from any thread: for a loop that asks many times a second.

        Args:
            on_loss: Whether to count members that have died or left since the round completed, and this node itself
                if it was dropped; else only arrivals that a regroup now would admit.

        Returns:
            0 if this node is in no round, and once the run is closed: then there is nothing to meet again for.
        """
        link, membership = self._link, self._membership
        if membership is None or (link is not None and link.follower.head.closed is not None):
            return 0
        if membership.over is not None or link is None or link.follower.error is not None:
            gone = membership.dropped or (link is not None and link.follower.error is not None)
            return int(gone and on_loss)
        progress = link.follower.head.progress
        if progress is None or progress.round != membership.round.number:
            return 0
        return progress.waiting + (progress.lost + progress.departed if on_loss else 0)

    async def is_closed(self) -> bool:
        """Whether the run is closed.

        Raises:
            RendezvousConnectionError: The store is out of reach, so nobody knows.
        """
        link = await self._connect()
        if link.follower.head.closed is not None:
            return True
        if not self._in_reach():
            raise self._connection_error(
                ConnectionLost(
                    f"whether the run is closed is not known: {self._settings.endpoint.url} is out of reach",
                    maybe_applied=False,
                )
            )
        return False

    async def set_closed(self, reason: str = "") -> None:
        """Close the run for every node, for good; the first reason given is the one that is shown."""
        closed = Closed(reason=reason, by=self._node_id)
        try:
            with anyio.fail_after(self._settings.close_timeout):
                link = await self._connect()
                lease = await link.store.grant(self._settings.closed_ttl)
                result = await link.store.compare_and_set(
                    self._keys.closed, closed.pack(), expected_revision=0, lease=lease
                )
                if not result.succeeded:
                    with contextlib.suppress(StoreError):  # it lapses some day; the run is closed
                        await lease.revoke()
                # Whoever has closed the run finds it closed, before the watch has said so.
                link.follower.take_closing(Closed.unpack(result.entry.value) if result.entry else closed)
        except (StoreError, TimeoutError) as error:
            raise self._connection_error(error) from error

    @contextlib.asynccontextmanager
    async def changes(self) -> AsyncIterator[AsyncIterator[Change]]:
        """What happens to the round, as it happens, beginning with what already holds.

        Counts are since the round completed. It goes on over rounds: after `next_rendezvous` it tells of the new one.
        """
        await self._connect()
        wakeup = Wakeup()
        with self._listeners.listening(wakeup):
            yield self._changes(wakeup)

    async def _changes(self, wakeup: Wakeup) -> AsyncIterator[Change]:
        seen: dict[type, Change] = {}
        of: Membership | None = None
        while True:
            if self._membership is not of:
                of = self._membership
                seen = {kind: change for kind, change in seen.items() if kind is Closed}
            round = of.round if of is not None and of.over is None else None
            dropped = of.over if of is not None and of.dropped else None
            head = self._link.follower.head if self._link is not None else Head()
            untold = changes_since(list(seen.values()), head, round=round, dropped=dropped)
            if untold:
                # One at a time: by the time the next is asked for, the round may be another one, and the rest no news.
                seen[type(untold[0])] = untold[0]
                yield untold[0]
            else:
                self._check_usable()
                await wakeup.sleep_until(None)

    async def statuses(self) -> AsyncGenerator[RunStatus, None]:
        """How the run stands now, and again whenever that has changed; the last one is that of the closed run."""
        await self._connect()
        wakeup = Wakeup()
        with self._listeners.listening(wakeup):
            while True:
                status = await self.status()
                yield status
                if status.closed is not None:
                    return
                await wakeup.sleep_until(None)

    async def ban(self, node_id: str, reason: str = "", *, now: bool = False) -> None:
        """Keep a node out of the next rounds, and with `now` put it out of this one; it is told why.

        A node that waits is put out at once in either case. The ban is kept with the run until it is lifted.
        """
        check_node_id(node_id)
        link = await self._connect()
        try:
            ban = Ban(reason=reason, by=self._node_id, now=now)
            await put_ban(link.store, self._keys, node_id, ban, keep=self._settings.closed_ttl)
        except StoreError as error:
            raise self._connection_error(error) from error

    async def unban(self, node_id: str) -> None:
        """Let a banned node come again."""
        check_node_id(node_id)
        link = await self._connect()
        try:
            await link.store.delete(self._keys.banned(node_id))
        except StoreError as error:
            raise self._connection_error(error) from error

    async def status(self) -> RunStatus:
        """How the run stands in the store, with the reason in words."""
        link = await self._connect()
        try:
            return await read_status(link.store, self._keys, link.follower.head)
        except StoreError as error:
            raise self._connection_error(error) from error

    async def history(self) -> list[Chapter]:
        """Return what is remembered of the run: its rounds, the oldest first; see `rdzv.core.history`."""
        link = await self._connect()
        try:
            return await read_history(link.store, self._keys)
        except StoreError as error:
            raise self._connection_error(error) from error

    @property
    def reason(self) -> str:
        """What this node waits for, in words."""
        return self._reason


async def _first_change(watch: Watch, key: str, changed: Wakeup) -> None:
    """Return, and say so, once this very key has changed: the watch also sees those that begin with it."""
    with contextlib.suppress(StoreError):
        async for event in watch:
            if event.key == key:
                break
    changed.changed()
