"""The nouns of a rendezvous: what stands in the store, as `stored` has it, and what a node makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rdzv.core.absent import LOST, NAMED_OF_MANY, Absent, Missing
from rdzv.core.stopping import Resized
from rdzv.core.stored import Prose, Stored, pack, unpack
from rdzv.errors import RendezvousStateError
from store.printable import in_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rdzv.core.asking import Question
    from rdzv.core.round import Round
    from rdzv.core.stopping import Stop
    from store.messages import Cause

__all__ = [
    "NAMED_MOST",
    "Ban",
    "Change",
    "Closed",
    "Coordinator",
    "Draining",
    "Dropped",
    "Head",
    "Leaving",
    "NodeRecord",
    "NodesLeft",
    "NodesLost",
    "NodesWaiting",
    "Phase",
    "Progress",
    "to_leave",
]

NAMED_MOST = 64  # node ids listed by name in a change; the count goes on


class Phase(StrEnum):
    """Where a run is."""

    GATHERING = "gathering"  # fewer nodes than it needs
    LAST_CALL = "last call"  # enough nodes, and a little time for more
    TRAINING = "training"  # a round stands
    CLOSED = "closed"  # over

    @classmethod
    def _missing_(cls, _: object) -> Self:
        """A word that only later releases know says no more than that the run goes on."""
        return cls.GATHERING


class NodeRecord(Stored, kw_only=True):
    """One arrival of one node."""

    called = "the record of a node"
    by_place = True
    outside: ClassVar[tuple[str, ...]] = ("node_id", "arrival")

    node_id: str  # what it is called; no two live nodes of a run share it
    incarnation: str  # random; tells two processes of one name apart
    arrived_after: int = -1  # the last round it knew when it arrived; -1 for none
    address: str = ""  # where the other nodes reach it
    port: int = 0  # a port that was free there
    payload: Any = None  # what it brings for the others to read
    attributes: Mapping[str, str] = MappingProxyType({})  # what an order by topology goes by
    requested_rank: int | None = None  # the rank it would like
    sends_from: str = ""  # the address from which it sends to the store; empty if the user has said where it is reached
    store_at: str = ""  # the address at which it reaches the store; empty in the same case
    server: str = ""  # which of the store's servers is reached there; empty where there is one
    # What is the same for all nodes that share its loopback, and for no others; empty if it does not say.
    machine: str = ""
    lapsed_in: int = -1  # the round that it was dropped from, and comes back from; -1 for none
    checks: bool = False  # it checks that rank 0 is reached before it takes a round
    unreached: bool = False  # it was rank 0 of a round that was given up, since not all reached it
    cut_off: tuple[str, ...] = ()  # where it did not reach rank 0, while others did, who go on without it
    gave_up: Prose = ""  # which round it gave up before this arrival, and why, in words; empty if it gave up none
    left: bool = False  # it has left on its own account, and its record is about to go
    stopped: bool = False  # it has left before the step at which all members had agreed to stop
    why: Prose = ""  # why it has left, in words, if it says
    release: str = ""  # of which release of this package it is; empty if it does not say
    since: float = 0.0  # the hour of this arrival by the node's own clock, in seconds since 1970; 0 if it does not say
    # The last step that it has finished, -1 for none, if it goes from round to round by `rounds()`: then it answers
    # when it is asked which step it has begun. None if it does not.
    progress: int | None = None
    arrival: int = 0  # the revision that wrote this record: which arrival this is


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    """Who decides now, and since which revision: its term."""

    node_id: str
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCoordinator:
    """Who decided before, and how the lease of its role ended, if the store says so and it was not given up."""

    node_id: str
    cause: Cause = ""


class Closed(Stored, kw_only=True):
    """The run is closed.

    Attributes:
        reason: As given by whoever closed it, perhaps empty.
        by: The node that did, or what else it was.
        given_up: Whether it is a verdict not to go on, rather than the end of the work.
        status: The exit status that every launcher ends with; 0 for none in particular.
    """

    called = "the closing"

    reason: Prose
    by: Prose = ""
    given_up: bool = False
    status: int = 0

    @classmethod
    def of(cls, value: bytes) -> Closed:
        """Unpack what the key holds. Whatever it is, the run is closed: nothing is committed while it is there."""
        try:
            return cls.unpack(value)
        except RendezvousStateError as error:
            return cls(reason=str(error))


_WITH = "with/"  # no node is called so: names have no slash
WITH = "nodes with "  # and then the attribute: who is refused, in a status


def ban_name(where: str) -> str:
    """The name of a ban of all nodes with an attribute and value, "rack=17"; that of one node is the node's id."""
    return f"{_WITH}{where}"


def ban_names(node_id: str, attributes: Mapping[str, str]) -> tuple[str, ...]:
    """The names of all bans that keep such a node out, its own first."""
    return node_id, *(ban_name(f"{name}={value}") for name, value in attributes.items())


def ban_among(bans: Mapping[str, Ban], node_id: str, attributes: Mapping[str, str]) -> Ban | None:
    """The one of these bans that keeps such a node out, if there is one: its own, or else one of an attribute."""
    return next((bans[name] for name in ban_names(node_id, attributes) if name in bans), None) if bans else None


class Ban(Stored, kw_only=True):
    """A node may not join.

    Attributes:
        reason: As given by whoever banned it, perhaps empty.
        by: Who did.
        now: Whether it was put out of its round at once, rather than kept out of the next one.
        lasts: Seconds from when it was written; then it ends by itself. None: it lasts until it is lifted.
        left: How many of these are left, in a status.
        where: The attribute and value, "rack=17", that it is a ban of; empty if it is one of a single node.
    """

    called = "a ban"
    outside: ClassVar[tuple[str, ...]] = ("left",)

    reason: Prose
    by: Prose = ""
    now: bool = False
    lasts: float | None = None
    left: float | None = None
    where: str = ""

    def __str__(self) -> str:
        by = (f", as all nodes with {self.where}," if self.where else "") + (f" by {self.by}" if self.by else "")
        span = "" if self.lasts is None else f" for {in_words(self.lasts)}"
        if self.left is not None:
            span = f" for {in_words(self.left)} more"
        return f"banned{by}{span}{f': {self.reason}' if self.reason else ''}"


class Unban(Stored, kw_only=True):
    """A ban was lifted.

    Attributes:
        who: Who may come again.
        reason: As given by whoever lifted it, perhaps empty.
        by: Who did.
        revision: At which it was.
    """

    called = "the lifting of a ban"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    who: str
    reason: Prose = ""
    by: Prose = ""
    revision: int = 0

    def __str__(self) -> str:
        return f"{self.who}{f' by {self.by}' if self.by else ''}{f': {self.reason}' if self.reason else ''}"


class Progress(Stored, kw_only=True):
    """How far the next round is, as the coordinator sees it."""

    called = "the progress"
    by_place = True

    phase: Phase  # where the run is
    round: int = -1  # the number of the last completed round; -1 for none
    joined: int = 0  # nodes that have arrived for the next round
    needed: int = 0  # how many it takes
    capacity: int = 0  # how many there is room for
    live: int = 0  # members of the last round that are still in it
    waiting: int = 0  # arrivals that a regroup now would admit
    spares: int = 0  # arrivals for which there is no room
    # Newcomers that arrived after this revision are the spares; None if there are none, or if `spare_ids` has them.
    # Where an order chooses more of them than can be named, each newcomer may be one: 0.
    spares_after: int | None = None
    # Seconds of last call that were left when this was written; None if it does not run.
    last_call_left: float | None = None
    lost: int = 0  # members of the last round that have died
    lost_ids: tuple[str, ...] = ()  # the first of them by name, at most `NAMED_MOST`
    departed: int = 0  # members of the last round that have left it
    departed_ids: tuple[str, ...] = ()  # the first of them by name
    last_arrival: int = 0  # the latest arrival that was taken into account: those up to it stood when this was written
    # Why no round completes though everything is there for one: a `rank_order` that fails, say. Else empty.
    problem: Prose = ""
    # The spares by name, where an order chooses who they are, if they are at most `NAMED_MOST`.
    spare_ids: tuple[str, ...] = ()
    absent: Absent = Absent()  # who is not here, and for how long
    given_up: Prose = ""  # which round those who wait have given up, and why, in words; empty if none
    # Of members that were dropped though they are alive, the first by name, each with why.
    why_lost: tuple[tuple[str, str], ...] = ()
    standstill: Prose = ""  # that no member gets on, in words; else empty
    left_early: bool = False  # whether any of those who have left did so elsewhere than where all had agreed to stop
    draining: tuple[str, ...] = ()  # the live members that are to leave, the first of them by name

    def once_committed(self, number: int, *, size: int) -> Progress | None:
        """How far the run is once this round is; None if somebody is left over, or missing: the coordinator sees that.

        It is said with the round, so that each node is told both in one push.
        """
        if self.joined != size or self.absent.count:
            return None
        return Progress(phase=Phase.TRAINING, round=number, needed=self.needed, capacity=self.capacity, live=size)

    def once_expelled(self, node_id: str, *, address: str, why: str) -> Progress:
        """The same once a live member is taken out of the round; it is named, so that it hears of it itself."""
        missing = Missing(node_id=node_id, how=LOST, ago=0.0, address=address, why=why)
        named = (*self.absent.missing[: NAMED_MOST - 1], missing)
        return self.replace(
            live=self.live - 1,
            lost=self.lost + 1,
            lost_ids=(*self.lost_ids[: NAMED_MOST - 1], node_id),
            why_lost=(*self.why_lost, (node_id, why))[-NAMED_OF_MANY:],
            absent=self.absent.replace(missing=named, count=self.absent.count + 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every node watches.

    `progress_at` is when the progress came, on this node's clock; `progress_found`, that it had been written before.
    """

    coordinator: Coordinator | None = None
    round: Round | None = None
    closed: Closed | None = None
    closed_over: Progress | None = None  # the progress before the closing: it says which nodes were spares then
    progress: Progress | None = None
    progress_at: float = 0.0
    progress_found: bool = False
    bans: Mapping[str, Ban] = field(default_factory=lambda: MappingProxyType({}))
    unbans: Mapping[str, Unban] = field(default_factory=lambda: MappingProxyType({}))
    stop: Stop | None = None
    drains: Mapping[str, Leaving] = field(default_factory=lambda: MappingProxyType({}))
    resized: Resized | None = None
    questions: Mapping[str, Question] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A node is to leave, by a moment on this node's clock; the revision is that of the announcement."""

    until: float
    reason: str
    revision: int = 0


# -------------------------------------------------------------------------------------------------- changes


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """So many arrivals would be admitted if the members met again now; 0 if they have gone away."""

    count: int


@dataclass(frozen=True, slots=True)
class NodesGone:
    """So many members have gone since the round completed; the first of them by name, at most 64.

    `addresses` says where each of these was, and `reasons` why it is not here any more, as far as that is known.
    """

    count: int
    node_ids: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)


class NodesLost(NodesGone):
    """So many members have died."""

    __slots__ = ()


class NodesLeft(NodesGone):
    """So many members have left."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """This node is no longer in the round: it was away for too long, or the others have gone on without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """These members are to leave; the first of them does so after so many seconds, wherever the others are then."""

    node_ids: tuple[str, ...]
    seconds_left: float = field(compare=False)  # it goes down all the time, and that is no news
    reason: str = ""


def to_leave(node_ids: Iterable[str], reason: str) -> str:
    """Say that nodes are to leave, and why."""
    return f"{', '.join(node_ids)} to leave{f': {reason}' if reason else ''}"


Change = NodesWaiting | NodesLost | NodesLeft | Draining | Resized | Closed | Dropped


# ------------------------------------------------------------------------------------------------ settings


def pack_settings(shared: Mapping[str, Any]) -> bytes:
    """Pack what all nodes of a run must agree on; equal settings give equal bytes."""
    return pack(dict(sorted(shared.items())))


def unpack_settings(value: bytes) -> dict[str, Any]:
    """Unpack what the key holds."""
    return unpack("the settings of the run", value, dict)
