"""Shell: `rdzv.torch.rounds`: the loop over a run's rounds, with a process group for each, in this process.

    for round in rdzv.torch.rounds(url, backend="gloo"):
        with round:
            step = round.sync_state(model, optimizer, step)
            while step < total:
                round.check(step)
                step = train(model, optimizer, step)

Nothing is restarted: survivors keep model and optimizer in memory. When a member is lost, the group is aborted from the
node's thread, so that a collective that hangs raises at once; leaving the block swallows that, and the next round has a
new group, under another prefix of another store. `sync_state` brings everybody to the state of the member who has
finished the most steps: survivors who lag by one, and newcomers.

A group whose making fails, because a member has gone meanwhile, is a round that has ended before its body began: the
loop goes on to the next by itself.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Self

import rdzv.sync
from rdzv.errors import RendezvousError
from rdzv.loop.blocking import rounds_of
from rdzv.loop.member import check_on_waiting, others_have_gone
from rdzv.torch.group import RoundGroup
from rdzv.torch.state import synchronize
from rdzv.torch.store import TorchStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from rdzv.core.state import Participant
    from rdzv.loop.blocking import Round
    from rdzv.loop.ending import Ending
    from rdzv.loop.member import OnWaiting
    from rdzv.membership import Previous
    from rdzv.shared_store.store import BlockingSharedStore

__all__ = ["TorchRound", "rounds"]

log: logging.Logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT: Final = timedelta(minutes=30)
"""PyTorch's own default for collectives that are not nccl's."""


def rounds(
    url: str,
    *,
    backend: str = "gloo",
    timeout: timedelta = DEFAULT_TIMEOUT,
    on_waiting: OnWaiting = "now",
    progress: Callable[[], int] | None = None,
    **overrides: Any,
) -> Iterator[TorchRound]:
    """Take part in a run, round after round, with a process group in each, until the run is closed.

    Args:
        url: As for `rdzv.connect`.
        backend: Of the process group: `gloo`, `nccl`, or whatever else PyTorch knows. See `rdzv.torch.group`.
        timeout: How long a collective may take. A loss ends it sooner.
        on_waiting: See `rdzv.rounds`.
        progress: See `rdzv.rounds`.
        overrides: As for `rdzv.connect`.

    Raises:
        GiveUp: The body has raised it.
        RunGivenUpError: A body of another member has.
        RendezvousError: The next round was not reached, and a retry would not help.
    """
    check_on_waiting(on_waiting)

    def each() -> Iterator[TorchRound]:
        with rdzv.sync.connect(url, **overrides) as handler:
            for round in rounds_of(handler, on_waiting=on_waiting, progress=progress):
                in_torch = TorchRound(round, backend=backend, timeout=timeout)
                if in_torch.begin():
                    yield in_torch

    return each()


class TorchRound:
    """One round of `rounds`, with its process group, which is the process's default one meanwhile.

    Attributes:
        group: The group. Make further ones by `new_group`, which knows of them when the round is aborted.
    """

    def __init__(self, round: Round, *, backend: str, timeout: timedelta) -> None:
        self._round = round
        self._store = TorchStore(round.store, timeout)  # PyTorch's half does not keep it alive
        self.group: RoundGroup = RoundGroup(
            self._store, rank=round.rank, world_size=round.world_size, backend=backend, timeout=timeout
        )

    def begin(self) -> bool:
        """Enter the round and make its group; False if a member has gone meanwhile: then the round is over."""
        self._round.__enter__()
        self._round.on_end(self._ended)
        try:
            self.group.make()
        except (RuntimeError, RendezvousError) as error:  # RuntimeError is what PyTorch raises, its store's errors too
            self._close()
            if not self._round.__exit__(type(error), error, error.__traceback__):
                raise
            return False
        except BaseException as error:
            self._round.__exit__(type(error), error, error.__traceback__)
            raise
        return True

    def _ended(self, ending: Ending) -> None:
        """Let no collective wait for who has gone; from the node's thread. Who leaves by agreement is in none."""
        if others_have_gone(ending):
            self.group.abort()

    def __enter__(self) -> Self:
        return self  # it was entered by the loop, which goes on by itself where a group cannot be made

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        finished = kind is None and self._round.ending is None
        if not finished:  # who has finished waits for the others, who may have collectives yet
            self._close()
        try:
            return self._round.__exit__(kind, error, trace)
        finally:
            if finished:
                self._close()

    def _close(self) -> None:
        """Leave nothing of the group behind, and nothing of its store but the word that it is over."""
        self.group.close()
        self._store.end(f"round {self.number} of run {self._round.run_id}")

    def __repr__(self) -> str:
        return repr(self._round)

    # ------------------------------------------------------------------------------------------ for the body

    @property
    def number(self) -> int:
        """The round's number, from 0."""
        return self._round.number

    @property
    def rank(self) -> int:
        """This member's place, from 0."""
        return self._round.rank

    @property
    def world_size(self) -> int:
        """How many members there are."""
        return self._round.world_size

    @property
    def store(self) -> BlockingSharedStore:
        """What the members share."""
        return self._round.store

    @property
    def previous(self) -> Previous | None:
        """What has changed since the last round this node was in; None in its first."""
        return self._round.previous

    @property
    def newest(self) -> tuple[int, int] | None:
        """Rank and last finished step of the member who has finished the most; None if nobody has finished any."""
        return self._round.newest

    @property
    def ending(self) -> Ending | None:
        """Why the round has ended for this member; None while it goes on."""
        return self._round.ending

    def check(self, step: int) -> None:
        """Begin a step, or leave the round together with all other members; see `rdzv.loop.blocking.Round.check`."""
        self._round.check(step)

    def keep(self, key: str, data: bytes) -> None:
        """Keep a little state of the run, from round to round."""
        self._round.keep(key, data)

    def restore(self, key: str) -> bytes | None:
        """What any member has kept last under a name; None if nobody has."""
        return self._round.restore(key)

    def accuse(self, rank: int, why: str) -> None:
        """Say of another member that it does not answer; see `rdzv.loop.rounds.Round.accuse`."""
        self._round.accuse(rank, why)

    def participants(self) -> list[Participant]:
        """All members, by rank, with what each brought."""
        return self._round.participants()

    def new_group(self, ranks: Sequence[int] | None = None, **options: Any) -> Any:
        """`torch.distributed.new_group`, aborted with the round."""
        return self.group.new_group(ranks, **options)

    def sync_state(self, model: Any = None, optimizer: Any = None, extra: Any = None) -> Any:
        """Bring all members to the state of the one who has finished the most steps; a collective, so all call it.

        Args:
            model: A `torch.nn.Module`; its parameters and buffers are written in place.
            optimizer: A `torch.optim.Optimizer`, or whatever has `state_dict` and `load_state_dict`.
            extra: Anything that pickles: the step, the state of a scheduler, of a generator of random numbers.

        Returns:
            The `extra` of that member.

        Raises:
            ValueError: A member's model has other tensors; raised by all, and names the first that differs.
        """
        source = self.newest[0] if self.newest is not None else 0
        return synchronize(source, rank=self.rank, model=model, optimizer=optimizer, extra=extra)
