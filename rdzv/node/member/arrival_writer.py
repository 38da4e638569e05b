"""Writes a node's record: an arrival is one transaction, conditional on the run's settings.

An arrival also grants the record's lease, if it is new. An arrival that replaces no record also writes the settings.
Before a node's candidacy (`Election`), its arrival also takes the coordinator role if no node has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from rdzv._version import __version__
from rdzv.core.addresses import addresses_for_record
from rdzv.core.decision import GIVEN_UP_MOST, JoinClock, Joiner
from rdzv.core.state import Ban, NodeRecord, ban_names_of
from rdzv.node.link.role import CoordinatorLease
from rdzv.node.link.stopwatch import Stopwatch
from rdzv.node.link.store_session import SAY_AWAY_AFTER, StoreEndingError
from rdzv.node.link.wakeup import Wakeup
from rdzv.node.run.lease import create_run_lease_key, lease_error, lease_from_entry, run_grant
from rdzv.node.run.run_settings import agree_on_settings
from store import Create, Delete, Entry, Get, Grant, Lease, LeaseNotFound, LimitExceeded, Put, StoreError, when
from store.keeping import RELEASE_SOON, RELEASE_WITHIN, HeldLease, renew_if_old
from store.net.callers import process_serves_store
from store.net.process import host_name, loopback_id
from store.net.tasks import cancel_and_wait
from store.printable import make_logger

if TYPE_CHECKING:
    from rdzv.node.link.store_session import StoreSession
    from rdzv.node.member.node_state import NodeState
    from store import TransactionResult
    from store.messages import Operation

log: Final = make_logger(__name__)

ROUND_TRIPS_PER_TTL = 10  # round trips that a node's TTL covers, up to `TTL_MOST`: time for three slow renewals
BANS_LOOKED_FOR_MOST = 64  # bans in an arrival's conditions, at most; while waiting, the node checks all bans
LAPSES_MOST = 4  # each further lease lost in one wait doubles the next TTL, up to this many times
TTL_MOST = 30.0  # seconds, at most, of a lengthened TTL: a dead node may count as live for that long


class ArrivalWriter:
    """Writes a node's record for one call of `next_rendezvous` over one connection to a store."""

    def __init__(self, part: NodeState, link: StoreSession, clock: JoinClock) -> None:
        self._part = part
        self._link = link
        self._clock = clock
        names = ban_names_of(part.node_id, part.settings.attributes)
        self._ban_keys = [part.keys.bans + name for name in names[:BANS_LOOKED_FOR_MOST]]

    async def write(self, me: Joiner) -> tuple[Joiner, CoordinatorLease | None]:
        """Write this node's record; return its arrival, and the coordinator role if this node has taken the role."""
        part, link, clock = self._part, self._link, self._clock
        expected = part.arrival.revision
        while True:
            part.raise_if_closed(link.follower.head, me)
            lease = self._ensure_node_lease()
            record = await new_record(part, link)
            if part.arrival.lease is not lease:
                # The lease expired while `new_record` waited for the store: use a new lease.
                expected = part.arrival.revision
                continue
            role = None
            if link.follower.head.coordinator is None and link.resign is None:
                role = CoordinatorLease(link, part.settings, nodes=part.agreed.rules.needed)
            run = None if expected else run_grant(part.keys, part.settings.closed_ttl, most=link.store.lease_ttl_max)
            try:
                result, sent_at = await self._send_record(record, lease, role, run, expected=expected)
            except LeaseNotFound:
                part.note_lapse_in_round()
                part.arrival.on_lease_lost()  # handle the expiry now, as `lease` reports it only later
                link.known_run_lease = None
                expected = 0
                continue
            except BaseException as error:
                if role is not None:  # the store may have granted the role
                    in_time = clock.seconds_left(link.store.time()) > 0
                    await role.lease.release(within=RELEASE_WITHIN if in_time else RELEASE_SOON)
                if isinstance(error, LimitExceeded):
                    part.arrival.on_write_refused()
                    raise lease_error(error, ttl=lease.ttl, closed_ttl=part.settings.closed_ttl) from error
                raise
            if not result.succeeded:
                expected = await self._wait_out_refusal(me, result, is_newcomer=not expected)
                continue
            link.has_arrived = True
            if not lease.kept:
                lease.keep(sent_at=sent_at, on_lapse=partial(part.handle_lease_loss, lease), note=part.keep_alive_note)
            if run is not None:
                granted = Lease(link.store, id=run.id or 0, ttl=run.ttl)
                link.known_run_lease = lease_from_entry(link.store, result.results[2]) or granted
            if role is not None and not self._note_role_result(role, result):
                role = None
            if part.arrival.on_written(result.revision):
                part.end_membership("this node has gone on to the next round")
                return replace(me, arrival=result.revision, known_round=part.known_round), role
            expected = result.revision  # the record was lost meanwhile, with its lease: replace the record
            if role is not None:
                await role.lease.release()

    def _warn_store_silent(self) -> None:
        part, link = self._part, self._link
        if link.store.connected and not part.arrival.revision:  # the session warns in other cases
            text = "run %s: the store has not answered for %.0f s; node %s waits for it to take its arrival"
            log.warning(text, part.keys.run_id, SAY_AWAY_AFTER, part.node_id)

    def _ensure_node_lease(self) -> HeldLease:
        part, link = self._part, self._link
        if part.arrival.lease is None:
            most = link.store.lease_ttl_max
            ttl = node_lease_ttl(part.settings.ttl, round_trip=link.round_trip, lapses=part.lapses, most=most)
            part.arrival.lease = HeldLease(link.keeping, id=link.new_lease_id(), ttl=ttl)
        return part.arrival.lease

    async def _send_record(
        self, record: NodeRecord, lease: HeldLease, role: CoordinatorLease | None, run: Grant | None, *, expected: int
    ) -> tuple[TransactionResult, float]:
        """Write a record in place of the one with the `expected` revision; 0 if the store must have none.

        `run` requests the run's lease. Return the answer, and when the record's lease was requested.
        """
        part, link, keys = self._part, self._link, self._part.keys
        own = keys.node(part.node_id)
        writes: list[Operation] = [Put(own, record.pack(), lease=lease.id)]
        grants: list[Grant] = []
        if not lease.kept:
            settings, gone_ttl = part.settings, max(part.settings.gone_ttl, link.reconnect_seconds)
            grants.append(Grant(ttl=lease.ttl, disconnect_ttl=settings.disconnect_ttl, gone_ttl=gone_ttl, id=lease.id))
        agreed = when.value(keys.settings) == part.agreed.value
        if run is not None:
            agreed = when.value_if_any(keys.settings) == part.agreed.value
            # Write the settings even if they exist: the new revision makes another node's concurrent rewrite fail.
            writes += [Put(keys.settings, part.agreed.value, lease=run.id), create_run_lease_key(keys, run)]
            grants.append(run)
        if part.node_id in link.follower.head.drains and not part.arrival.began:
            writes.append(Delete(keys.drains + part.node_id))  # the drain is of an earlier process
        if part.settings.endpoint.has_successors and link.hosts_store():
            last = 0 if part.membership is None else part.membership.round.revision
            of_run = run or link.known_run_lease  # prefer the run's lease, on which the key outlives this node
            ends = keys.hosted if process_serves_store(link.store.store_id) else keys.parents
            writes.append(Put(ends + part.node_id, b"%d" % last, lease=of_run.id if of_run else lease.id))
        if role is not None:
            writes.append(Create(keys.coordinator, part.node_id.encode(), lease=role.lease.id))
            grants.append(role.grant)
        conditions = [agreed, when.mod_revision(own) == expected, *map(when.missing, self._ban_keys)]
        if part.settings.endpoint.has_successors:
            conditions.append(when.missing(keys.moving))
        if not expected:  # an ending store admits no newcomers
            conditions.append(when.missing(keys.ending))
        part.arrival.on_send(record)
        sent_at = link.store.time()
        if role is not None:
            role.sent_at = sent_at
        saying = asyncio.get_running_loop().call_later(SAY_AWAY_AFTER, self._warn_store_silent)
        with Stopwatch(link.store.time) as stopwatch, contextlib.ExitStack() as stack:
            stack.callback(saying.cancel)
            result = await link.store.transact(
                when=conditions,
                then=writes,
                otherwise=tuple(map(Get, (keys.settings, own, keys.ending, *self._ban_keys))),
                grants=grants,
            )
        if result.succeeded and not lease.kept:
            granted = Lease(link.store, id=lease.id, ttl=lease.ttl)
            sent_at = await renew_if_old(granted, sent_at, link.store.time)
        link.note_answer_time(stopwatch.seconds)
        return result, sent_at

    def _note_role_result(self, role: CoordinatorLease, result: TransactionResult) -> bool:
        there = result.results[-1]
        if isinstance(there, Entry):
            self._link.follower.note_coordinator(there, revision=result.revision)
            return False
        role.term = result.revision
        return True

    async def _wait_out_refusal(self, me: Joiner, result: TransactionResult, *, is_newcomer: bool) -> int:
        """Wait until the cause of a refused write is gone; return the revision that the next attempt replaces."""
        part, link = self._part, self._link
        part.arrival.on_write_refused()
        part.update_membership(link)  # a later round may have left this member out while it tried to rejoin
        settings_entry, there, ending, *bans = cast("list[Entry | None]", result.results)
        for ban in bans:
            if ban is not None:
                raise part.banned_error(Ban.unpack(ban.value))
        if link.follower.head.moves or (is_newcomer and ending is not None):
            raise store_ending_error(part, link, me)
        lease = await link.run_lease()
        await agree_on_settings(
            link.store, part.keys, part.agreed, lease, incarnation=part.incarnation, there=settings_entry
        )
        while there is not None:  # wait while a live node has this node's name
            holder = NodeRecord.unpack(there.value, node_id=part.node_id, arrival=there.mod_revision)
            if holder.left or holder.incarnation == part.incarnation:
                return there.mod_revision
            part.set_wait_reason(
                f"the name {part.node_id} is held by a live node at {holder.address}; waiting for it to go"
            )
            there = await self._wait_for_changed_record(there)
        return 0

    async def _wait_for_changed_record(self, there: Entry) -> Entry | None:
        part, link, clock, changed = self._part, self._link, self._clock, Wakeup()

        async def wait_for_key_change() -> None:
            with contextlib.suppress(StoreError):
                async for event in watch:
                    if event.key == there.key:  # skip longer keys that begin with this key
                        break
            changed.notify()

        async with link.store.watch(there.key) as watch:
            entry = await link.store.get(there.key)  # the record may have changed before the watch was open
            if entry is None or entry.mod_revision != there.mod_revision:
                return entry
            noticing = asyncio.create_task(wait_for_key_change())
            try:
                with part.listeners.subscribed(changed):
                    while not noticing.done():
                        part.raise_if_closed(link.follower.head, Joiner(arrival=0))
                        if not await changed.sleep_until(clock.deadline(link.store.time())):
                            raise part.timeout_error(link)
            finally:
                await cancel_and_wait(noticing)
        return await link.store.get(there.key)


def store_ending_error(part: NodeState, link: StoreSession, me: Joiner) -> StoreEndingError:
    """Return the error after which this node looks for the next store. If the run is closed, raise an error instead."""
    part.raise_if_closed(link.follower.head, me)
    return StoreEndingError(f"the store at {link.host} is ending: the node that hosts it is done")


async def new_record(part: NodeState, link: StoreSession) -> NodeRecord:
    """Return a record of this node; first wait until the store has reported the address of this session."""
    settings, store = part.settings, link.store
    address, sends_from, store_at, server, machine = settings.address, "", "", "", ""
    if address is None:
        if settings.endpoint.scheme_info.family == "tcp":
            # Wait for the address that the store sees, as other hosts may not resolve this host's name.
            await link.wait_until_connected(within=math.inf)
        if link.store.failure is not None:
            raise link.store.failure
        address = store.observed_address or host_name()
        ends = store.socket_addresses
        if ends is not None:
            address, sends_from, store_at = addresses_for_record(address, *ends)
            server, machine = store.server, loopback_id()
    return NodeRecord(
        release=__version__,
        since=time.time(),
        node_id=part.node_id,
        incarnation=part.incarnation,
        arrived_after=part.known_round,
        address=address,
        port=part.port.reserve(),
        payload=settings.payload,
        attributes=settings.attributes,
        requested_rank=settings.requested_rank,
        sends_from=sends_from,
        store_at=store_at,
        server=server,
        machine=machine,
        lapsed_in=part.lapsed_in,
        progress=part.finished_step,
        checks=bool(settings.bootstrap_check),
        unreached=part.unreached,
        cut_off=part.cut_off,
        gave_up=part.given_up[:GIVEN_UP_MOST],
        lost_rank_of=rank_in_lost_store(part),
    )


def rank_in_lost_store(part: NodeState) -> tuple[int, int] | None:
    """If this node was in the lost store's last round, return that round's revision and this node's rank."""
    known, last = part.known, part.membership
    if not part.settings.endpoint.has_successors or known is None or last is None:
        return None
    if last.round.revision != known.lost.round_at:
        return None
    return last.round.revision, last.rank


def node_lease_ttl(asked: float, *, round_trip: float, lapses: int, most: float) -> float:
    """Return a node's lease TTL, in seconds: `asked`, or longer, up to `TTL_MOST` and the store's limit, `most`."""
    # Use a longer TTL if the store is slow, or if this node lost several leases in one wait, as busy nodes do.
    needed = max(ROUND_TRIPS_PER_TTL * round_trip, asked * 2.0 ** min(max(lapses - 1, 0), LAPSES_MOST))
    return max(asked, min(needed, TTL_MOST, most))
