"""Shell: writes a node's record: one transaction makes an arrival, on its lease, under the run's settings.

A name that another live node holds is waited for. What the store refuses is asked for anew with what it has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rdzv._version import __version__
from rdzv.core.addresses import address_of
from rdzv.core.decision import GIVEN_UP_MOST, JoinClock, Me
from rdzv.core.state import Ban, NodeRecord
from rdzv.errors import RendezvousSettingsError
from rdzv.node.admission import agree_on_settings, is_too_long
from rdzv.node.wakeup import Wakeup
from store import Entry, Get, LeaseNotFound, LimitExceeded, Put, StoreError, when
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from rdzv.node.part.state import Part
    from rdzv.node.store_session import Link
    from store import Lease
    from store.client.keepalive import HeldLease
    from store.interface import Watch

__all__ = ["Recording"]


class Recording:
    """Writes what a node says of itself.

    Args:
        part: What the node is in its run.
    """

    def __init__(self, part: Part) -> None:
        self._part = part

    async def write(self, link: Link, clock: JoinClock, me: Me) -> Me:
        """Write this node's record: an arrival of its own, on its lease, under the run's settings."""
        part = self._part
        key = part.keys.node(part.node_id)
        banned = part.keys.banned(part.node_id)
        expected = part.arrival.revision
        while True:
            part.refuse_if_closed(link.follower.head, me)
            lease, run_lease = await self._take_leases(link)
            record = await self.new_record(link)
            if part.arrival.lease is not lease:
                # It lapsed while we waited for the run's, or for the store, which may not know that yet, and take a
                # record on it: one that nobody keeps, and whose end nobody would hear of.
                expected = part.arrival.revision
                continue
            writes = [Put(key, record.pack(), lease=lease.id)]
            if not expected:
                # Unchanged, so that nobody rewrites the settings who has looked before we came.
                writes.append(Put(part.keys.settings, part.agreed.value, lease=run_lease.id))
            part.arrival.send(record)
            sent_at = link.store.time()
            try:
                result = await link.store.transact(
                    when=(
                        when.value(part.keys.settings) == part.agreed.value,
                        when.mod_revision(key) == expected,
                        when.missing(banned),
                    ),
                    then=writes,
                    otherwise=(Get(part.keys.settings), Get(key), Get(banned)),
                )
            except LeaseNotFound:
                part.note_lapse()
                part.arrival.lapsed()  # it lapsed just now; the keeper's word of it is on its way
                link.forget_run_lease()
                expected = 0
                continue
            link.answered_in(link.store.time() - sent_at)
            if result.succeeded:
                if part.arrival.written(result.revision):
                    part.end_membership("this node has gone on to the next round")
                    return replace(me, arrival=result.revision, known_round=part.known_round)
                expected = result.revision  # its lease was given up meanwhile: nobody keeps what is on it
                continue
            part.arrival.refused()
            settings_entry, there, ban = result.results
            if isinstance(ban, Entry):
                raise part.banned_error(Ban.unpack(ban.value))
            await agree_on_settings(
                link.store,
                part.keys,
                part.agreed,
                run_lease,
                incarnation=part.incarnation,
                there=settings_entry,  # type: ignore[arg-type]  # results of Gets
            )
            expected = await self._claim_name(link, clock, there)  # type: ignore[arg-type]

    async def _take_leases(self, link: Link) -> tuple[HeldLease, Lease]:
        """This node's lease, and the run's; what is not there yet is asked for at once."""
        part = self._part
        if part.arrival.lease is not None:
            return part.arrival.lease, await link.run_lease()
        asking = asyncio.create_task(link.run_lease(), name=f"ask for the lease of run {part.keys.run_id}")
        asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())  # if both fail, one is enough
        try:
            return await self._take_lease(link), await asking
        finally:
            await cancel_and_wait(asking)

    async def _take_lease(self, link: Link) -> HeldLease:
        """A lease for this node's record, kept until it is released, or lost."""
        part = self._part
        held: HeldLease | None = None
        gone = False  # a lease may be lost before we hear that we have it: to a process that is paused just then

        def lapsed(reason: str) -> None:
            nonlocal gone
            gone = True
            if held is not None and part.arrival.lease is held:
                part.arrival.lapsed()
                part.end_membership(reason, dropped=True)
                part.listeners.changed()

        while held is None or gone:
            gone = False
            try:
                held = await link.keeper.hold(
                    ttl=part.settings.ttl,
                    disconnect_ttl=part.settings.disconnect_ttl,
                    gone_ttl=max(part.settings.gone_ttl, link.reconnects_in),
                    on_lapse=lapsed,
                )
            except LimitExceeded as error:
                if not is_too_long(error):
                    raise  # no room, or a disk that is full: that is not what this node was told to ask for
                raise RendezvousSettingsError(
                    f"ttl={part.settings.ttl:g} s is not to be had: {error}; lower ttl"
                ) from error
        part.arrival.lease = held
        return held

    async def new_record(self, link: Link) -> NodeRecord:
        """What this node says of itself, once the store has said, in this session, from where it sees it come."""
        part = self._part
        settings, store = part.settings, link.store
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
            lapsed_in=part.lapsed_in,
            progress=part.progress,
            checks=bool(settings.bootstrap_check),
            unreached=part.unreached,
            gave_up=part.given_up[:GIVEN_UP_MOST],
        )

    async def _claim_name(self, link: Link, clock: JoinClock, there: Entry | None) -> int:
        """Which record our arrival replaces, by its mod_revision; waits while another live node has our name."""
        part = self._part
        while there is not None:
            holder = NodeRecord.unpack(part.node_id, there.value, arrival=there.mod_revision)
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


async def _first_change(watch: Watch, key: str, changed: Wakeup) -> None:
    """Return, and say so, once this very key has changed: the watch also sees those that begin with it."""
    with contextlib.suppress(StoreError):
        async for event in watch:
            if event.key == key:
                break
    changed.changed()
