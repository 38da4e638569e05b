"""A node withdraws its record: its caller gives up, its join times out, or it leaves its round.

After a withdrawal, the store rejects rounds with the record. A node joins a round committed just before its timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import anyio

from rdzv.core.round import Round
from rdzv.core.state import NAMED_MOST
from rdzv.node.link.wakeup import Wakeup
from store import Entry, Get, Put, StoreError, when
from store.keeping import RELEASE_SOON, RELEASE_WITHIN
from store.net.callers import process_serves_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.core.decision import Joiner
    from rdzv.node.link.store_session import StoreSession
    from rdzv.node.member.node_state import NodeState
    from store import Condition, TransactionResult

HAND_OVER_WITHIN = 0.5  # seconds, plus `HAND_OVER_TRIPS`, that a departing coordinator waits for its departure's report
HAND_OVER_TRIPS = 2  # round trips added to `HAND_OVER_WITHIN`: to write the report, and to see it
WITHDRAW_TRIPS = 2 + HAND_OVER_TRIPS  # round trips of a withdrawal: two writes and the report


async def announce_store_move(part: NodeState, link: StoreSession, *, after: float = 0.0) -> None:
    """If this node hosts the store and another host may follow, announce the store's end: no more rounds complete."""
    if not (part.settings.endpoint.has_successors and link.hosts_store()) or link.follower.head.moves:
        return
    ttl, membership = after + part.settings.close_timeout, part.membership
    if membership is not None and not process_serves_store(link.store.store_id):
        # This node leaves with the store's process: record that the next store need not wait for this node.
        await link.store.put(part.keys.hosted + part.node_id, b"%d" % membership.round.revision, ttl=ttl)
    await link.store.put(part.keys.moving, b"", ttl=ttl)


class RecordRemover:
    """Withdraws a node's record from the store."""

    def __init__(self, part: NodeState) -> None:
        self._part = part
        self._withdrawing = asyncio.Lock()

    async def leave(self, link: StoreSession | None, *, within: float = RELEASE_WITHIN) -> None:
        """Withdraw the record, and stop coordinating."""
        await self.withdraw(link, within=within)
        if link is not None:
            await link.step_down(within=within if link.store.connected else 0.0)

    async def withdraw(self, link: StoreSession | None, *, within: float = RELEASE_WITHIN) -> None:
        """Delete the node's record as a voluntary departure. If that takes too long, revoke the record's lease."""
        part = self._part
        async with self._withdrawing:  # a timeout and the closing of the handler may withdraw concurrently
            part.end_membership("this node has left it")
            in_doubt, lease = part.arrival.is_in_doubt, part.arrival.lease
            part.arrival.on_withdraw()
            try:
                if link is None or lease is None or not (in_doubt or part.arrival.record):
                    return
                if not in_doubt and await self._withdraw_record(link, within):
                    return
                # The record may still be stored: revoke its lease, or at least stop renewing the lease.
                part.arrival.lease, link.release_within = None, RELEASE_SOON
                await lease.release(within=within if in_doubt else RELEASE_SOON)
            finally:
                if link is not None:
                    link.stop_renewing_run()
                part.arrival.on_removed()

    async def _withdraw_record(self, link: StoreSession, within: float) -> bool:
        part = self._part
        drain = link.follower.head.drains.get(part.node_id)
        drained = "" if drain is None else f"drained{f': {drain.reason}' if drain.reason else ''}"
        within += WITHDRAW_TRIPS * link.round_trip
        with anyio.move_on_after(within, shield=True), contextlib.suppress(StoreError):
            stopped = part.membership is not None and part.membership.gate.is_at_stop
            arrival = part.arrival.revision
            await self._mark_left_and_delete(link, arrival, stopped=stopped, why=part.leaves_because or drained)
            await self._wait_for_departure_report(link, arrival)
            return True
        return False

    async def _mark_left_and_delete(
        self,
        link: StoreSession,
        arrival: int,
        *conditions: Condition,
        otherwise: Sequence[Get] = (),
        stopped: bool = False,
        why: str = "",
    ) -> TransactionResult:
        record, lease = self._part.arrival.record, self._part.arrival.lease
        assert record is not None
        assert lease is not None
        key = self._part.keys.node(self._part.node_id)
        # Keep the record on its lease, so that it expires if this node dies before the deletion.
        result = await link.store.transact(
            when=(when.mod_revision(key) == arrival, *conditions),
            then=(Put(key, record.replace(left=True, stopped=stopped, why=why).pack(), lease=lease.id),),
            otherwise=otherwise,
        )
        if result.succeeded:
            await link.store.delete(key, when=(when.mod_revision(key) == result.revision,))
        return result

    async def _wait_for_departure_report(self, link: StoreSession, arrival: int) -> None:
        """If this node coordinates, wait until it has reported its departure: else its successor reports a loss."""
        reported = Wakeup()
        within = HAND_OVER_WITHIN + HAND_OVER_TRIPS * link.round_trip
        with link.follower.listeners.subscribed(reported), anyio.move_on_after(within):
            while True:
                head, node_id = link.follower.head, self._part.node_id
                ours = head.coordinator is not None and head.coordinator.node_id == node_id
                progress = head.progress
                if not ours or head.round is None or not self._was_member_of(head.round, arrival):
                    return
                if progress is not None and progress.round == head.round.number:
                    # The report names this node as lost if its record ended before being marked as left.
                    for reported_ids in (progress.departed_ids, progress.lost_ids):
                        if node_id in reported_ids or len(reported_ids) == NAMED_MOST:
                            return
                await reported.sleep_until(None)

    def _was_member_of(self, round: Round, arrival: int) -> bool:
        membership = self._part.membership
        known = membership is not None and membership.round.number == round.number
        return known or round.rank_of(arrival) is not None

    async def withdraw_after_timeout(self, link: StoreSession, me: Joiner) -> Round | None:
        """Delete the record after a timeout. If a newer round was committed before, return that round instead."""
        part = self._part
        if not link.store.connected:
            return None  # without a connection, let the record expire
        known = link.follower.head.round
        unchanged = when.mod_revision(part.keys.round) == (known.revision if known else 0)
        result = await self._mark_left_and_delete(link, me.arrival, unchanged, otherwise=(Get(part.keys.round),))
        if not result.succeeded:
            (entry,) = result.results
            if isinstance(entry, Entry) and (known is None or entry.mod_revision != known.revision):
                return Round.unpack(entry.value, revision=entry.mod_revision)
        part.arrival.on_removed()
        return None
