"""Shell: a round's life for one of its members: notices what ends it, and does what follows, in the node's loop.

It serves all who drive a member through its rounds: `rounds()`, `rdzv.torch.rounds`, `rdzv run`, and the handler that
torchrun calls. These differ in what a member's work is, and in how it is ended. Whose error a failure is says
`rdzv.core.round_life`.

**What ends a round** is noticed in the node's thread the moment that the node knows. A loss, a departure elsewhere
than where all had agreed to stop, and being dropped end it at once. A closing ends it where the members agree to stop,
as all that was wished for does; at once where no step has been begun, and where it is a verdict not to go on: the
member that gave it has left in the middle of its step, and the others would wait for it in theirs. An agreement is no
news here: the member meets it at its next `check`, unless all may leave at once.

**Which member was the first** of a round to fail, or to end it, stands in one key of the round's store, which is
written once. Beside its name, a member may say how it has failed; a member that listens to that (`hear`) stops, too: it
may not notice by itself, or hang in a collective.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.core.absent import named
from rdzv.core.round_life import ASK_WITHIN, Ending, EndKind, Outcome, Phase, gave_up, news_within, own_failure
from rdzv.core.state import Closed, NodesLeft, NodesLost
from rdzv.core.stuck.accusing import SOMEBODY
from rdzv.errors import RendezvousError, RoundSupersededError
from rdzv.membership import changes_since
from rdzv.node.front import verbs
from rdzv.node.front.sharing import shared_store
from rdzv.node.link.stopwatch import STOOD_STILL
from rdzv.node.run.accusing import put_accusation
from store import StoreError
from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from rdzv.core.stopping import StepGate
    from rdzv.errors import GiveUp
    from rdzv.membership import Membership
    from rdzv.node.node import Node
    from rdzv.shared_store.store import SharedStore

__all__ = ["BLAME", "DONE", "FINISHED", "Life", "names_of"]

log: logging.Logger = escaping(logging.getLogger(__name__))

FINISHED: Final = "every member has come to the end of its body"  # why a run is closed that has done what it was for

# Keys in the round's shared store: how many members have come to the end of their work; who has ended the round first,
# and how its work has failed, if it has.
DONE: Final = "rdzv/done"
BLAME: Final = "rdzv/ended_by"

LISTENS_FOR: Final = 1e9  # seconds: for as long as the round lasts
LISTENS_AGAIN: Final = 1.0  # seconds after the store was out of reach
LOOKS_FOR_NEWS_EVERY: Final = 0.1  # seconds: that this process stood still is known to that part


class Life:
    """One member's life in one round.

    Args:
        node: The node that is a member of it.
        membership: The round.
        on_end: Called with why it has ended, in the node's thread; or where it is noticed, if it has by now. Called
            again if it had ended by an agreement, and a member goes before this one has come out.
        lets_newcomers_wait: Work that begins no step is not interrupted by nodes that wait to come in.
        finished: Why the run is closed once all members have come to the end of their work.

    Attributes:
        phase: Where the member is.
        blames_others: An error of its own work was found to be others' fault.
        all_have_finished: It was the last to come to its end.
    """

    def __init__(
        self,
        node: Node,
        membership: Membership,
        on_end: Callable[[Ending], object],
        *,
        lets_newcomers_wait: bool = False,
        finished: str = FINISHED,
    ) -> None:
        self.phase: Phase = Phase.AT_WORK
        self.blames_others: bool = False
        self.all_have_finished: bool = False
        self._endings: dict[bool, Ending] = {}  # by whether others have gone; each is set once, from any thread
        self._node = node
        self._membership = membership
        self._on_end = on_end
        self._lets_newcomers_wait = lets_newcomers_wait
        self._finished = finished
        self._awaits: anyio.CancelScope | None = None  # in the node's loop: what ends with the round

    # ------------------------------------------------------------------------------------------ what ends it

    @property
    def gate(self) -> StepGate:
        """What the member passes at each step."""
        return self._membership.gate

    @property
    def ending(self) -> Ending | None:
        """Why the round has ended for the member; None while it goes on."""
        return self._endings.get(True) or self._endings.get(False)

    @property
    def others_have_gone(self) -> bool:
        """Whether the round has ended since others have gone."""
        return True in self._endings

    @property
    def has_failed(self) -> bool:
        """Whether it has ended by a failure or a loss, and not by anything that was announced."""
        gone = (EndKind.LOST, EndKind.LEFT, EndKind.FAILED, EndKind.DROPPED)
        return self.blames_others or (self.ending is not None and self.ending.kind in gone)

    def start(self) -> None:
        """Listen from now on."""
        self._membership.listeners.add(self)
        self.changed()

    def stop(self) -> None:
        """Listen no more."""
        self._membership.listeners.remove(self)

    def changed(self) -> None:
        """Look whether it has ended; from any thread."""
        ending = None if self.others_have_gone else self._look()
        if ending is not None:
            self.end(ending)
        if self.phase is Phase.FAILED and self._others_live():
            self._wake()

    def end(self, ending: Ending) -> None:
        """It has ended; which reason counts is said in `round_life`. From any thread."""
        if self._note(ending):
            self._on_end(ending)
            if self.phase is not Phase.AT_WORK:  # it is the node's thread then, where something may be awaited
                self._wake()

    def _note(self, ending: Ending) -> bool:
        """Note why it has ended; False if that is no news."""
        is_first = self._endings.setdefault(ending.others_have_gone, ending) is ending
        return is_first and self.ending is ending

    def _wake(self) -> None:
        if self._awaits is not None:
            self._awaits.cancel()

    def _look(self) -> Ending | None:
        membership, gate = self._membership, self._membership.gate
        if membership.over is not None:
            why = f"this node was dropped: {membership.over}" if membership.dropped else membership.over
            return Ending(kind=EndKind.DROPPED, reason=why)
        head, progress, round = membership.head, membership.progress, membership.round
        at_end = self.phase is Phase.AT_END
        stops_nowhere = at_end or (gate.begun is None and gate.stop is None)  # where all may: it begins no step
        for change in changes_since([], head, round=round, dropped=None, node_id=membership.node_id):
            match change:
                case NodesLost(node_ids=ids) as lost:
                    return Ending(kind=EndKind.LOST, reason=f"lost: {names_of(lost)}", node_ids=ids)
                case NodesLeft(node_ids=ids) as left if not gate.decided or self._left_early:
                    return Ending(kind=EndKind.LEFT, reason=f"left: {names_of(left)}", node_ids=ids)
                case Closed(reason=reason, given_up=given_up) if given_up or stops_nowhere:
                    return Ending(kind=EndKind.CLOSED, reason=f"the run is closed: {reason}")
        if gate.decided and gate.stop is None and not (gate.for_newcomers and self._lets_newcomers_wait):
            # All leave at once, since no member has begun a step; or since the run is closed, and not all have: then a
            # member that has begun its first may wait in it for one that has gone.
            return Ending(kind=EndKind.AGREED if gate.begun is None else EndKind.CLOSED, reason=gate.why)
        if progress is None:
            return None
        if at_end and progress.live < round.size:
            # It comes to no step any more where all stop: either all come to their ends, and the run is closed, or the
            # others stop, and it goes on with them. Those who begin no steps (`rdzv run`) stop without agreeing on one.
            return Ending(kind=EndKind.AGREED, reason=gate.why or "others, who were not done, meet again")
        has_left = progress.live + progress.lost + progress.departed < round.size
        if self.phase is Phase.AT_WORK and has_left and round.in_steps and not gate.decided:
            # It came for the next round from the middle of a step, in which the others wait for it: it has failed, and
            # could not ask which member was first.
            return Ending(kind=EndKind.LEFT, reason="left: a member meets again, and all had not agreed to")
        return None

    def _others_live(self) -> bool:
        """Whether all other members have come for the next round: then none of them has died."""
        progress = self._membership.progress
        return progress is not None and progress.live <= 1 and not (progress.lost or progress.departed)

    @property
    def _left_early(self) -> bool:
        """Whether a member has left elsewhere than where all had agreed to stop: the others wait for it in their step.

        A member that has left where all do is no reason: a body that waits for it in a later step has gone on without
        `check`, and must hear of that.
        """
        progress = self._membership.progress
        return progress is not None and progress.left_early

    # ------------------------------------------------------------------------------------------ what follows

    async def conclude(
        self,
        failure: BaseException | str | None,
        *,
        in_node: Callable[[Coroutine[Any, Any, bool]], Awaitable[bool]],
        release: Callable[[], Awaitable[None]],
    ) -> Outcome:
        """Draw the consequence of the work's end. Whose error a failure is says `rdzv.core.round_life`.

        For callers that block, both `in_node` and `release` are over before there is anything to wait for.

        Args:
            failure: What the work has ended by: an error, or how it has failed, in words that others are to hear.
            in_node: Does something in the node's loop.
            release: Releases what others wait for. Not before this member has said that it has failed: others, which
                fail because of that, would be the first to say so.
        """
        verdict = gave_up(failure)
        if verdict is not None:
            await in_node(self._give_up(verdict))
            return Outcome.GIVE_UP
        if failure is None:
            if self.ending is None:
                await in_node(self._finish())
            return Outcome.MEET_AGAIN
        is_own = own_failure(failure)
        if is_own is None:
            return Outcome.RAISE
        if not is_own or self.others_have_gone:
            return Outcome.MEET_AGAIN
        self.phase = Phase.FAILED
        if await in_node(self._fails_first(failure)):
            await release()
            await in_node(self._await_news())
        self.blames_others = True in self._endings  # what has ended it meanwhile
        return Outcome.MEET_AGAIN if self.blames_others else Outcome.RAISE

    async def _give_up(self, verdict: GiveUp) -> bool:
        try:
            await self._node.loop.start(verbs.give_up(self._node, verdict.reason, status=verdict.status))
        except RendezvousError as error:  # the verdict stands here all the same
            self._say(f"the others are not told that the run is given up: {error}")
        return True

    async def _finish(self) -> bool:
        """Wait until all have come to their ends, and the last one closes the run, or until the round ends otherwise.

        A member that cannot reach the store goes on with the others, which cannot know that all is done.
        """
        self.phase = Phase.AT_END
        self._membership.beats.finish()  # it begins no step any more, and holds up no member that stops
        self.gate.finish()
        self.changed()
        try:
            with anyio.CancelScope() as self._awaits:
                if self.ending is None:
                    await self._count_in(1)
                    await anyio.sleep_forever()
            if self.ending is not None and self.ending.kind in (EndKind.LOST, EndKind.LEFT):
                await self._count_in(0)  # the last to be counted may have gone before it could close the run
        except (RendezvousError, StoreError) as error:
            self._say(f"this member has come to its end, and cannot say so: {error}")
        return True

    async def _count_in(self, more: int) -> None:
        """Count this member, or not, among those that have come to their ends; close the run if all have."""
        with contextlib.suppress(RoundSupersededError):
            count = await (await self._store()).add(DONE, more)
            self.all_have_finished = count == self._membership.round.size
        if self.all_have_finished:
            # Who is cancelled meanwhile leaves that to go on.
            await self._node.loop.start(verbs.set_closed(self._node, self._finished))

    async def _fails_first(self, failure: BaseException | str) -> bool:
        """Say that this member has failed; whether it was the first, and others may have news of a loss."""
        how = failure if isinstance(failure, str) else ""
        if not await self.be_first(how):
            reason = f"others have failed before, as this member has: {failure!r}"
            self._note(Ending(kind=EndKind.FAILED, reason=reason))
            return False
        if self._membership.round.size == 1:
            return False
        with contextlib.suppress(RendezvousError):  # it may hasten the news, and nothing else
            await suspect(self._node, how or repr(failure))
        return True

    async def _await_news(self) -> bool:
        """Wait until a loss would be known; whether one is."""
        settings = self._node.settings
        left = news_within(disconnect_ttl=settings.disconnect_ttl, ttl=settings.ttl, back_for=self._node.back_for)
        with anyio.CancelScope() as self._awaits:
            self.changed()
            while left > 0 and not self.others_have_gone:
                began = anyio.current_time()
                await anyio.sleep(LOOKS_FOR_NEWS_EVERY)
                took = anyio.current_time() - began
                # Without the time for which this process stood still: what came meanwhile it is about to read.
                left -= took if took < LOOKS_FOR_NEWS_EVERY + STOOD_STILL else 0.0
        return self.others_have_gone

    def _say(self, what: str) -> None:
        log.warning("run %s, round %d: %s", self._node.run_id, self._membership.round.number, what)

    async def _store(self) -> SharedStore:
        """What the members share, for the node's loop."""
        link = await self._node.connect()
        return shared_store(self._node, self._membership, link.store)

    # ------------------------------------------------------------------------------------------ who was first

    async def be_first(self, how: str = "") -> bool:
        """Say that this member ends the round, and how, if its work has failed; whether it is the first that does.

        Who cannot say so is cut off, or is in the round no more: it has that against it, not its work.
        """
        said = f"{self._node.node_id}\n{how}".encode(errors="backslashreplace")
        with anyio.move_on_after(ASK_WITHIN), contextlib.suppress(RendezvousError, StoreError):
            return await (await self._store()).compare_set(BLAME, b"", said) == said
        return False

    async def hear(self) -> None:
        """Listen until a member has ended the round; if it has failed, the round has ended here, too."""
        try:
            listening = (await self._store()).listening()
        except RendezvousError:
            return  # that store is lost, and the round with it
        self._membership.call_when_over(listening.end_calls)
        while True:
            try:
                await listening.wait([BLAME], LISTENS_FOR)
                name, _, how = (await listening.get(BLAME)).decode(errors="replace").partition("\n")
            except RoundSupersededError:
                return  # which everybody is told
            except (RendezvousError, StoreError):
                await anyio.sleep(LISTENS_AGAIN)
            else:
                if how and name != self._node.node_id:
                    self.end(Ending(kind=EndKind.FAILED, reason=f"{name}: {how}", node_ids=(name,)))
                return


def names_of(gone: NodesLost | NodesLeft) -> str:
    """Name the nodes that have gone, where they were, and why they went; count those that are not named."""
    why = {node_id: f": {reason}" for node_id, reason in gone.reasons.items()}
    names = ", ".join(named(one, gone.addresses.get(one)) + why.get(one, "") for one in gone.node_ids)
    more = gone.count - len(gone.node_ids)
    return f"{names} and {more} more" if more > 0 else names


async def suspect(node: Node, why: str) -> None:
    """Say that something in the round has failed as it does when a member has died, by whomever it was.

    If the store sees that a member's process has hung up, that member is lost at once, without `gone_ttl`. Where it
    cannot be said, the end of a lease says the same.
    """
    link, membership = await node.connect(), node.membership
    if membership is not None and membership.over is None:
        with contextlib.suppress(StoreError):
            await put_accusation(link.store, node.keys, membership, by=node.node_id, accused=SOMEBODY, why=why)
