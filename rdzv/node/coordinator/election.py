"""The election: if a run has no coordinator, one of its nodes takes that role.

Every node whose settings the run has accepted is a candidate. The role is a key on its own lease, with a short TTL
(`link.role`). The *term* is the revision that created the coordinator's key.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.node.coordinator.term import CoordinatorTerm
from rdzv.node.link.role import ELECTION_MOST, CoordinatorLease, election_pause_max
from rdzv.node.link.stopwatch import Stopwatch
from rdzv.node.link.wakeup import Wakeup
from rdzv.node.run.run_settings import SettingsChangedError, adopt_changed_settings
from store import ConditionFailed, ConnectionLost, Get, Lease, LeaseNotFound, Put, StoreTimeoutError, when
from store.net.tasks import cancel_and_wait
from store.printable import make_logger

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from rdzv.node.link.store_session import StoreSession
    from rdzv.node.member.node_state import NodeState

log: Final = make_logger(__name__)


@dataclass(eq=False)
class Election:
    """One node's candidacy for coordinator of its run."""

    link: StoreSession
    part: NodeState
    _running: asyncio.Task[None] | None = None  # this node's election or term; None if neither runs
    _failed_with: str | None = None
    _lost_terms: int = 0  # how many of this node's terms in a row ended because the role's lease expired

    def start(self, role: CoordinatorLease | None) -> None:
        """Be a candidate from now on. If this node's arrival has taken the `role`, coordinate at once."""
        self.link.resign = self._step_down
        self.link.follower.listeners.add(self)
        if role is not None:
            self._start_task(role)
        else:
            self.notify()

    def notify(self) -> None:
        """Start an election if the run has no coordinator. Called at each change of the head."""
        if self._is_role_free and self._running is None:
            self._start_task(None)

    async def _step_down(self, within: float) -> None:
        self.link.follower.listeners.remove(self)
        if self._running is not None:
            await cancel_and_wait(self._running, within=within)

    @property
    def _is_role_free(self) -> bool:
        head = self.link.follower.head
        # A closed run needs a coordinator while it has members.
        is_wanted = head.closed is None or self.part.is_member
        return head.coordinator is None and is_wanted and self.link.follower.error is None

    def _start_task(self, role: CoordinatorLease | None) -> None:
        self._running = self.link.spawn(self._elect_or_lead(role), f"run for coordinator of {self.part.keys.run_id}")

    async def _elect_or_lead(self, role: CoordinatorLease | None) -> None:
        try:
            while role is not None or self._is_role_free:
                if role is None:
                    pause = election_pause_max(self._known_node_count, lost_terms=self._lost_terms)
                    await anyio.sleep(self.part.rng.uniform(0, pause))
                if role is not None or self.link.follower.head.coordinator is None:
                    await self._lead_or_log(role)
                role = None
        finally:
            self._running = None

    async def _lead_or_log(self, role: CoordinatorLease | None) -> None:
        """Coordinate if this node has or gets the role. After an error, stay a candidate: perhaps the only one."""
        try:
            if role is None:
                await self._take_role()
            else:
                await self._lead_with_role(role, None)
        except SettingsChangedError as error:
            self.part.fail_on_new_settings(error.settings)
            await anyio.sleep_forever()  # this node is about to leave the run, which cancels the task
        except (StoreTimeoutError, ConnectionLost, LeaseNotFound, ConditionFailed) as error:
            log.debug("run %s: the role of coordinator was lost: %s", self.part.keys.run_id, error)
        except Exception as error:  # for example, the store is full
            if repr(error) != self._failed_with:
                log.exception(
                    "run %s: node %s cannot coordinate, and tries again", self.part.keys.run_id, self.part.node_id
                )
            self._failed_with = repr(error)
        else:
            return
        await anyio.sleep(self.part.rng.uniform(0, ELECTION_MOST))

    @property
    def _known_node_count(self) -> int:
        progress = self.link.follower.head.progress
        return max(progress.joined + progress.live if progress else 1, 1)

    async def _take_role(self) -> None:
        keys, agreed = self.part.keys, self.part.agreed
        nodes = max(self._known_node_count, agreed.rules.needed)
        role = CoordinatorLease(self.link, self.part.settings, nodes=nodes, lost_terms=self._lost_terms)
        try:
            with Stopwatch(self.link.store.time) as stopwatch:
                taken = await self.link.store.transact(
                    when=(when.missing(keys.coordinator), when.value(keys.settings) == agreed.value),
                    then=(
                        Put(keys.coordinator, self.part.node_id.encode(), lease=role.lease.id),
                        *map(Get, self._keys_to_read),
                    ),
                    otherwise=(Get(keys.coordinator), Get(keys.settings)),
                    grants=(role.grant,),
                )
        except BaseException:
            await role.lease.release()  # the failed transaction may have taken the role
            raise
        self.link.note_answer_time(stopwatch.seconds)
        if taken.succeeded:
            role.term = taken.revision
            await self._lead_with_role(role, taken.results[1:])
            return
        if adopt_changed_settings(taken, agreed):
            return
        self.link.follower.note_coordinator(taken.results[0], revision=taken.revision)
        known = Wakeup()
        with self.link.follower.listeners.subscribed(known), anyio.move_on_after(ELECTION_MOST):
            while self._is_role_free:  # until the watch delivers that another node has the role
                await known.sleep_until(None)

    @property
    def _keys_to_read(self) -> tuple[str, str, str]:
        return self.part.keys.round, self.part.keys.progress, self.part.keys.history

    async def _lead_with_role(self, role: CoordinatorLease, found: Sequence[object] | None) -> None:
        """Coordinate until the role is lost. `found` has the stored round, progress and history; None if unread."""
        lost = anyio.CancelScope()

        def on_lease_lost(reason: str) -> None:
            log.info("run %s: node %s stops coordinating: %s", self.part.keys.run_id, self.part.node_id, reason)
            self._lost_terms += 1
            # Revoke the role's lease: a store that was suspended would keep it for another TTL.
            revoking = Lease(self.link.store, id=role.lease.id, ttl=role.lease.ttl).revoke()
            self.link.spawn(revoking, f"give the role of coordinator of {self.part.keys.run_id} back")
            lost.cancel()

        role.lease.keep(sent_at=role.sent_at, on_lapse=on_lease_lost, note=role.time_of_day_note)
        log.info("run %s: node %s coordinates", self.part.keys.run_id, self.part.node_id)
        try:
            with lost, contextlib.suppress(ConditionFailed):
                if found is None:
                    found = await self.link.store.get_many(self._keys_to_read)
                run_lease = await self.link.run_lease()
                term = CoordinatorTerm(self.link, role, self.part, run_lease=run_lease)
                await term.lead(*found)  # type: ignore[arg-type]
            if not lost.cancel_called:
                self._lost_terms = 0
        finally:
            with anyio.CancelScope(shield=True):
                await role.lease.release(within=self.link.release_within)


def start_candidacy(link: StoreSession, part: NodeState, role: CoordinatorLease | None) -> None:
    """Make a node a candidate for coordinator; see `Election.start`."""
    Election(link, part).start(role)
