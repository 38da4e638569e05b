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

from rdzv.core.stopping import Begun, Stop, stop_of
from rdzv.errors import RendezvousStateError
from store import Put, when
from store.printable import escaping

if TYPE_CHECKING:
    from rdzv.membership import Membership
    from rdzv.node.link import Link
    from rdzv.node.office import Office
    from rdzv.node.part.state import Part

__all__ = ["Agreement", "Steps"]

log: logging.Logger = escaping(logging.getLogger(__name__))


class Agreement:
    """What the members of the current round are asked, and what they have answered."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._keys = office.keys
        self._view = office.view
        self._answers: dict[str, Begun] = {}  # the last of each node, of whichever round
        self._asked: Stop | None = None  # the last question
        self._is_asking = asyncio.Event()
        self._synced = False

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
        seen = 0 if standing is None else standing.revision
        if standing is not None and standing.round != round.number:
            standing = None
        if standing is not None and standing.decided:
            if why and not for_newcomers and standing.for_newcomers and standing.step is None:
                # Nobody had begun a step, and nobody begins one now: those who let newcomers wait stop at once, too.
                await self._write(Stop(round=round.number, decided=True, why=why), over=seen)
            return
        asked = self._asked
        if asked is None or asked.round != round.number:
            asked = standing
            if asked is None and why:
                asked = await self._write(Stop(round=round.number, why=why, for_newcomers=for_newcomers), over=seen)
            if asked is None:
                return  # there is nothing to ask; or the watch is about to bring what stands there
            self._answers = {who: begun for who, begun in self._answers.items() if begun.round == round.number}
            self._is_asking.set()
        elif why and asked.for_newcomers and not for_newcomers:
            asked = asked.replace(why=why, for_newcomers=False)  # a better reason has come up meanwhile
        self._asked = asked
        if not self._synced:
            return
        # Also the answer of one who has left since counts: it may have begun that step with the others.
        answers = {who: begun.step for who, begun in self._answers.items() if begun.round == round.number}
        members = [node_id for node_id in self._view.live if self._view.record(node_id).progress is not None]
        if any(node_id not in answers for node_id in members):  # who has gone is not waited for
            return
        step = stop_of(answers)
        if closing and (None in answers.values() or self._view.departed_count or self._view.lost_count):
            step = None
        decision = Stop(round=asked.round, decided=True, step=step, why=asked.why, for_newcomers=asked.for_newcomers)
        if await self._write(decision, over=asked.revision) is not None:
            log.info(
                "run %s, round %d: all leave %s: %s",
                self._keys.run_id,
                asked.round,
                "at once" if step is None else f"before step {step}",
                asked.why,
            )

    async def _write(self, stop: Stop, *, over: int) -> Stop | None:
        """Write the question or the decision; None if the round, or what stands there, is another one by now."""
        assert self._view.round is not None
        result = await self._office.try_to_write(
            self._office.put(self._keys.stop, stop.pack()),
            also=(
                when.mod_revision(self._keys.round) == self._view.round.revision,
                when.mod_revision(self._keys.stop) == over,
            ),
        )
        return stop.replace(revision=result.revision) if result.succeeded else None

    async def gather(self) -> None:
        """Take in what the members answer, from the first question on."""
        await self._is_asking.wait()
        async with self._office.store.watch(self._keys.begun, snapshot=True) as watch:
            async for event in watch:
                if event.kind == "synced":
                    self._synced = True
                elif event.kind == "put":
                    with contextlib.suppress(RendezvousStateError):  # no answer of ours
                        self._answers[event.key.removeprefix(self._keys.begun)] = Begun.unpack(event.value)
                self._office.wakeup.changed()


class Steps:
    """What one node answers, and is told, of the step before which all leave."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._answered: Membership | None = None

    async def heed(self, link: Link, membership: Membership) -> None:
        """Answer the question, or take the decision.

        Raises:
            StoreError: The answer could not be given yet.
        """
        part, stop, gate = self._part, link.follower.head.stop, membership.gate
        lease = part.arrival.lease
        if membership.round.in_steps and stop is not None and stop.round == membership.round.number:
            if stop.decided and (not gate.decided or (gate.for_newcomers and not stop.for_newcomers)):
                gate.decide(stop.step, why=stop.why, for_newcomers=stop.for_newcomers)
                link.follower.listeners.changed()
            elif not stop.decided and self._answered is not membership and lease is not None:
                begun = Begun(round=membership.round.number, step=gate.ask())
                # A record that has changed is no longer in the round, and its answer would be of another one.
                await link.store.transact(
                    when=(when.mod_revision(part.keys.node(part.node_id)) == membership.arrival,),
                    then=(Put(part.keys.begun + part.node_id, begun.pack(), lease=lease.id),),
                )
                self._answered = membership
