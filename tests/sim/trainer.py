"""A node that trains by `rounds()`: each step needs all members, and rounds change at steps.

It reports its acts to its story (`training_story.py`), which checks them.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rdzv.core.state import Draining, NodesLost
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from store.errors import LimitExceeded
from tests.sim.full_node import Node
from tests.support.runs import rounds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rdzv.loop.rounds import Round
    from tests.sim.training_story import TrainingStory

__all__ = ["OwnError", "Trainer"]


class OwnError(Exception):
    """An error raised by a body itself."""


class Trainer(Node):
    """One process that trains.

    Attributes:
        step: The next step.
        known: The last step that it has finished, as far as its `check` can tell; -1 for none.
        inside: The round whose body it is in.
        raises: True if it is to raise an error of its own in the middle of its step.
        failed_in: The last round that it has left by such an error.
        leaving_in_words: True if its drain was announced.
        stuck_until: The true time before which it begins no step.
    """

    story: TrainingStory

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.step = 0
        self.known = -1
        self.inside: Round | None = None
        self.raises = False
        self.failed_in = -1
        self.leaving_in_words = False
        self.stuck_until = 0.0
        super().__init__(*arguments, **settings)

    def leave(self, within: float = 30.0) -> None:
        """Announce that it leaves."""
        self.leaving_in_words = True
        self.ask(partial(self.handler.drain, within=within))

    def ask(self, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Make a call in its process, which may die before it begins."""

        async def see_to_it() -> None:
            # it is disconnected, or in no round any more, or the run is closed
            with contextlib.suppress(RendezvousError):
                await call()

        self.process.host.start_task(see_to_it())

    async def _live(self) -> None:
        story = self.story
        listening = self.process.host.start_task(self._hear())
        try:
            async for round in rounds_of(self.handler, on_waiting=story.on_waiting):
                story.came_in(self, round)
                async with round:
                    self.inside = round
                    await self._train_in(round)
                self.inside = None
                story.came_out(self, round)
            if self.leaving_in_words and not story.checker.closed:
                story.has_drained(self)
                return
            self.refused = RendezvousClosedError("the loop has ended")
            story.truth.require(
                story.checker.was_closed, f"{self.name}'s loop has ended, and the run is not closed (R21)"
            )
        except RendezvousClosedError as error:
            self.refused = error
            story.truth.require(
                story.checker.was_closed, f"{self.name} was refused, and the run is not closed: {error}"
            )
        except (RendezvousTimeoutError, RendezvousConnectionError) as error:
            story.gave_up(self, error)
        except (OwnError, LimitExceeded):  # the disk may be full
            story.say(f"{self.name} has failed by itself")
            self.process.host.call_later(0.5, story.start_again, self)
        finally:
            self.inside = None
            listening.cancel()

    async def _train_in(self, round: Round) -> None:
        story, begun = self.story, False
        if round.newest is not None:
            self.step = round.newest[1] + 1  # stands for `sync_state`
        if story.silent:
            await anyio.sleep_forever()
        while self.step < story.total:
            self.known, begun = self.step - 1, True
            await round.check(self.step)
            story.begun(self, round, self.step)
            await self._collective(round)
            self.step += 1
        story.begun_by.get(round.number, {}).pop(self.name, None)  # it has finished, and is asked for no step
        if begun:
            self.known = self.step - 1

    async def _collective(self, round: Round) -> None:
        """Wait until all members are at the same step, as a collective does, by way of the round's own store."""
        await asyncio.sleep(self.rng.uniform(0.02, 0.3))
        if self.raises:
            self.raises, self.failed_in = False, round.number
            raise OwnError
        if self.stuck_until > self.story.now:
            await asyncio.sleep(self.stuck_until - self.story.now)
        if self.story.alone:
            return
        key = f"step/{self.step}"
        if await round.store.add(key, 1) == round.world_size:
            await round.store.set(f"{key}/all", b"")
        await round.store.wait([f"{key}/all"], 3600.0)

    async def _hear(self) -> None:
        """Check the changes that it is told: drains are of members of its round, and losses are not its own."""
        story = self.story
        try:
            async with self.handler.changes() as changes:
                async for change in changes:
                    membership = self.node.membership
                    story.say(f"{self.name} hears {change}")
                    if membership is None or membership.over is not None:
                        continue
                    members = story.checker.rounds[membership.round.revision].ranks
                    if isinstance(change, Draining):
                        story.truth.require(
                            set(change.node_ids) <= members.keys(),
                            f"{self.name} is told {change} in round {membership.round.number} of {set(members)} (R23)",
                        )
                    if isinstance(change, NodesLost):
                        story.truth.require(
                            self.name not in change.node_ids, f"{self.name} is told of its own loss, and not dropped"
                        )
        except (RendezvousConnectionError, RendezvousStateError):
            pass  # its job ends with the same error, and reports it
