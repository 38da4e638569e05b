"""Shell: both parts in agreeing on a step before which all members of a round leave (`core.stopping`).

The coordinator (`Agreement`) asks when somebody wants in or out, gathers the answers of the members that are still in
the round, and writes the decision, once. The question and the decision stand in one key below the head, which every
node watches. The question and each answer say which round they are about. Each is written only while the round is still
that one, and over what this coordinator has seen in the key: a node whose watch was reset reads but the last of what
was written, so there must not be two decisions to choose from. A coordinator that takes over finds the question, and
what has been answered, and goes on from there (promise R7). Whoever has died or left is not waited for; a member that
lives answers at once, since its node (`Steps`) does so while it computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import anyio

from rdzv.core.stopping import Begun, Stop, stop_of, unanswered
from rdzv.errors import RendezvousStateError
from store import Put, when
from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.core.keys import Keys
    from rdzv.core.state import Head, Leaving
    from rdzv.core.view import View
    from rdzv.membership import Membership
    from rdzv.node.store_session import Link
    from rdzv.node.wakeup import Wakeup
    from store import Condition, Event, Store
    from store.client.keepalive import HeldLease

__all__ = ["Agreement", "Steps"]

log: logging.Logger = escaping(logging.getLogger(__name__))


class Agreement:
    """What the members of the current round are asked, and what they have answered.

    Args:
        store: Where all of it stands.
        keys: The run's keys.
        view: The coordinator's picture of its run.
        in_office: The conditions of everything that this coordinator writes.
        put: Makes a write on the run's lease.
        wakeup: Wakes the coordinator when an answer has come.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        view: View,
        *,
        in_office: tuple[Condition, ...],
        put: Callable[[str, bytes], Put],
        wakeup: Wakeup,
    ) -> None:
        self._store = store
        self._keys = keys
        self._view = view
        self._in_office = in_office
        self._put = put
        self._wakeup = wakeup
        self._answers: dict[str, int | None] = {}
        self._asked: Stop | None = None  # in this round, and not decided yet
        self._synced = False
        self._gathering: asyncio.Task[None] | None = None
        self._failed: Exception | None = None

    async def attend(self, standing: Stop | None, *, why: str, for_newcomers: bool, closing: bool) -> None:
        """Ask, or decide, if it is time to.

        Args:
            standing: What stands in the store, as far as this node has heard.
            why: Why all should leave, in words; empty if nobody wants in or out.
            for_newcomers: Whether nodes that wait to come in are the only reason.
            closing: Whether the run is closed. Who has begun no step leaves it at once: then so do all, since those who
                have begun their first would wait in it for the others.
        """
        round = self._view.round
        if round is None or not round.in_steps or not self._view.synced:
            return
        if self._failed is not None:
            raise self._failed
        seen = 0 if standing is None else standing.revision
        if standing is not None and standing.round != round.number:
            standing = None
        if standing is not None and standing.decided:
            if why and not for_newcomers and standing.for_newcomers and standing.step is None:
                # Nobody had begun a step, and nobody begins one now: those who let newcomers wait stop at once, too.
                await self._write(Stop(round=round.number, decided=True, why=why), over=seen)
            return
        if self._asked is not None and self._asked.round != round.number:
            await self._stop_gathering()
        if self._asked is None:
            if standing is None and not why:
                return
            question = standing
            if question is None:
                question = await self._write(Stop(round=round.number, why=why, for_newcomers=for_newcomers), over=seen)
            if question is None:
                return  # the watch is about to bring what stands there
            self._asked = question
            self._gathering = asyncio.create_task(self._gather(round.number), name=f"gather steps of {round.number}")
        elif why and self._asked.for_newcomers and not for_newcomers:
            self._asked = self._asked.replace(why=why, for_newcomers=False)  # a better reason has come up meanwhile
        if not self._synced:
            return
        members = [node_id for node_id in self._view.live if self._view.record(node_id).progress is not None]
        if unanswered(members, self._answers):
            return
        # Also the answer of one who has left since counts: it may have begun that step with the others.
        step, asked = stop_of(self._answers), self._asked
        if closing and (None in self._answers.values() or self._view.departed_count or self._view.lost_count):
            step = None
        decision = Stop(round=asked.round, decided=True, step=step, why=asked.why, for_newcomers=asked.for_newcomers)
        if await self._write(decision, over=asked.revision) is None:
            return
        log.info(
            "run %s, round %d: all leave %s: %s",
            self._keys.run_id,
            asked.round,
            "at once" if step is None else f"before step {step}",
            asked.why,
        )

    def stop(self) -> None:
        """Gather no more; `aclose` waits until that is so."""
        if self._gathering is not None:
            self._gathering.cancel()

    async def aclose(self) -> None:
        """Gather no more, and wait until that is so."""
        await self._stop_gathering()

    async def _write(self, stop: Stop, *, over: int) -> Stop | None:
        """Write the question or the decision; None if the round, or what stands there, is another one by now."""
        assert self._view.round is not None
        unchanged = (
            when.mod_revision(self._keys.round) == self._view.round.revision,
            when.mod_revision(self._keys.stop) == over,
        )
        result = await self._store.transact(
            when=(*self._in_office, *unchanged), then=(self._put(self._keys.stop, stop.pack()),)
        )
        return stop.replace(revision=result.revision) if result.succeeded else None

    async def _gather(self, number: int) -> None:
        """Take in what the members answer."""
        try:
            async with self._store.watch(self._keys.begun, snapshot=True) as watch:
                async for event in watch:
                    self._take(event, number)
                    self._wakeup.changed()
        except Exception as error:  # noqa: BLE001  the coordinator must not wait for answers that will never come
            self._failed = error
            self._wakeup.changed()

    def _take(self, event: Event, number: int) -> None:
        if event.kind == "synced":
            self._synced = True
        elif event.kind == "put":
            with contextlib.suppress(RendezvousStateError):  # no answer of ours
                begun = Begun.unpack(event.value)
                if begun.round == number:
                    self._answers[event.key.removeprefix(self._keys.begun)] = begun.step

    async def _stop_gathering(self) -> None:
        task, self._gathering = self._gathering, None
        self._asked, self._synced = None, False
        self._answers.clear()
        if task is not None:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])


class Steps:
    """What one node answers, and is told, of the step before which all leave.

    Args:
        keys: The run's keys.
        node_id: Which node.
        leaving: What was announced of its leaving, if it is to leave.
    """

    def __init__(self, keys: Keys, node_id: str, *, leaving: Callable[[Head], Leaving | None]) -> None:
        self._keys = keys
        self._node_id = node_id
        self._leaving = leaving
        self._answered: Membership | None = None

    async def heed(self, link: Link, membership: Membership, *, lease: HeldLease | None) -> float | None:
        """Answer the question, or take the decision; when to look again, if nothing changes before.

        Raises:
            StoreError: The answer could not be given yet.
        """
        if not membership.round.in_steps:
            return self._next_drain(link)
        head, gate = link.follower.head, membership.gate
        stop = head.stop
        if stop is not None and stop.round == membership.round.number:
            if stop.decided and (not gate.decided or (gate.for_newcomers and not stop.for_newcomers)):
                gate.decide(stop.step, why=stop.why, for_newcomers=stop.for_newcomers)
                link.follower.listeners.changed()
            elif not stop.decided and self._answered is not membership and lease is not None:
                begun = Begun(round=membership.round.number, step=gate.ask())
                # A record that has changed is no longer in the round, and its answer would be of another one.
                await link.store.transact(
                    when=(when.mod_revision(self._keys.node(self._node_id)) == membership.arrival,),
                    then=(Put(self._keys.begun_by(self._node_id), begun.pack(), lease=lease.id),),
                )
                self._answered = membership
        return self._next_drain(link)

    def _next_drain(self, link: Link) -> float | None:
        """When this node is to leave, if it is."""
        leaving = self._leaving(link.follower.head)
        return leaving.until if leaving is not None else None
