"""Acts on a ban or drain of the node, a deletion of its record, and the question which step it has begun."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.core.stopping import LastBegun
from rdzv.node.link.wakeup import Wakeup
from rdzv.node.member.arrival import ArrivalState
from rdzv.node.member.leaving import announce_store_move
from rdzv.node.member.step_reporter import earlier_time
from store import ConditionFailed, Put, StoreError, when
from store.printable import make_logger

if TYPE_CHECKING:
    from rdzv.core.state import Ban, NodeRecord
    from rdzv.membership import Membership
    from rdzv.node.link.store_session import StoreSession
    from rdzv.node.member.node_state import NodeState

log: Final = make_logger(__name__)

LOOK_AGAIN_AFTER = 1.0  # seconds until a check that raised an error is repeated


class MembershipWatcher:
    """Reacts to the events that concern a node, while its link to a store is open."""

    def __init__(self, part: NodeState, link: StoreSession) -> None:
        self._part = part
        self._link = link
        self._follower = link.follower
        self._follower.watch_attribute_bans(part.settings.attributes)
        self._resets, self._banned_at = self._follower.resets, 0
        self._seen = self._ban_and_resets
        self._answered: Membership | None = None  # the membership in which this node last told the coordinator its step
        self._wakeup = Wakeup()

    async def run(self) -> None:
        """Check this node's state at each event that may concern the node, and when a check is due."""
        with self._part.listeners.subscribed(self):
            while True:  # check before the first event: earlier ones went unnoticed
                await self._wakeup.sleep_until(await self._check_own_state())

    def notify(self) -> None:
        """Wake the checking task if an event may concern this node."""
        concerns_all = self._ban_and_resets
        if self._part.is_member or concerns_all != self._seen:
            self._seen = concerns_all
            self._wakeup.notify()

    @property
    def _ban_and_resets(self) -> tuple[object, int]:
        return self._follower.own_ban, self._follower.resets

    async def _check_own_state(self) -> float | None:
        """Check this node's state; return when to check again if no event comes: at the latest after the node's TTL."""
        part, link, follower = self._part, self._link, self._follower
        again: float | None = anyio.current_time() + part.settings.ttl
        try:
            if follower.own_ban is not None:
                banned_at, ban = follower.own_ban
                if banned_at > max(self._banned_at, part.arrival.revision):
                    await self._handle_ban(link, ban)
                    self._banned_at = banned_at
            missed = follower.resets
            # No event reports the deletion of a waiting node's record: check it each time.
            if missed != self._resets or part.arrival.state is ArrivalState.STANDING:
                await self._end_if_record_gone(link)
                self._resets = missed
            membership = part.membership
            if membership is not None and membership.over is None:
                await self._write_begun_step(link, membership)
                again = earlier_time(again, part.own_beats.report_if_quiet(link, membership))
                again = earlier_time(again, await self._handle_drain(link, membership))
        except Exception as error:  # noqa: BLE001  after any error, look again
            level = logging.DEBUG if isinstance(error, StoreError) else logging.ERROR
            log.log(level, "node %s cannot look at its own state: %r", part.node_id, error)
            again = anyio.current_time() + LOOK_AGAIN_AFTER
        return again

    async def _write_begun_step(self, link: StoreSession, membership: Membership) -> None:
        """If the coordinator asks where to stop, write which step the member has begun, once in a round."""
        part, stop, lease = self._part, membership.head.stop, self._part.arrival.lease
        if stop is None or stop.decided or stop.round != membership.round.number or not membership.round.in_steps:
            return
        if self._answered is not membership and lease is not None:
            begun = LastBegun(round=membership.round.number, step=membership.gate.close_gate())
            # If the node's record has changed, the node has left this round, so the store rejects its answer.
            await link.store.transact(
                when=membership.fence(part.keys),
                then=(Put(part.keys.begun + part.node_id, begun.pack(), lease=lease.id),),
            )
            self._answered = membership

    async def _handle_drain(self, link: StoreSession, membership: Membership) -> float | None:
        """At a drain's deadline delete the member's record; before the deadline, return the deadline.

        Before the deadline, a node that hosts the store announces the store's move to another host. The record is not
        marked as `left`, so the others see a loss: they may be waiting for the member mid-step.
        """
        part = self._part
        leaving, record = part.announced_drain(link.follower.head), part.arrival.record
        if leaving is not None and (left := leaving.until - link.store.time()) > 0:
            await announce_store_move(part, link, after=left)
            return leaving.until
        if leaving is None or record is None or part.arrival.state is not ArrivalState.TAKEN_IN:
            return None  # if a record is being sent, the store's answer wakes this task
        if (
            await self._delete_record(link, record)
            and membership.over is None
            and part.arrival.is_recorded(record.arrival)
        ):
            reason = f": {leaving.reason}" if leaving.reason else ""
            part.note_removal(link, f"it was to leave, and its time is over{reason}")
        return None

    async def _delete_record(self, link: StoreSession, record: NodeRecord) -> bool:
        key = self._part.keys.node(self._part.node_id)
        with contextlib.suppress(ConditionFailed):
            return await link.store.delete(key, when=(when.mod_revision(key) == record.arrival,))
        return False

    async def _handle_ban(self, link: StoreSession, ban: Ban) -> None:
        """Handle a ban of this node that came after its arrival. Even a lifted ban may have deleted the record."""
        part = self._part
        if ban.now and part.arrival.state is ArrivalState.TAKEN_IN:
            record = part.arrival.record
            part.note_removal(link, f"this node is {ban}")
            if record is not None:
                await self._delete_record(link, record)  # in case the operator's deletion has failed
        else:
            await self._end_if_record_gone(link)

    async def _end_if_record_gone(self, link: StoreSession) -> None:
        """Check that this node's record is still stored: an operator may have deleted it."""
        part = self._part
        record = part.arrival.record
        if record is None or part.arrival.state not in (ArrivalState.STANDING, ArrivalState.TAKEN_IN):
            return
        entry = await link.store.get(part.keys.node(part.node_id))
        if not part.arrival.is_recorded(record.arrival) or (entry is not None and entry.mod_revision == record.arrival):
            return
        part.arrival.on_removed()
        part.end_membership("its record was deleted; it may have been banned for a while", dropped=True)
        part.listeners.notify()
