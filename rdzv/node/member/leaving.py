"""Shell: a node withdraws its record: its caller gives up, its join times out, or it leaves its round.

A commit of a round after the withdrawal fails; a commit before it wins over a timeout.
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
from store.net.callers import is_served_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.core.decision import Me
    from rdzv.node.link.link import Link
    from rdzv.node.member.part import Part
    from store import Condition, TransactionResult

HAND_OVER_WITHIN = 0.5  # seconds for a coordinator to see its own departure reported ...
HAND_OVER_TRIPS = 2  # ... and round trips: a report is written, and comes back by its watch
WITHDRAW_TRIPS = 4  # more round trips to withdraw a record: two writes, and the above


async def announce_move(part: Part, link: Link, *, after: float = 0.0) -> None:
    """Announce the end of a store that this node hosts, if another host may follow: it completes no more rounds."""
    if not (part.settings.endpoint.has_successors and link.hosts_store()) or link.follower.head.moves:
        return
    ttl, membership = after + part.settings.close_timeout, part.membership
    if membership is not None and not is_served_here(link.store.store_id):
        # This node leaves with the store's own process. Like a node inside that process, it is not awaited afterwards.
        await link.store.put(part.keys.hosted + part.node_id, b"%d" % membership.round.revision, ttl=ttl)
    await link.store.put(part.keys.moving, b"", ttl=ttl)


class Leaving:
    """Withdraws a node's record from the store."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._withdrawing = asyncio.Lock()

    async def leave(self, link: Link | None, *, within: float = RELEASE_WITHIN) -> None:
        """Withdraw the record, and stop coordinating."""
        await self.withdraw(link, within=within)
        if link is not None:
            await link.step_down(within=within if link.store.connected else 0.0)

    async def withdraw(self, link: Link | None, *, within: float = RELEASE_WITHIN) -> None:
        """Withdraw the record as a voluntary departure; if that takes too long, let its lease lapse."""
        part = self._part
        async with self._withdrawing:  # a caller that gives up, and one that closes the handler, may both come
            part.end_membership("this node has left it")
            in_doubt, lease = part.arrival.in_doubt, part.arrival.lease
            part.arrival.withdraw()
            try:
                if link is None or lease is None or not (in_doubt or part.arrival.record):
                    return
                if not in_doubt and await self._take_back(link, within):
                    return
                # The record may be stored: do not renew its lease, so that it lapses.
                part.arrival.lease, link.release_within = None, RELEASE_SOON
                await lease.release(within=within if in_doubt else RELEASE_SOON)
            finally:
                if link is not None:
                    link.stop_renewing_run()
                part.arrival.gone()

    async def _take_back(self, link: Link, within: float) -> bool:
        part = self._part
        drain = link.follower.head.drains.get(part.node_id)
        drained = "" if drain is None else f"drained{f': {drain.reason}' if drain.reason else ''}"
        within += WITHDRAW_TRIPS * link.round_trip
        with anyio.move_on_after(within, shield=True), contextlib.suppress(StoreError):
            stopped = part.membership is not None and part.membership.gate.has_stopped
            arrival = part.arrival.revision
            await self._say_and_go(link, arrival, stopped=stopped, why=part.leaves_because or drained)
            await self._see_departure_reported(link, arrival)
            return True
        return False

    async def _say_and_go(
        self,
        link: Link,
        arrival: int,
        *conditions: Condition,
        otherwise: Sequence[Get] = (),
        stopped: bool = False,
        why: str = "",
    ) -> TransactionResult:
        """Write that this node leaves, if its record is still that of `arrival`, then delete the record."""
        record, lease = self._part.arrival.record, self._part.arrival.lease
        assert record is not None
        assert lease is not None
        key = self._part.keys.node(self._part.node_id)
        # The record stays on its lease, so it ends even if this node dies before the deletion.
        result = await link.store.transact(
            when=(when.mod_revision(key) == arrival, *conditions),
            then=(Put(key, record.replace(left=True, stopped=stopped, why=why).pack(), lease=lease.id),),
            otherwise=otherwise,
        )
        if result.succeeded:
            await link.store.delete(key, when=(when.mod_revision(key) == result.revision,))
        return result

    async def _see_departure_reported(self, link: Link, arrival: int) -> None:
        """If this node coordinates, wait until its departure is reported: its successor would report a loss."""
        reported = Wakeup()
        within = HAND_OVER_WITHIN + HAND_OVER_TRIPS * link.round_trip
        with link.follower.listeners.listening(reported), anyio.move_on_after(within):
            while True:
                head, node_id = link.follower.head, self._part.node_id
                ours = head.coordinator is not None and head.coordinator.node_id == node_id
                progress = head.progress
                if not ours or head.round is None or not self._is_in(head.round, arrival):
                    return
                if progress is not None and progress.round == head.round.number:
                    # A departure anywhere but at the agreed step is a loss to the others.
                    for reported_ids in (progress.departed_ids, progress.lost_ids):
                        if node_id in reported_ids or len(reported_ids) == NAMED_MOST:
                            return
                await reported.sleep_until(None)

    def _is_in(self, round: Round, arrival: int) -> bool:
        """Return True if a round has this node, also one committed while the node was giving up."""
        membership = self._part.membership
        known = membership is not None and membership.round.number == round.number
        return known or round.rank_of(arrival) is not None

    async def give_up(self, link: Link, me: Me) -> Round | None:
        """Withdraw the record; if a round has completed before, return the round, which wins over the timeout."""
        part = self._part
        if not link.store.connected:
            return None  # the outcome cannot be read in time; the record will lapse
        known = link.follower.head.round
        unchanged = when.mod_revision(part.keys.round) == (known.revision if known else 0)
        result = await self._say_and_go(link, me.arrival, unchanged, otherwise=(Get(part.keys.round),))
        if not result.succeeded:
            (entry,) = result.results
            if isinstance(entry, Entry) and (known is None or entry.mod_revision != known.revision):
                return Round.unpack(entry.value, revision=entry.mod_revision)
        part.arrival.gone()  # the record is deleted, by this call or before
        return None
