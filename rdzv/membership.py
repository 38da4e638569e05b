"""What a member is given of a round, whether it still is a member, and what it must be told.

A `RendezvousInfo` is handed to the user and outlives its round. The `Membership` behind it says why the round is over
for this node, once it is, to whoever asks and to whoever wanted to be told.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from rdzv.core.state import Change, Draining, Dropped, Head, NodesLeft, NodesLost, NodesWaiting, Progress
from rdzv.core.stopping import Resized, StepGate
from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from rdzv.core.round import Participant, Round
    from rdzv.core.stuck.beats import Beats
    from rdzv.shared_store.store import BlockingSharedStore, SharedStore

__all__ = ["BlockingRendezvousInfo", "Membership", "Previous", "RendezvousInfo", "changes_since", "too_large"]

log: logging.Logger = escaping(logging.getLogger(__name__))

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo(tuple["SharedStore", int, int]):  # noqa: SLOT001  it cannot have any
    """What a member gets of a round; it also unpacks as `store, rank, world_size`.

    It is a tuple of these three, which alone tells type checkers what each of them is.

    Attributes:
        run_id: Which run.
        round: The round's number, from 0. It is the one count on which all members agree.
        node_id: This node.
        rank: Its place, from 0.
        world_size: How many members there are.
        store: What the members share.
        bootstrap_address: Host and port on rank 0, the same for every member; the port was free when rank 0 came.
    """

    run_id: str
    round: int
    node_id: str
    rank: int
    world_size: int
    store: SharedStore
    bootstrap_address: tuple[str, int]
    _membership: Membership = field(repr=False)
    _read_roster: Callable[[], Awaitable[list[Participant]]] = field(repr=False)

    def superseded(self) -> str | None:
        """Return why this node is no longer in the round, as far as it knows; None while it is. From any thread."""
        return self._membership.over

    def on_superseded(self, callback: Callable[[str], None]) -> None:
        """Call back once, with the reason for which this node is no longer in the round. From any thread.

        It is called in the thread in which nodes live; here, if there is a reason already. It must not take its time.
        """
        self._membership.call_when_over(callback)

    async def participants(self) -> list[Participant]:
        """Read all members, by rank, with what each brought. The cost grows with their number: call it when needed."""
        return await self._read_roster()

    def __new__(cls, *, store: SharedStore, rank: int, world_size: int, **_: object) -> Self:
        """Make the tuple; the rest is for `__init__`."""
        return super().__new__(cls, (store, rank, world_size))


@dataclass(frozen=True, kw_only=True)
class BlockingRendezvousInfo(tuple["BlockingSharedStore", int, int]):  # noqa: SLOT001  it cannot have any
    """The blocking twin of `rdzv.RendezvousInfo`; it also unpacks as `store, rank, world_size`."""

    run_id: str
    round: int
    node_id: str
    rank: int
    world_size: int
    store: BlockingSharedStore
    bootstrap_address: tuple[str, int]
    _read_roster: Callable[[], list[Participant]] = field(repr=False)

    def participants(self) -> list[Participant]:
        """Read all members, by rank, with what each brought. The cost grows with their number: call it when needed."""
        return self._read_roster()

    def __new__(cls, *, store: BlockingSharedStore, rank: int, world_size: int, **_: object) -> Self:
        """Make the tuple; the rest is for `__init__`."""
        return super().__new__(cls, (store, rank, world_size))


class Previous(NamedTuple):
    """What has changed since the round before; of many nodes, the first 16 of each kind are named.

    Attributes:
        rank: The rank that this node had.
        lost: Who has died since that round completed.
        left: Who has left.
        joined: Who is new.
    """

    rank: int
    lost: tuple[str, ...]
    left: tuple[str, ...]
    joined: tuple[str, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Membership:
    """A round this node is in, or was. It is written in the node's loop, and read from any thread."""

    round: Round  # which one
    rank: int  # this node's place in it
    arrival: int  # which arrival of this node it holds
    beats: Beats  # how far this member has come
    over: str | None = None  # why the node is not in it any more; None while it is
    over_at: float | None = None  # since when, on this node's clock
    dropped: bool = False  # the node was not asked
    # The members that have died since the round completed, as far as they are known by name.
    lost_ids: tuple[str, ...] = ()
    # What this member passes at each step, if it goes from round to round by `rounds()`.
    gate: StepGate = field(default_factory=StepGate)
    # Whom to call back, once, with the reason when it is over.
    on_over: deque[Callable[[str], None]] = field(default_factory=deque)
    # Whom to call back whenever members have died, with the names of all that have.
    on_loss: list[Callable[[tuple[str, ...]], None]] = field(default_factory=list)

    def end(self, reason: str, *, dropped: bool) -> None:
        """The node is not in it any more."""
        self.dropped = dropped
        self.over_at = self.beats.clock()
        self.over = reason
        self.tell(reason)

    def call_when_over(self, callback: Callable[[str], None]) -> None:
        """Call back once, with the reason, when it is over; from any thread, and here if it is over already."""
        self.on_over.append(callback)
        if self.over is not None:  # perhaps since a moment ago, in another thread
            self.tell(self.over)

    def lose(self, lost_ids: tuple[str, ...]) -> None:
        """These members have died since the round completed; whoever waits for them is told."""
        if lost_ids != self.lost_ids:
            self.lost_ids = lost_ids
            for callback in tuple(self.on_loss):
                _call(callback, lost_ids)

    def tell(self, reason: str) -> None:
        """Call back whoever has not been called yet; taking one out is atomic, so each is called once."""
        while self.on_over:
            with contextlib.suppress(IndexError):  # another thread has just taken the last one
                callback = self.on_over.popleft()
                _call(callback, reason)


def _call(callback: Callable[[T], None], news: T) -> None:
    """Call back a user's code, whose error is not to keep the node from what it does, or others from hearing."""
    try:
        callback(news)
    except Exception:
        log.exception("a callback of a round has failed")


def _what_is_known(progress: Progress, node_ids: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return where those of these nodes were that are known to be missing, and why they are."""
    missing = [one for one in progress.absent.missing if one.node_id in node_ids]
    addresses = {one.node_id: one.address for one in missing if one.address}
    return addresses, {one.node_id: one.why for one in missing if one.why}


def too_large(round: Round, resized: Resized | None) -> bool:
    """Return whether a round has more members than the run may have since, and its members should meet again."""
    return resized is not None and resized.revision > round.revision and round.size > resized.max_nodes


def changes_since(
    seen: Sequence[Change],
    head: Head,
    *,
    round: Round | None,
    dropped: str | None,
    node_id: str = "",
    now: float = 0.0,
) -> list[Change]:
    """Return what a member must be told that it has not been told yet.

    Args:
        seen: The last change of each kind that it was told of this round.
        head: What is known.
        round: The round this node is in; None if in none.
        dropped: Why it is not in it any more, if so.
        node_id: Who it is. Its own loss is no news of another's: it is about to learn that it was dropped.
        now: Seconds on this node's clock.
    """
    # The closing first: who hears that somebody has left should know already that there is nothing to meet again for.
    all_of_it: list[Change] = [] if head.closed is None else [head.closed]
    progress = head.progress
    if round is not None and progress is not None and progress.round == round.number:
        if progress.lost and node_id not in progress.lost_ids:
            all_of_it.append(NodesLost(progress.lost, progress.lost_ids, *_what_is_known(progress, progress.lost_ids)))
        if progress.departed:
            ids = progress.departed_ids
            all_of_it.append(NodesLeft(progress.departed, ids, *_what_is_known(progress, ids)))
        if progress.waiting or any(isinstance(change, NodesWaiting) for change in seen):
            all_of_it.append(NodesWaiting(progress.waiting))
        # Only of members: who waits, or was in an earlier round, may be drained, too, and nobody need regroup for it.
        if ids := tuple(node_id for node_id in progress.draining if node_id in head.drains):
            soonest = min((head.drains[node_id] for node_id in ids), key=lambda leaving: leaving.until)
            all_of_it.append(Draining(ids, max(soonest.until - now, 0.0), soonest.reason))
    if round is not None and head.resized is not None and head.resized.revision > round.revision:
        all_of_it.append(head.resized)
    if dropped is not None:
        all_of_it.append(Dropped(dropped))
    return [change for change in all_of_it if change not in seen]
