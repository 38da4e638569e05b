"""The nouns of a rendezvous: the records in the store (see `stored`), and the state that a node derives from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

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
    "Hosted",
    "Leaving",
    "LostStore",
    "NodeRecord",
    "NodesLeft",
    "NodesLost",
    "NodesWaiting",
    "Phase",
    "Progress",
    "to_leave",
]

NAMED_MOST = 64  # node ids that a change lists; its count goes on


class Phase(StrEnum):
    """The phase of a run."""

    GATHERING = "gathering"  # fewer nodes than it needs
    LAST_CALL = "last call"  # enough nodes, and some time for more
    TRAINING = "training"  # a round stands
    CLOSED = "closed"  # over

    @classmethod
    def _missing_(cls, _: object) -> Self:
        """Read a word of a later release as "the run goes on"."""
        return cls.GATHERING


class NodeRecord(Stored, kw_only=True):
    """One arrival of one node."""

    called = "the record of a node"
    by_place = True
    outside: ClassVar[tuple[str, ...]] = ("node_id", "arrival")

    node_id: str  # its name; no two live nodes of a run share it
    incarnation: str  # random; tells two processes of one name apart
    arrived_after: int = -1  # the last round it knew when it arrived; -1 for none
    address: str = ""  # where other nodes reach it
    port: int = 0  # a port that was free there
    payload: Any = None  # data for the other members
    attributes: Mapping[str, str] = MappingProxyType({})  # for orders by topology, and for bans
    requested_rank: int | None = None  # the rank that it asks for
    sends_from: str = ""  # the address from which it sends to the store; empty if the user has set `address`
    store_at: str = ""  # the address at which it reaches the store; empty in the same case
    server: str = ""  # the store's server at that address; empty if there is only one
    # Equal for all nodes that share its loopback, and for no others; empty if it does not say.
    machine: str = ""
    lapsed_in: int = -1  # the round that it was dropped from, if it comes back from it; else -1
    checks: bool = False  # it checks that it reaches rank 0 before it takes a round
    unreached: bool = False  # it was rank 0 of a round that was given up, since not all members reached it
    cut_off: tuple[str, ...] = ()  # addresses of rank 0s that it did not reach while others did
    gave_up: Prose = ""  # the round that it gave up before this arrival, and why, in words; empty if none
    left: bool = False  # it has left by itself, and its record is about to be deleted
    stopped: bool = False  # it left before the step that all members had agreed on
    why: Prose = ""  # why it has left, in words
    release: str = ""  # its release of this package; empty if it does not say
    since: float = 0.0  # the time of this arrival on the node's clock, in seconds since 1970; 0 if it does not say
    # The last step that it has finished (-1: none), if it uses `rounds()` and answers where to stop; else None.
    progress: int | None = None
    # The revision of its round in a store that was lost, and its rank there; None if it was a member of none.
    came_from: tuple[int, int] | None = None
    arrival: int = 0  # the revision that wrote this record; it identifies the arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    """The coordinator, and the revision at which its term began."""

    node_id: str
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCoordinator:
    """The coordinator before, and how its lease ended, if the store says so and it did not step down."""

    node_id: str
    cause: Cause = ""


class Closed(Stored, kw_only=True):
    """The closing of a run."""

    called = "the closing"

    reason: Prose  # the reason, as given; may be empty
    by: Prose = ""  # the node or person that closed it
    given_up: bool = False  # true for a verdict not to go on, rather than the end of the work
    status: int = 0  # the exit status of every launcher; 0 for none in particular

    @classmethod
    def of(cls, value: bytes) -> Closed:
        """Unpack the value; an unreadable one closes the run, too, since it prevents every commit."""
        try:
            return cls.unpack(value)
        except RendezvousStateError as error:
            return cls(reason=str(error))


_WITH = "with/"  # no node has this name: names have no slash
WITH = "nodes with "  # then the attribute: the banned nodes, in a status


def ban_name(where: str) -> str:
    """Return the name of a ban of all nodes with an attribute and value, "rack=17"; a single node's ban has its id."""
    return f"{_WITH}{where}"


def ban_names(node_id: str, attributes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of all bans that would keep a node out, its own first."""
    return node_id, *(ban_name(f"{name}={value}") for name, value in attributes.items())


def ban_among(bans: Mapping[str, Ban], node_id: str, attributes: Mapping[str, str]) -> Ban | None:
    """Return the ban that keeps a node out: its own or one of an attribute; None if there is none."""
    return next((bans[name] for name in ban_names(node_id, attributes) if name in bans), None) if bans else None


class Ban(Stored, kw_only=True):
    """A ban of one node, or of all nodes with an attribute."""

    called = "a ban"
    outside: ClassVar[tuple[str, ...]] = ("left", "seen_at")

    reason: Prose  # the reason, as given; may be empty
    by: Prose = ""  # the node or person that banned it
    now: bool = False  # true if the node is put out of its round at once, too
    lasts: float | None = None  # seconds from its writing until it ends by itself. None: until it is lifted
    left: float | None = None  # the seconds of these that remain, in a status
    where: str = ""  # the attribute and value, "rack=17"; empty for a single node
    seen_at: float = 0.0  # when this node heard of it, on its own clock

    def __str__(self) -> str:
        by = (f", as all nodes with {self.where}," if self.where else "") + (f" by {self.by}" if self.by else "")
        span = "" if self.lasts is None else f" for {in_words(self.lasts)}"
        if self.left is not None:
            span = f" for {in_words(self.left)} more"
        return f"banned{by}{span}{f': {self.reason}' if self.reason else ''}"


class Unban(Stored, kw_only=True):
    """A ban that was lifted."""

    called = "the lifting of a ban"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    who: str  # the nodes that may join again
    reason: Prose = ""  # the reason, as given; may be empty
    by: Prose = ""  # the node or person that lifted it
    revision: int = 0  # the revision of the lifting

    def __str__(self) -> str:
        return f"{self.who}{f' by {self.by}' if self.by else ''}{f': {self.reason}' if self.reason else ''}"


class Progress(Stored, kw_only=True):
    """The coordinator's report of the next round."""

    called = "the progress"
    by_place = True

    phase: Phase  # the run's phase
    round: int = -1  # the number of the last completed round; -1 for none
    joined: int = 0  # nodes that have arrived for the next round
    needed: int = 0  # the fewest nodes of a round
    capacity: int = 0  # the most nodes of a round
    live: int = 0  # members of the last round that are still in it
    waiting: int = 0  # arrivals that a regroup now would admit
    spares: int = 0  # arrivals for which there is no room
    # Newcomers that arrived after this revision are spares. None if there are none, or if `spare_ids` names them. 0 if
    # any newcomer may be one, since an order chooses more spares than can be named.
    spares_after: int | None = None
    # Seconds of last call that were left at the writing; None if none runs.
    last_call_left: float | None = None
    lost: int = 0  # members of the last round that have died
    lost_ids: tuple[str, ...] = ()  # the first of them, at most `NAMED_MOST`
    departed: int = 0  # members of the last round that have left it
    departed_ids: tuple[str, ...] = ()  # the first of them
    last_arrival: int = 0  # the latest arrival that was counted
    # Why no round completes though enough nodes are here: a `rank_order` that fails, for example.
    problem: Prose = ""
    # The spares that an order has chosen, if they are at most `NAMED_MOST`.
    spare_ids: tuple[str, ...] = ()
    absent: Absent = Absent()  # the missing nodes, and for how long
    given_up: Prose = ""  # the round that the waiting nodes have given up, and why, in words
    # The first members that were expelled though alive, each with the reason.
    why_lost: tuple[tuple[str, str], ...] = ()
    standstill: Prose = ""  # no member gets on, in words
    left_early: bool = False  # a member has left at another step than all had agreed on
    draining: tuple[str, ...] = ()  # the first live members that are to leave

    def once_committed(self, number: int, *, size: int) -> Progress | None:
        """Return the progress after this round's commit; None if a node is left over or missing.

        It travels with the round, so that each node gets one push.
        """
        if self.joined != size or self.absent.count:
            return None
        return Progress(phase=Phase.TRAINING, round=number, needed=self.needed, capacity=self.capacity, live=size)

    def still_naming(self, node_id: str, before: Progress) -> Progress:
        """Return the progress naming this lost node if one before did: it may have more losses than names."""
        if self.round != before.round or node_id in self.lost_ids or node_id not in before.lost_ids:
            return self
        why = tuple(one for one in before.why_lost if one[0] == node_id)
        return self.replace(lost_ids=(*self.lost_ids, node_id), why_lost=(*self.why_lost, *why))

    def once_expelled(self, node_id: str, *, address: str, why: str) -> Progress:
        """Return the progress after an expulsion; it names the member, so that the member hears of it."""
        missing = Missing(node_id=node_id, how=LOST, ago=0.0, address=address, why=why)
        named = (*self.absent.missing[: NAMED_MOST - 1], missing)
        return self.replace(
            live=self.live - 1,
            lost=self.lost + 1,
            lost_ids=(*self.lost_ids[: NAMED_MOST - 1], node_id),
            why_lost=(*self.why_lost, (node_id, why))[-NAMED_OF_MANY:],
            absent=self.absent.replace(missing=named, count=self.absent.count + 1),
        )


class LostStore(Stored, kw_only=True):
    """What a node knew of the run in a store that was lost."""

    called = "the knowledge of a store that was lost"

    generation: int  # of that store; the first one of a run has 1
    revision: int  # the last that the node had seen there
    round: int = -1  # the highest number of a round, there or before; -1: there was none
    round_at: int = 0  # the revision of the last round's commit; other stores may have a round of its number
    awaited: int = 0  # its members that may still be at work
    settings: bytes = b""  # as all nodes shared them at last
    closed: bytes = b""  # the closing; empty if the run was not closed
    bans: Mapping[str, bytes] = MappingProxyType({})
    tally: bytes = b""  # of restarts, and of rounds without progress
    host: str = ""  # where that store was

    def outranks(self, other: LostStore | None) -> bool:
        """Return True if this knowledge counts rather than the other."""
        return other is None or (self.generation, self.revision) > (other.generation, other.revision)


class Hosted(NamedTuple):
    """A node in the process that serves the store."""

    arrival: int
    last_round: int  # the revision of the one that it was a member of before, perhaps in another store; 0 for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The part of a run that every node watches.

    `progress_at` is when the progress arrived, on this node's clock; `progress_found`: it had been written before.
    """

    coordinator: Coordinator | None = None
    round: Round | None = None
    closed: Closed | None = None
    closed_over: Progress | None = None  # the progress before the closing, which says which nodes were spares
    progress: Progress | None = None
    progress_at: float = 0.0
    progress_found: bool = False
    bans: Mapping[str, Ban] = field(default_factory=lambda: MappingProxyType({}))
    unbans: Mapping[str, Unban] = field(default_factory=lambda: MappingProxyType({}))
    stop: Stop | None = None
    drains: Mapping[str, Leaving] = field(default_factory=lambda: MappingProxyType({}))
    resized: Resized | None = None
    questions: Mapping[str, Question] = field(default_factory=lambda: MappingProxyType({}))
    lost_store: LostStore | None = None  # what nodes knew of it
    lost_store_at: float = 0.0  # when that was heard, on this node's clock
    lost_store_told: int = 0  # the revision of that write
    hosted: Mapping[str, Hosted] = field(default_factory=lambda: MappingProxyType({}))  # in the store's process
    moves: bool = False  # the host of the store is about to leave: no node arrives here any more
    moves_over: Progress | None = None  # the progress before that: the members that leave meet again elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The drain of a node, with its end on this node's clock and the revision of the announcement."""

    until: float
    reason: str
    revision: int = 0


# -------------------------------------------------------------------------------------------------- changes


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """The number of arrivals that a regroup now would admit; 0 if they have gone."""

    count: int


@dataclass(frozen=True, slots=True)
class NodesGone:
    """The members that have gone since the round completed; at most 64 are named.

    `addresses` has their addresses, and `reasons` the known reasons.
    """

    count: int
    node_ids: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)


class NodesLost(NodesGone):
    """The members that have died."""

    __slots__ = ()


class NodesLeft(NodesGone):
    """The members that have left."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """This node is no longer in the round: its lease was lost, or the others go on without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """These members are to leave, the first of them after `seconds_left` at the latest."""

    node_ids: tuple[str, ...]
    seconds_left: float = field(compare=False)  # it falls all the time, which is no news
    reason: str = ""


def to_leave(node_ids: Iterable[str], reason: str) -> str:
    """Return in words that nodes are to leave, and why."""
    return f"{', '.join(node_ids)} to leave{f': {reason}' if reason else ''}"


Change = NodesWaiting | NodesLost | NodesLeft | Draining | Resized | Closed | Dropped


# ------------------------------------------------------------------------------------------------ settings


def pack_settings(shared: Mapping[str, Any]) -> bytes:
    """Pack the shared settings of a run; equal settings give equal bytes."""
    return pack(dict(sorted(shared.items())))


def unpack_settings(value: bytes) -> dict[str, Any]:
    """Unpack the shared settings of a run."""
    return unpack("the settings of the run", value, dict)
