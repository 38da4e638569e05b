"""Shell: events on which a node must act: a ban, a deleted record, a drain, a question at which step to stop."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import anyio

from rdzv.core.stopping import Begun
from rdzv.node.link.wakeup import Wakeup
from rdzv.node.member.arrival import State
from rdzv.node.member.leaving import announce_move
from rdzv.node.member.own_beats import earlier
from store import ConditionFailed, Put, StoreError, when
from store.printable import escaping

if TYPE_CHECKING:
    from rdzv.core.state import Ban, NodeRecord
    from rdzv.membership import Membership
    from rdzv.node.link.link import Link
    from rdzv.node.member.part import Part

log: logging.Logger = escaping(logging.getLogger(__name__))

LOOK_AGAIN_AFTER = 1.0  # seconds after the store has not answered


class Noticing:
    """Reacts to the events that concern its node, while a link is open."""

    def __init__(self, part: Part, link: Link) -> None:
        self._part = part
        self._link = link
        self._follower = link.follower
        self._follower.has_attributes(part.settings.attributes)
        self._resets, self._banned_at = self._follower.resets, 0
        self._seen = self._concerns_all
        self._answered: Membership | None = None  # the round in which it has answered where to stop
        self._wakeup = Wakeup()

    async def run(self) -> None:
        """Check this node's state at each event that may concern it, and when a check is due."""
        with self._part.listeners.listening(self):
            again: float | None = None
            self.changed()  # an event may have come since the link was made
            while True:
                await self._wakeup.sleep_until(again)
                again = await self._look()

    def changed(self) -> None:
        """Note an event, which may concern this node."""
        concerns_all = self._concerns_all
        if self._part.is_member or concerns_all != self._seen:
            self._seen = concerns_all
            self._wakeup.changed()

    @property
    def _concerns_all(self) -> tuple[object, int]:
        return self._follower.own_ban, self._follower.resets

    async def _look(self) -> float | None:
        """Check this node's state once; return when to check again, even without an event."""
        part, link, follower = self._part, self._link, self._follower
        again: float | None = None
        try:
            banned_at, ban = follower.own_ban or (0, None)
            if ban is not None and banned_at > max(self._banned_at, part.arrival.revision):
                await self._notice_ban(link, ban)
                self._banned_at = banned_at
            missed = follower.resets
            if missed != self._resets:
                await self._see_whether_it_stands(link)
                self._resets = missed
            membership = part.membership
            if membership is not None and membership.over is None:
                await self._answer_where_to_stop(link, membership)
                again = part.own_beats.attend(link, membership)
                again = earlier(again, await self._notice_drain(link, membership))
        except Exception as error:  # noqa: BLE001  after any error, look again
            level = logging.DEBUG if isinstance(error, StoreError) else logging.ERROR
            log.log(level, "node %s cannot look at its own state: %r", part.node_id, error)
            again = anyio.current_time() + LOOK_AGAIN_AFTER
        return again

    async def _answer_where_to_stop(self, link: Link, membership: Membership) -> None:
        """If the coordinator asks, answer which step the member has begun, once in a round (`core.stopping`)."""
        part, stop, lease = self._part, membership.head.stop, self._part.arrival.lease
        if stop is None or stop.decided or stop.round != membership.round.number or not membership.round.in_steps:
            return
        if self._answered is not membership and lease is not None:
            begun = Begun(round=membership.round.number, step=membership.gate.ask())
            # If the record has changed, the node has left this round, and does not answer for it.
            await link.store.transact(
                when=membership.fence(part.keys),
                then=(Put(part.keys.begun + part.node_id, begun.pack(), lease=lease.id),),
            )
            self._answered = membership

    async def _notice_drain(self, link: Link, membership: Membership) -> float | None:
        """Delete a drained member's record at the drain's deadline; before the deadline, return it.

        Before the deadline, a node that hosts the store announces the move to another host. The record is not marked as
        `left`, so the others see a loss: the member may be in the middle of a step, in which they would wait for it.
        """
        part = self._part
        leaving, record = part.drained(link.follower.head), part.arrival.record
        if leaving is not None and (left := leaving.until - link.store.time()) > 0:
            await announce_move(part, link, after=left)
            return leaving.until
        if leaving is None or record is None or part.arrival.state is not State.TAKEN_IN:
            return None  # no record, or one is being sent: the answer wakes this task
        if await self._delete(link, record) and membership.over is None and part.arrival.stands(record.arrival):
            reason = f": {leaving.reason}" if leaving.reason else ""
            part.put_out(link, f"it was to leave, and its time is over{reason}")
        return None

    async def _delete(self, link: Link, record: NodeRecord) -> bool:
        """Delete this node's record; return False if it has changed: it is not in this round any more."""
        key = self._part.keys.node(self._part.node_id)
        with contextlib.suppress(ConditionFailed):
            return await link.store.delete(key, when=(when.mod_revision(key) == record.arrival,))
        return False

    async def _notice_ban(self, link: Link, ban: Ban) -> None:
        """Handle a ban that came after the arrival. Even if it was lifted since, the record may have been deleted."""
        part = self._part
        if ban.now and part.arrival.state is State.TAKEN_IN:
            record = part.arrival.record
            part.put_out(link, f"this node is {ban}")
            if record is not None:
                await self._delete(link, record)  # the operator deletes the record, too, unless interrupted
        else:
            await self._see_whether_it_stands(link)

    async def _see_whether_it_stands(self, link: Link) -> None:
        """Check that the record still exists: it may have been deleted without an event."""
        part = self._part
        record = part.arrival.record
        if record is None or part.arrival.state not in (State.STANDING, State.TAKEN_IN):
            return
        entry = await link.store.get(part.keys.node(part.node_id))
        if not part.arrival.stands(record.arrival) or (entry is not None and entry.mod_revision == record.arrival):
            return
        part.arrival.gone()
        part.end_membership("its record was deleted; it may have been banned for a while", dropped=True)
        part.listeners.changed()
