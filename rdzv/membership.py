"""A member's view of its round: the round's values, whether the node is still a member, and changes to report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar

from rdzv.core.state import Change, Draining, Dropped, Head, NodesLeft, NodesLost, NodesWaiting, Progress, StoreEnding
from rdzv.core.stopping import Resized, StepGate
from rdzv.listeners import Listeners
from store import when
from store.errors import NotPicklable
from store.printable import make_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rdzv.core.keys import Keys
    from rdzv.core.round import Participant, Round
    from rdzv.core.stuck.step_log import StepLog
    from rdzv.shared_store.store import BlockingSharedStore, SharedStore
    from store.messages import Condition

log: Final = make_logger(__name__)

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _InfoBase(NotPicklable, tuple[S, int, int], Generic[S]):  # noqa: SLOT001  a subclass of tuple cannot have slots
    run_id: str
    round: int
    node_id: str
    rank: int
    world_size: int
    store: S
    bootstrap_address: tuple[str, int]
    _membership: Membership = field(repr=False)

    def __new__(cls, *, store: S, rank: int, world_size: int, **_: object) -> Self:
        return super().__new__(cls, (store, rank, world_size))

    @classmethod
    def of(cls, membership: Membership, run_id: str, **rest: Any) -> Self:
        """Return the view of a membership; `rest` has the fields that the membership lacks."""
        round = membership.round
        return cls(
            run_id=run_id,
            round=round.number,
            node_id=membership.node_id,
            rank=membership.rank,
            world_size=round.size,
            bootstrap_address=(round.host, round.port),
            _membership=membership,
            **rest,
        )

    def superseded(self) -> str | None:
        """Return why this node is no longer in the round, as far as it knows; None while it is. Thread-safe."""
        return self._membership.over

    def on_superseded(self, callback: Callable[[str], None]) -> None:
        """Call back, with the reason, as soon as this node is no longer in the round. Thread-safe.

        The callback must be quick: it runs in the node thread, or in the caller's if the reason exists already.
        """
        self._membership.call_when_over(callback)


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo(_InfoBase["SharedStore"]):
    """A member's view of a round; it also unpacks as `store, rank, world_size`.

    Attributes:
        run_id: The run's id.
        round: The round's number, from 0, the same for every member.
        node_id: This node's id.
        rank: This node's rank, from 0.
        world_size: The number of members.
        store: The round's shared store.
        bootstrap_address: Host and port on rank 0, the same for every member; the port was free when rank 0 arrived.
    """

    store: SharedStore
    _read_roster: Callable[[], Awaitable[list[Participant]]] = field(repr=False)

    async def participants(self) -> list[Participant]:
        """Read all members, by rank, with address, payload and attributes; the cost grows with their number."""
        return await self._read_roster()


@dataclass(frozen=True, kw_only=True)
class BlockingRendezvousInfo(_InfoBase["BlockingSharedStore"]):
    """The blocking twin of `rdzv.RendezvousInfo`."""

    store: BlockingSharedStore
    _read_roster: Callable[[], list[Participant]] = field(repr=False)

    def participants(self) -> list[Participant]:
        """Read all members, by rank, as the async twin does."""
        return self._read_roster()


class Previous(NamedTuple):
    """The changes between the run's previous round and this one; at most 16 nodes of each kind.

    Attributes:
        rank: The rank that this node had in its last round.
        lost: The nodes that have died since the previous round completed.
        left: The nodes that have left since then.
        joined: The new nodes.
    """

    rank: int
    lost: tuple[str, ...]
    left: tuple[str, ...]
    joined: tuple[str, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Membership:
    """A round that this node is or was in. The node's loop writes it; any thread may read it."""

    round: Round
    rank: int
    arrival: int  # the revision of this node's record in the round
    beats: StepLog
    node_id: str = ""
    store_id: str | None = None  # the id of the round's store; None for a backend without ids
    head: Head = field(default_factory=Head)  # the last head given to `update`; unchanged once the membership is over
    over: str | None = None  # why the node is no longer in the round; None while it is
    over_at: float | None = None  # when the membership ended, on this node's clock
    dropped: bool = False  # True if this node was removed or left out, or its lease or store was lost
    record_gone: bool = False  # True if the coordinator's report lists this node as lost
    expelled: bool = False  # True if the coordinator expelled this node; False if its record expired
    lost_ids: tuple[str, ...] = ()  # the known ids of members that have died since the round completed
    counting: Any = None  # the task that counts this member for `all_here`; None before
    gate: StepGate = field(default_factory=StepGate)
    listeners: Listeners = field(default_factory=Listeners)

    def update(self, head: Head, *, rejoins: bool = False) -> None:
        """Update this membership from the run's head, and then notify the listeners; never block.

        One read of the head may bring both a decision to stop and the departures that follow it. The decision is
        recorded before the listeners are notified, so that these departures count as agreed. `rejoins`: this
        node has sent a new record, so a later round is no sign that the node was dropped.
        """
        if self.over is not None:
            return
        self.head = head
        stop, gate, progress, later = head.stop, self.gate, self.coordinator_report, head.round
        why = None if progress is None else dict(progress.why_lost).get(self.node_id)
        if progress is not None and (why is not None or self.node_id in progress.lost_ids):
            self.record_gone, self.expelled = True, why is not None
            self._mark_over(why or "the others have lost it: its record is gone", dropped=True)
        elif later is not None and later.revision > self.round.revision and not rejoins:
            self._mark_over(f"round {later.number} was completed without this node", dropped=True)
        if stop is not None and stop.decided and stop.round == self.round.number and self.round.in_steps:
            gate.note_decision(stop.step, why=stop.why, for_newcomers=stop.for_newcomers)
        if progress is not None and self.over is None:  # later, the lost nodes may include this node
            self.lost_ids = progress.lost_ids
        self.listeners.notify()

    @property
    def coordinator_report(self) -> Progress | None:
        """The coordinator's last report on this round; None before the first, and once it reports on a later round."""
        progress = self.head.progress
        return progress if progress is not None and progress.round == self.round.number else None

    def fence(self, keys: Keys) -> tuple[Condition, Condition]:
        """Return the conditions that hold in the store while this node is in the round."""
        unchanged = when.mod_revision(keys.round) == self.round.revision
        return unchanged, when.mod_revision(keys.node(self.node_id)) == self.arrival

    def end(self, reason: str, *, dropped: bool) -> None:
        """End the membership, and notify the listeners."""
        self._mark_over(reason, dropped=dropped)
        self.listeners.notify()

    def _mark_over(self, reason: str, *, dropped: bool) -> None:
        self.dropped = dropped
        self.over_at = self.beats.clock()
        self.over = reason

    def call_when_over(self, callback: Callable[[str], object]) -> None:
        """Call back once, with the reason, as soon as the membership is over. Thread-safe."""
        self.notify_once(lambda: self.over, callback)

    def call_on_member_loss(self, callback: Callable[[tuple[str, ...]], object]) -> None:
        """Call back once, with the known ids, as soon as members have died."""
        self.notify_once(lambda: self.lost_ids or None, callback)

    def notify_once(self, news: Callable[[], T | None], callback: Callable[[T], object]) -> None:
        """Call back once, with the result of `news`, as soon as that is not None."""
        once = _OneTimeListener(self.listeners, news, callback)
        self.listeners.add(once)
        # Check now: `news()` may have had a result before. A Ctrl-C in this thread reaches the caller.
        once.notify(contained=(Exception, SystemExit))


@dataclass(slots=True, eq=False)
class _OneTimeListener(Generic[T]):
    """A listener that calls back once, in the thread that removes it from the listeners."""

    listeners: Listeners
    news: Callable[[], T | None]
    callback: Callable[[T], object]

    def notify(self, *, contained: tuple[type[BaseException], ...] = (BaseException,)) -> None:
        news = self.news()
        if news is not None and self.listeners.remove(self):
            try:
                self.callback(news)
            except contained:  # a user's code must not end the node thread
                log.exception("a callback of a round has failed")


def _gone_details(progress: Progress, ids: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str], dict[str, str]]:
    missing = [one for one in progress.absent.missing if one.node_id in ids]
    addresses = {one.node_id: one.address for one in missing if one.address}
    return ids, addresses, {one.node_id: one.why for one in missing if one.why}


def round_exceeds_max_nodes(round: Round, resized: Resized | None) -> bool:
    """Return True if a resize has made the maximum smaller than this round: its members should meet again."""
    return resized is not None and resized.revision > round.revision and round.size > resized.max_nodes


def unreported_changes(
    seen: Sequence[Change], head: Head, *, round: Round | None, dropped: str | None, node_id: str = "", now: float = 0.0
) -> list[Change]:
    """Return the changes in `head` that were not reported to the member yet.

    `seen` has the last reported change of each kind in this round, `dropped` the reason if this node was dropped.
    """
    # The closing comes first: a caller that learns of a departure should know by then that the run is closed.
    all_of_it: list[Change] = [] if head.closed is None else [head.closed]
    progress = head.progress
    if round is not None and progress is not None and progress.round == round.number:
        if progress.lost and node_id not in progress.lost_ids:
            all_of_it.append(NodesLost(progress.lost, *_gone_details(progress, progress.lost_ids)))
        if progress.departed:
            all_of_it.append(NodesLeft(progress.departed, *_gone_details(progress, progress.departed_ids)))
        if progress.waiting or any(isinstance(change, NodesWaiting) for change in seen):
            all_of_it.append(NodesWaiting(progress.waiting))
        # `Draining` names only members, although waiting nodes and former members may be drained, too.
        if ids := tuple(node_id for node_id in progress.draining if node_id in head.drains):
            soonest = min((head.drains[node_id] for node_id in ids), key=lambda leaving: leaving.until)
            all_of_it.append(Draining(ids, max(soonest.until - now, 0.0), soonest.reason))
    if round is not None and head.resized is not None and head.resized.revision > round.revision:
        all_of_it.append(head.resized)
    if round is not None and head.moves:
        all_of_it.append(StoreEnding())
    if dropped is not None:
        all_of_it.append(Dropped(dropped))
    return [change for change in all_of_it if change not in seen]
