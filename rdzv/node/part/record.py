"""Shell: writes a node's record: one transaction makes an arrival, on its lease, under the run's settings.

That transaction also grants the lease. Whoever comes first writes the settings and takes the role of coordinator in it.

A name that another live node holds is waited for. What the store refuses is asked for anew with what it has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from rdzv._version import __version__
from rdzv.core.addresses import way_of
from rdzv.core.decision import GIVEN_UP_MOST, JoinClock, Me
from rdzv.core.state import Ban, NodeRecord, ban_names
from rdzv.node.admission import agree_on_settings, grant_of_run, note_of_run, refusal_of
from rdzv.node.link import StoreEndingError
from rdzv.node.part.role import RoleGrant, busy_ttl, role_ttl
from rdzv.node.part.stopwatch import Stopwatch
from rdzv.node.wakeup import Wakeup
from store import Create, Delete, Entry, Get, Grant, Lease, LeaseNotFound, LimitExceeded, Put, StoreError, when
from store.keeping import renewed_if_old
from store.net.process import loopback_id
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from rdzv.node.link import Link
    from rdzv.node.part.role import TakenRole
    from rdzv.node.part.state import Part
    from store import TransactionResult
    from store.client.keepalive import HeldLease
    from store.interface import Watch
    from store.messages import Condition, Operation

__all__ = ["Recording", "node_ttl"]

ROUND_TRIPS_PER_TTL = 10  # at least, of a node's lease: three renewals in it, each with room for a slow answer
BANS_LOOKED_FOR_MOST = 64  # conditions of an arrival, of etcd's 128; a node that waits looks for all of them
LAPSES_MOST = 4  # beyond so many in one wait a lease becomes no longer
TTL_MOST = 30.0  # seconds, unless the settings ask for more; so long a node may be taken for alive that is not


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One transaction by which a node arrives.

    Attributes:
        record: What the node says of itself.
        lease: What the record is on.
        is_newcomers: No earlier record of this node stands.
        conditions: Of the transaction.
        writes: All that it writes.
        grants: The leases that it grants.
        run: The run's among them, if this may be the first that is written of the run.
        role: The role of coordinator, if that is asked for.
    """

    record: NodeRecord
    lease: HeldLease
    is_newcomers: bool
    conditions: list[Condition]
    writes: list[Operation]
    grants: list[Grant]
    run: Grant | None
    role: RoleGrant | None


class Recording:
    """Writes what a node says of itself.

    Args:
        part: What the node is in its run.
    """

    def __init__(self, part: Part) -> None:
        self._part = part

    async def write(self, link: Link, clock: JoinClock, me: Me) -> tuple[Me, TakenRole | None]:
        """Write this node's record: an arrival of its own, on its lease, under the run's settings.

        Who comes first writes the settings with it, and takes the role of coordinator, all in one transaction: those
        who come at the same moment find both taken, and none of them has to ask again.

        Returns:
            Who arrived; and the role, if it was free and this node has it now.
        """
        part = self._part
        expected = part.arrival.revision
        while True:
            part.refuse_if_closed(link.follower.head, me)
            lease = self._lease(link)
            record = await self.new_record(link)
            if part.arrival.lease is not lease:
                # It lapsed while we waited for the store, which may not know that yet, and take a record on it: one
                # that nobody keeps, and whose end nobody would hear of.
                expected = part.arrival.revision
                continue
            attempt = self._prepare(link, record, lease, expected)
            answer = await self._send(link, attempt)
            if answer is None:
                expected = 0
                continue
            result, sent_at, role = answer
            if not result.succeeded:
                expected = await self._after_refusal(link, clock, me, attempt, result)
            else:
                if not lease.kept:
                    link.keeper.keep(lease, sent_at=sent_at, on_lapse=partial(part.lease_lost, lease), note=part.note)
                if attempt.run is not None:
                    _learn_of_run(link, attempt.run, result.results[2])
                taken = _learn_of_role(link, role, result, sent_at)
                if part.arrival.written(result.revision):
                    part.end_membership("this node has gone on to the next round")
                    return replace(me, arrival=result.revision, known_round=part.known_round), taken
                expected = result.revision  # its lease was given up meanwhile: nobody keeps what is on it
                if taken is not None:
                    await taken.lease.release()

    def _lease(self, link: Link) -> HeldLease:
        """The lease that this node's records are on; a new one, not yet granted, if it has none."""
        part = self._part
        if part.arrival.lease is None:
            ttl = node_ttl(
                part.settings.ttl,
                round_trip=link.round_trip,
                lapses=part.lapses,
                most=link.store.lease_ttl_max,
                neighbours=part.neighbours,
            )
            part.arrival.lease = link.keeper.prepare(id=link.choose_lease(), ttl=ttl)
        return part.arrival.lease

    def _prepare(self, link: Link, record: NodeRecord, lease: HeldLease, expected: int) -> _Attempt:
        """The transaction that writes a record in place of the one of this revision, or of none."""
        part = self._part
        key = part.keys.node(part.node_id)
        writes: list[Operation] = [Put(key, record.pack(), lease=lease.id)]
        grants = [] if lease.kept else [self._own_grant(link, lease)]
        agreed = when.value(part.keys.settings) == part.agreed.value
        run = None if expected else grant_of_run(part.keys, part.settings.closed_ttl, most=link.store.lease_ttl_max)
        if run is not None:
            agreed = when.value_if_any(part.keys.settings) == part.agreed.value
            # Also if it is there, so that nobody rewrites the settings who has looked before we came.
            writes += [Put(part.keys.settings, part.agreed.value, lease=run.id), note_of_run(part.keys, run)]
            grants.append(run)
        if part.node_id in link.follower.head.drains and not part.arrival.began:
            writes.append(Delete(part.keys.draining(part.node_id)))  # it was announced of an earlier process
        role = None
        if link.follower.head.coordinator is None and not link.runs_for_coordinator:
            ttl = role_ttl(link, part.agreed.rules.needed, neighbours=part.neighbours)
            role = RoleGrant(
                link, ttl=ttl, disconnect_ttl=part.settings.disconnect_ttl, gone_ttl=part.settings.gone_ttl
            )
            writes.append(Create(part.keys.coordinator, part.node_id.encode(), lease=role.lease.id))
            grants.append(role.grant)
        conditions = [agreed, when.mod_revision(key) == expected, *map(when.missing, self._ban_keys)]
        if not expected:  # a member that comes again stays with the others, for as long as the store lingers for them
            conditions.append(when.missing(part.keys.ending))
        return _Attempt(
            record=record,
            lease=lease,
            is_newcomers=not expected,
            conditions=conditions,
            writes=writes,
            grants=grants,
            run=run,
            role=role,
        )

    @property
    def _ban_keys(self) -> list[str]:
        """The bans in whose presence this node does not arrive."""
        names = ban_names(self._part.node_id, self._part.settings.attributes)
        return [self._part.keys.banned(name) for name in names[:BANS_LOOKED_FOR_MOST]]

    async def _send(self, link: Link, attempt: _Attempt) -> tuple[TransactionResult, float, RoleGrant | None] | None:
        """Send it; None if the lease has lapsed just now, and the record with it.

        Returns:
            The answer; when was sent what the leases are known by; and what was asked for as the role, if it still is.
        """
        part = self._part
        keys, role = part.keys, attempt.role
        own = keys.node(part.node_id)
        part.arrival.send(attempt.record)
        asked_at = sent_at = link.store.time()
        try:
            with Stopwatch(link.store.time) as stopwatch:
                result = await link.store.transact(
                    when=attempt.conditions,
                    then=attempt.writes,
                    otherwise=tuple(map(Get, (keys.settings, own, keys.ending, *self._ban_keys))),
                    grants=attempt.grants,
                )
            if result.succeeded and not attempt.lease.kept:
                lease = Lease(link.store, id=attempt.lease.id, ttl=attempt.lease.ttl)
                sent_at = await renewed_if_old(lease, asked_at, link.store.time)
        except LeaseNotFound:
            part.note_lapse()
            part.arrival.lapsed()  # the keeper's word of it is on its way
            link.forget_run_lease()
            return None
        except BaseException as error:
            if attempt.role is not None:  # nobody knows whether we have it
                await attempt.role.lease.release()
            if isinstance(error, LimitExceeded):
                part.arrival.refused()
                raise refusal_of(error, ttl=attempt.lease.ttl, closed_ttl=part.settings.closed_ttl) from error
            raise
        link.answered_in(stopwatch.seconds)
        if role is not None and sent_at != asked_at:  # its lease is as old, and shorter
            await role.lease.release()
            role = None
        return result, sent_at, role

    async def _after_refusal(
        self, link: Link, clock: JoinClock, me: Me, attempt: _Attempt, result: TransactionResult
    ) -> int:
        """What the next attempt is to replace, once what refused this one does not stand in its way."""
        part = self._part
        part.arrival.refused()
        part.listeners.changed()  # a member still, it may have been left out of a later round meanwhile
        settings_entry, there, ending, *bans = result.results
        for ban in bans:
            if isinstance(ban, Entry):
                raise part.banned_error(Ban.unpack(ban.value))
        if attempt.is_newcomers and isinstance(ending, Entry):
            part.refuse_if_closed(link.follower.head, me)  # to be told that is better than to look elsewhere
            raise StoreEndingError(
                f"the store at {part.settings.endpoint.url} is ending: the node that hosts it is done"
            )
        await agree_on_settings(
            link.store,
            part.keys,
            part.agreed,
            await link.run_lease(),
            incarnation=part.incarnation,
            there=settings_entry,  # type: ignore[arg-type]  # results of Gets
        )
        return await self._claim_name(link, clock, there)  # type: ignore[arg-type]

    def _own_grant(self, link: Link, lease: HeldLease) -> Grant:
        """The lease for this node's record."""
        settings = self._part.settings
        return Grant(
            ttl=lease.ttl,
            disconnect_ttl=settings.disconnect_ttl,
            gone_ttl=max(settings.gone_ttl, link.reconnects_in),
            id=lease.id,
        )

    async def new_record(self, link: Link) -> NodeRecord:
        """What this node says of itself, once the store has said, in this session, from where it sees it come."""
        part = self._part
        settings, store = part.settings, link.store
        address, sends_from, store_at, server, machine = settings.address, "", "", "", ""
        if address is None:
            if settings.endpoint.info.family == "tcp" and not link.in_reach:
                # Never a host name instead: most hosts of the world cannot resolve it.
                await link.in_reach_again(within=math.inf)
            if link.failure is not None:
                raise link.failure
            address = store.seen_as or socket.gethostname()
            if store.ends is not None:
                address, sends_from, store_at = way_of(address, *store.ends)
                server, machine = store.server, loopback_id()
        return NodeRecord(
            release=__version__,
            since=time.time(),
            node_id=part.node_id,
            incarnation=part.incarnation,
            arrived_after=part.known_round,
            address=address,
            port=part.port.hold(),
            payload=settings.payload,
            attributes=settings.attributes,
            requested_rank=settings.requested_rank,
            sends_from=sends_from,
            store_at=store_at,
            server=server,
            machine=machine,
            lapsed_in=part.lapsed_in,
            progress=part.progress,
            checks=bool(settings.bootstrap_check),
            unreached=part.unreached,
            cut_off=part.cut_off,
            gave_up=part.given_up[:GIVEN_UP_MOST],
        )

    async def _claim_name(self, link: Link, clock: JoinClock, there: Entry | None) -> int:
        """Which record our arrival replaces, by its mod_revision; waits while another live node has our name."""
        part = self._part
        while there is not None:
            holder = NodeRecord.unpack(there.value, node_id=part.node_id, arrival=there.mod_revision)
            if holder.left or holder.incarnation == part.incarnation:
                return there.mod_revision
            part.wait_for(f"the name {part.node_id} is held by a live node at {holder.address}; waiting for it to go")
            there = await self._changed_record(link, clock, there)
        return 0

    async def _changed_record(self, link: Link, clock: JoinClock, there: Entry) -> Entry | None:
        """What a record has become once it has changed: its holder may have come again, and then still has the name."""
        part = self._part
        async with link.store.watch(there.key) as watch:
            entry = await link.store.get(there.key)  # it may have changed before the watch was open
            if entry is None or entry.mod_revision != there.mod_revision:
                return entry
            changed = Wakeup()
            noticing = asyncio.create_task(_first_change(watch, there.key, changed))
            try:
                with part.listeners.listening(changed):
                    while not noticing.done():
                        part.refuse_if_closed(link.follower.head, Me(arrival=0))
                        if not await changed.sleep_until(clock.deadline(link.store.time())):
                            raise part.timeout(in_reach=link.in_reach, if_hosted=link.if_hosted)
            finally:
                await cancel_and_wait(noticing)
        return await link.store.get(there.key)


def node_ttl(asked: float, *, round_trip: float, lapses: int, most: float, neighbours: int) -> float:
    """Return for how long a node's lease is granted, in seconds.

    Where answers take seconds, a lease of a few would be over before it could be renewed. Nor can a process renew it
    that is too busy with thousands of other nodes: one lease that is lost may be an outage, and the next was asked for
    just after; more of them in one wait are that.

    Args:
        asked: What the settings ask for. It is never less, whatever the store then says of it.
        round_trip: Seconds that the store takes to answer.
        lapses: How many leases this node has lost while it waited.
        most: The longest that the store grants.
        neighbours: How many nodes live in this process.
    """
    needed = max(
        ROUND_TRIPS_PER_TTL * round_trip, busy_ttl(neighbours), asked * 2.0 ** min(max(lapses - 1, 0), LAPSES_MOST)
    )
    return max(asked, min(needed, TTL_MOST, most))


def _learn_of_run(link: Link, granted: Grant, noted: object) -> None:
    """Learn which lease is the run's: that which was noted before, or the one that was granted with our arrival."""
    if isinstance(noted, Entry) and noted.lease is not None:
        link.learn_run_lease(noted.lease, ttl=float(noted.value))
    else:
        assert granted.id is not None, "the run's lease has an id of its own"
        link.learn_run_lease(granted.id, ttl=granted.ttl)


def _learn_of_role(link: Link, asked: RoleGrant | None, result: TransactionResult, sent_at: float) -> TakenRole | None:
    """Learn whether this node has got the role it asked for, or who had it before."""
    if asked is None:
        return None
    there = result.results[-1]
    if isinstance(there, Entry):
        link.follower.take_coordinator(there, revision=result.revision)
        return None
    return asked.taken(term=result.revision, sent_at=sent_at)


async def _first_change(watch: Watch, key: str, changed: Wakeup) -> None:
    """Return, and say so, once this very key has changed: the watch also sees those that begin with it."""
    with contextlib.suppress(StoreError):
        async for event in watch:
            if event.key == key:
                break
    changed.changed()
