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

from typing import TYPE_CHECKING, Any, Self, TypeVar

from rdzv.core.round_life import Ending, EndKind
from rdzv.errors import RendezvousSettingsError, RoundChanged
from rdzv.loop.member import MemberOfRound, Options, RoundLoop
from store.calls import finished
from store.net.threads import Flag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import SupportsIndex

    from rdzv.core.round import Participant
    from rdzv.membership import BlockingRendezvousInfo
    from rdzv.node.blocking_handler import Handler
    from rdzv.shared_store.store import BlockingSharedStore

__all__ = ["Round", "rounds_made_by"]

SomeRound = TypeVar("SomeRound", bound="Round")


def rounds_made_by(make: Callable[..., SomeRound], handler: Handler, options: Options) -> Iterator[SomeRound]:
    """The rounds of a run over a handler that is connected; `make` takes what `Round` takes."""
    node = handler.node
    if node is None:
        raise RendezvousSettingsError(f"the backend of run {handler.run_id} is not one of ours, and has no rounds")
    loop = RoundLoop(make, handler, node, options)
    while (round := finished(loop.next())) is not None:
        yield round


class Round(MemberOfRound):
    """One round, for one of its members; made by `rdzv.sync.rounds`."""

    def __init__(self, handler: Handler, info: BlockingRendezvousInfo, loop: RoundLoop[Any]) -> None:
        super().__init__(handler, loop)
        self.store: BlockingSharedStore = info.store
        self._handler: Handler
        self._info = info

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return finished(self._conclude(error))

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
        self._handler.keep(key, data, in_round=self.number)

    def restore(self, key: str) -> bytes | None:
        """What any member has kept last under a name; None if nobody has."""
        return self._handler.restore(key)

    def accuse(self, rank: int, why: str) -> None:
        """Say of another member that it does not answer, as a collective that has failed does; see the async twin."""
        self._handler.accuse(rank, why, in_round=self.number)

    def participants(self) -> list[Participant]:
        """All members, by rank, with what each brought. This reads something of every member."""
        return self._info.participants()
