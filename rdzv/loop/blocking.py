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
import threading
from typing import TYPE_CHECKING, Protocol, Self

from rdzv.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousSettingsError,
    RoundChanged,
    RoundSupersededError,
    RunGivenUpError,
)
from rdzv.loop.ending import BLAME, DONE, Ending, EndKind, EndWatcher
from rdzv.loop.member import Consequence, MemberOfRound, Use, finished_of, judge
from rdzv.loop.rounds import FINISHED, NEWS_OF_A_LOSS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from rdzv.config.settings import Settings
    from rdzv.core.state import Participant
    from rdzv.loop.rounds import OnWaiting
    from rdzv.membership import BlockingRendezvousInfo, Membership
    from rdzv.node.node import Node
    from rdzv.shared_store.store import BlockingSharedStore

__all__ = ["Round", "rounds_of"]

log = logging.getLogger(__name__)


class BlockingHandler(Protocol):
    """What the loop needs of `rdzv.sync.Handler`, which stands above it."""

    @property
    def run_id(self) -> str: ...
    @property
    def node(self) -> Node | None: ...
    @property
    def settings(self) -> Settings: ...

    def next_rendezvous(self) -> BlockingRendezvousInfo: ...
    def is_closed(self) -> bool: ...
    def set_closed(self, reason: str = "", *, given_up: bool = False, status: int = 0) -> None: ...
    def keep(self, key: str, data: bytes) -> None: ...
    def restore(self, key: str) -> bytes | None: ...


def rounds_of(
    handler: BlockingHandler, *, on_waiting: OnWaiting = "now", progress: Callable[[], int] | None = None
) -> Iterator[Round]:
    """The rounds of a run over a handler that is connected; see `rdzv.sync.rounds`."""
    node = handler.node
    if node is None:
        raise RendezvousSettingsError(f"the backend of run {handler.run_id} is not one of ours, and has no rounds")
    was_open = not handler.is_closed()
    last: Round | None = None
    finished: int | None = None
    while not node.is_draining:
        if progress is not None and last is not None:
            finished = progress()
        node.part.progress = -1 if finished is None else finished
        try:
            info = handler.next_rendezvous()
        except RendezvousGracefulExitError:
            return
        except RendezvousClosedError as error:
            if error.given_up:
                raise RunGivenUpError(str(error), reason=error.reason) from None
            if was_open:
                return
            raise
        membership = node.membership
        assert membership is not None, "next_rendezvous has just made this node a member"
        last_rank = None if last is None else last.rank
        last = Round(handler, info, membership, last_rank=last_rank, on_waiting=on_waiting)
        yield last
        last.use.check()
        finished = finished_of(membership.gate, finished)


class Round(MemberOfRound):
    """One round, for one of its members; made by `rdzv.sync.rounds`.

    Attributes:
        store: What the members share.
        ending: Why the round has ended for this member; None while it goes on.
    """

    def __init__(
        self,
        handler: BlockingHandler,
        info: BlockingRendezvousInfo,
        membership: Membership,
        *,
        last_rank: int | None,
        on_waiting: OnWaiting,
    ) -> None:
        super().__init__(membership, run_id=handler.run_id, node_id=info.node_id, last_rank=last_rank)
        self.store: BlockingSharedStore = info.store
        self.use = Use()
        self._handler = handler
        self._info = info
        self._gate = membership.gate
        self._over = threading.Event()
        self._on_end: Callable[[Ending], None] | None = None
        node = handler.node
        assert node is not None
        self._watcher = EndWatcher(node, membership, self._ended, lets_newcomers_wait=on_waiting == "wait")

    @property
    def ending(self) -> Ending | None:
        """See the class."""
        return self._watcher.ending

    def on_end(self, callback: Callable[[Ending], None]) -> None:
        """Call back once the round has ended, in the thread in which nodes live; here, if it has."""
        self._on_end = callback
        if self._watcher.ending is not None:
            callback(self._watcher.ending)

    def __enter__(self) -> Self:
        self.use.enter()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            match judge(error, self._watcher.ending):
                case Consequence.FINISHED:
                    self._finish()
                case Consequence.GIVEN_UP:
                    self._handler.set_closed(str(error), given_up=True)
                    return False
                case Consequence.FIND_OUT:
                    if not self._others_have_gone():
                        return False
                    log.info("%r: %r, because others have gone; meeting again", self, error)
                case Consequence.RAISE:
                    return False
                case Consequence.MEET_AGAIN:
                    pass
        finally:
            self._watcher.stop()
        ending = self._watcher.ending
        log.info("%r is over: %s", self, ending.reason if ending is not None else error or "this member has finished")
        return True

    def _ended(self, ending: Ending) -> None:
        """Wake who waits; from the node's thread."""
        self._over.set()
        if self._on_end is not None:
            self._on_end(ending)

    # ------------------------------------------------------------------------------------------ for the body

    def check(self, step: int) -> None:
        """Begin a step, or leave the round together with all other members, before the same step.

        Args:
            step: The one that is about to begin; each time a larger one.

        Raises:
            RoundChanged: The round has ended, or ends here; leaving the block swallows it.
        """
        if self._watcher.ending is not None:
            raise RoundChanged(f"{self!r} is over: {self._watcher.ending.reason}")
        if self._gate.passes(step):
            return
        if not self._gate.decided:
            self._until_decided()
        if self._gate.leaves(step):
            self._watcher.end(Ending(kind=EndKind.AGREED, reason=self._gate.why))
        if self._watcher.ending is not None:
            raise RoundChanged(f"{self!r} is over: {self._watcher.ending.reason}")

    def _until_decided(self) -> None:
        """Wait until the members have agreed, or the round has ended."""
        self._gate.on_decision(self._over.set)
        try:
            self._over.wait()
        finally:
            self._gate.on_decision(None)
            self._over.clear()
            if self._watcher.ending is not None:  # perhaps while that was cleared
                self._over.set()
        if self._watcher.ending is not None:
            raise RoundChanged(f"{self!r} is over: {self._watcher.ending.reason}")

    def keep(self, key: str, data: bytes) -> None:
        """Keep a little state of the run, from round to round; see the async twin."""
        self._handler.keep(key, data)

    def restore(self, key: str) -> bytes | None:
        """What any member has kept last under a name; None if nobody has."""
        return self._handler.restore(key)

    def participants(self) -> list[Participant]:
        """All members, by rank, with what each brought. This reads something of every member."""
        return self._info.participants()

    # ------------------------------------------------------------------------------------------ at its end

    def _finish(self) -> None:
        """Wait for the others to finish; the last one closes the run."""
        self._gate.begun = None
        with contextlib.suppress(RoundSupersededError):
            if self.store.add(DONE, 1) == self.world_size:
                self._handler.set_closed(FINISHED)
            self._watcher.changed()
            self._over.wait()

    def _others_have_gone(self) -> bool:
        """Find out whether an error of the body is somebody else's; see the async twin."""
        first = False
        with contextlib.suppress(RendezvousError):
            first = self.store.compare_set(BLAME, "", self.node_id) == self.node_id.encode()
        if not first or self.world_size == 1:
            return not first
        self._over.wait(self._handler.settings.disconnect_ttl + NEWS_OF_A_LOSS)
        return self._watcher.ending is not None and self._watcher.ending.kind is not EndKind.AGREED
