"""Shell: the same loop for those who block: `rdzv.sync.rounds`.

    for round in rdzv.sync.rounds(url):
        with round:
            while step < total:
                round.check(step)
                step = train(round, step)

Nothing can cancel a body that blocks. When a round has ended, the next `check` raises `RoundChanged`, every wait in
`round.store` ends with an error that names who was lost, and leaving the block swallows both. All else is as in
`rdzv.loop.rounds`, which see.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rdzv.core.round_life import Act, Ending, EndKind
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousSettingsError,
    RoundChanged,
)
from rdzv.loop.member import MemberOfRound, Options, SoFar, change_nothing
from store.calls import finished
from store.net.threads import Flag
from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from types import TracebackType
    from typing import SupportsIndex

    from rdzv.core.round import Participant
    from rdzv.membership import BlockingRendezvousInfo
    from rdzv.node.front.blocking import Handler
    from rdzv.shared_store.store import BlockingSharedStore

__all__ = ["Round", "rounds_made_by"]

log: logging.Logger = escaping(logging.getLogger(__name__))

SomeRound = TypeVar("SomeRound", bound="Round")


def rounds_made_by(make: Callable[..., SomeRound], handler: Handler, options: Options) -> Iterator[SomeRound]:
    """The rounds of a run over a handler that is connected; `make` takes what `Round` takes."""
    node = handler.node
    if node is None:
        raise RendezvousSettingsError(f"the backend of run {handler.run_id} is not one of ours, and has no rounds")
    so_far = SoFar(node, options, was_open=not handler.is_closed())
    while so_far.goes_on():
        try:
            info = handler.next_rendezvous()
        except (RendezvousGracefulExitError, RendezvousClosedError) as error:
            so_far.end(error)
            return
        if so_far.counts and (given_up := so_far.check(handler.change_tally(change_nothing))):
            handler.give_up(given_up.reason, status=given_up.status)
            raise given_up
        round = make(handler, info, so_far)
        if round.begin():
            yield round
            round.check_entered()
        so_far.left(round)
        if so_far.counts:
            with contextlib.suppress(RendezvousError):  # the store is away; the next call says so, if it stays away
                handler.change_tally(so_far.count)


class Round(MemberOfRound):
    """One round, for one of its members; made by `rdzv.sync.rounds`."""

    def __init__(self, handler: Handler, info: BlockingRendezvousInfo, so_far: SoFar) -> None:
        super().__init__(so_far)
        self.store: BlockingSharedStore = info.store
        self._handler: Handler = handler
        self._info = info

    def begin(self) -> bool:
        """Make ready what the body needs, before the loop gives the round; False if it has ended meanwhile."""
        return True

    def __enter__(self) -> Self:
        self._enter()
        self.life.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return finished(self._conclude(error))

    async def _in_node(self, work: Coroutine[Any, Any, Act]) -> Act:
        return self._handler.call(work)

    def _ended(self, ending: Ending) -> None:
        """Wake who waits in the round's store: nobody is left who would end that; from the node's thread."""
        if ending.others_have_gone:
            self.store.end_waits()

    # ------------------------------------------------------------------------------------------ for the body

    def check(self, step: SupportsIndex) -> None:
        """Begin a step, or leave the round together with all other members, before the same step.

        Args:
            step: The one that is about to begin; each time a larger one, any kind of whole number.

        Raises:
            RoundChanged: The round has ended, or ends here; leaving the block swallows it.
        """
        self._check_not_over()
        step = self._membership.beats.beat(step)
        if self.gate.passes(step):
            return
        if not self.gate.decided:
            self._until_decided()
        if self.gate.leaves(step):
            self.life.end(Ending(kind=EndKind.AGREED, reason=self.gate.why))
        self._check_not_over()

    def _check_not_over(self) -> None:
        if self.life.ending is not None:
            raise RoundChanged(f"{self!r} is over: {self.life.ending.reason}")

    def _until_decided(self) -> None:
        """Wait until the members have agreed, or the round has ended."""
        known = Flag()
        self._membership.call_once(lambda: self.gate.decided or self.life.ending, lambda _: known.set())
        known.wait()
        self._check_not_over()

    def keep(self, key: str, data: bytes) -> None:
        """Keep a little state of the run, from round to round; see the async twin."""
        self._handler.keep(key, data)

    def restore(self, key: str) -> bytes | None:
        """What any member has kept last under a name; None if nobody has."""
        return self._handler.restore(key)

    def accuse(self, rank: int, why: str) -> None:
        """Say of another member that it does not answer, as a collective that has failed does; see the async twin."""
        self._handler.accuse(rank, why)

    def participants(self) -> list[Participant]:
        """All members, by rank, with what each brought. This reads something of every member."""
        return self._info.participants()
