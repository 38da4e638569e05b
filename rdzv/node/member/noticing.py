"""Shell: what others do to a node and it has to ask the store about: a ban, a deleted record, the end of a drain.

What the head of the run says of a round is in the `Membership` already (`Membership.take`): nothing waits for this task
to hear of it. A node that was dropped says so itself, and arrives again.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import anyio

from rdzv.node.link.wakeup import Wakeup
from rdzv.node.member.arrival import State
from rdzv.node.member.own_beats import earlier
from rdzv.node.member.steps import Steps
from store import ConditionFailed, StoreError, when
from store.printable import escaping

if TYPE_CHECKING:
    from rdzv.core.state import Ban, NodeRecord
    from rdzv.membership import Membership
    from rdzv.node.link.link import Link
    from rdzv.node.member.part import Part

__all__ = ["Noticing"]

log: logging.Logger = escaping(logging.getLogger(__name__))

LOOK_AGAIN_AFTER = 1.0  # seconds after the store has not answered


class Noticing:
    """Compares what becomes known of the run with what its node believes to be, for as long as a link is open.

    A node that waits for its round looks at what concerns it then: most of what a run tells does not.
    """

    def __init__(self, part: Part, link: Link) -> None:
        self._part = part
        self._link = link
        self._follower = link.follower
        self._follower.has_attributes(part.settings.attributes)
        self._resets, self._banned_at = self._follower.resets, 0
        self._seen = self._concerns_all
        self._steps = Steps(part)
        self._wakeup = Wakeup()

    async def run(self) -> None:
        """Look whenever something has happened that may concern this node, or it is time to."""
        with self._part.listeners.listening(self):
            again: float | None = None
            self.changed()  # since the link was made
            while True:
                await self._wakeup.sleep_until(again)
                again = await self._look()

    def changed(self) -> None:
        """Something has happened; to this node, perhaps."""
        concerns_all = self._concerns_all
        if self._part.is_member or concerns_all != self._seen:
            self._seen = concerns_all
            self._wakeup.changed()

    @property
    def _concerns_all(self) -> tuple[object, int]:
        return self._follower.own_ban, self._follower.resets

    async def _look(self) -> float | None:
        """Look once; when to look again, even if nothing has changed."""
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
            if part.membership is not None and part.membership.over is None:
                await self._steps.heed(link, part.membership)
                again = part.own_beats.attend(link, part.membership)
                again = earlier(again, await self._notice_end_of_drain(link, part.membership))
        except Exception as error:  # noqa: BLE001  whatever it is, it is looked at once more
            level = logging.DEBUG if isinstance(error, StoreError) else logging.ERROR
            log.log(level, "what befalls node %s is not known: %r", part.node_id, error)
            again = anyio.current_time() + LOOK_AGAIN_AFTER
        return again

    async def _notice_end_of_drain(self, link: Link, membership: Membership) -> float | None:
        """This node was to leave by now, and is still a member: it is lost to the others, who may wait for it.

        It may be in the middle of a step. Did it say that it leaves, as it would at a step that all have agreed on,
        they would not take that for a reason to stop waiting.

        Returns:
            When it is to leave, if that is later.
        """
        part = self._part
        leaving, record = part.drained(link.follower.head), part.arrival.record
        if leaving is not None and leaving.until > link.store.time():
            return leaving.until
        if leaving is None or record is None or part.arrival.state is not State.TAKEN_IN:
            return None  # what it has sent comes first, and wakes this task
        if await self._delete(link, record) and membership.over is None and part.arrival.stands(record.arrival):
            reason = f": {leaving.reason}" if leaving.reason else ""
            part.put_out(link, f"it was to leave, and its time is over{reason}")
        return None

    async def _delete(self, link: Link, record: NodeRecord) -> bool:
        """Delete this node's record; False if it has changed meanwhile: the node is not in this round any more."""
        key = self._part.keys.node(self._part.node_id)
        with contextlib.suppress(ConditionFailed):
            return await link.store.delete(key, when=(when.mod_revision(key) == record.arrival,))
        return False

    async def _notice_ban(self, link: Link, ban: Ban) -> None:
        """This node was banned since it arrived, and may have been unbanned since: its record may have been deleted."""
        part = self._part
        if ban.now and part.arrival.state is State.TAKEN_IN:
            record = part.arrival.record
            part.put_out(link, f"this node is {ban}")
            if record is not None:
                await self._delete(link, record)  # the operator does so, too, unless it was interrupted before
        else:
            await self._see_whether_it_stands(link)

    async def _see_whether_it_stands(self, link: Link) -> None:
        """Look whether our record is still there: somebody may have deleted it while nobody told us."""
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
