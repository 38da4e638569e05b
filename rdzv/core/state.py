"""The data of a rendezvous: its records in the store (see `stored`), and the state derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from rdzv.core.absent import LOST, NAMED_OF_MANY, AbsenceReport, Missing
from rdzv.core.stopping import Resized
from rdzv.core.stored import Prose, Stored, pack, unpack
from rdzv.errors import RendezvousStateError
from store.printable import time_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rdzv.core.questions import OperatorQuestion
    from rdzv.core.round import Round
    from rdzv.core.stopping import RoundStop
    from store.messages import Cause

NAMED_MOST = 64  # node ids per field or message; counts have no limit


class Phase(StrEnum):
    """A run's phase; see `rdzv.core.decision`."""

    GATHERING = "gathering"
    LAST_CALL = "last call"
    TRAINING = "training"
    CLOSED = "closed"

    @classmethod
    def _missing_(cls, _: object) -> Self:
        """Return GATHERING for a phase of a later release: a run in such a phase is not closed."""
        return cls.GATHERING


class NodeRecord(Stored, kw_only=True):
    """One arrival of a node, from the value, name and revision of its key."""

    called = "the record of a node"
    by_place = True
    outside: ClassVar[tuple[str, ...]] = ("node_id", "arrival")

    node_id: str  # unique among the live nodes of a run
    incarnation: str  # random; distinguishes two nodes with the same id
    arrived_after: int = -1  # the last round that the node knew as it arrived; -1 for none
    address: str = ""
    port: int = 0  # this node's port as rank 0
    payload: Any = None
    attributes: Mapping[str, str] = MappingProxyType({})  # for rank orders, complete units, and bans
    requested_rank: int | None = None
    sends_from: str = ""  # the node's address in its connection to the store; may be empty: see `addresses_for_record`
    store_at: str = ""  # the store's address in the node's connection; empty if `sends_from` is
    server: str = ""  # the id of the server at `store_at`, or "another"; empty if the store has only one
    machine: str = ""  # the same only for nodes that share a loopback network; empty if unknown
    lapsed_in: int = -1  # the round from which an outage has dropped the node; -1 for none
    checks: bool = False  # True: if all members do, the node checks that it reaches rank 0
    unreached: bool = False  # True: the node was rank 0 of the last round, given up with no member left out
    cut_off: tuple[str, ...] = ()  # addresses of rank 0s that this node did not reach while others did
    gave_up: Prose = ""  # why the last round was given up, if a member did not reach rank 0; else empty
    left: bool = False  # True: the node leaves and deletes this record, or this is the coordinator's marker
    stopped: bool = False  # True: the node leaves at the agreed step, or after its body: see `StepGate.is_at_stop`
    why: Prose = ""  # why the node leaves
    release: str = ""  # the node's release of this package; empty if unknown
    since: float = 0.0  # the Unix time of the arrival, on the node's clock; 0 if unknown
    progress: int | None = None  # the last finished step at arrival, -1 for none; None without `rounds()`
    lost_rank_of: tuple[int, int] | None = None  # the revision of a lost store's round, and the node's rank there
    arrival: int = 0  # the record's revision, which identifies the arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentCoordinator:
    """The coordinator and its term: the revision of the write that made it the coordinator."""

    node_id: str
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCoordinator:
    """The previous coordinator, and how its lease ended. `cause` is empty if the lease is live or the cause unknown."""

    node_id: str
    cause: Cause = ""


class Closed(Stored, kw_only=True):
    """The closing of a run."""

    called = "the closing"

    reason: Prose
    by: Prose = ""  # the node or caller that closed the run
    given_up: bool = False  # True: the run cannot continue; False: any other closing
    status: int = 0  # the exit status of all launchers; 0: each launcher chooses its own

    @classmethod
    def of(cls, value: bytes) -> Closed:
        """Unpack the key's value; an unreadable value counts as a closing, too: commits fail while the key exists."""
        try:
            return cls.unpack(value)
        except RendezvousStateError as error:
            return cls(reason=str(error))


_WITH = "with/"  # begins the names of attribute bans; node ids have no slash
WITH = "nodes with "  # "nodes with rack=17" stands for all nodes with this attribute


def attribute_ban_name(where: str) -> str:
    """Return the last part of the key of a ban of all nodes with an attribute; `where` is "rack=17"."""
    return f"{_WITH}{where}"


def ban_names_of(node_id: str, attributes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the bans that would exclude a node: its id, and `attribute_ban_name` of each attribute."""
    return node_id, *(attribute_ban_name(f"{name}={value}") for name, value in attributes.items())


def find_ban(bans: Mapping[str, Ban], node_id: str, attributes: Mapping[str, str]) -> Ban | None:
    """Return the first of the bans that excludes a node, if any."""
    return next((bans[name] for name in ban_names_of(node_id, attributes) if name in bans), None)


class Ban(Stored, kw_only=True):
    """A ban of one node, or of all nodes with an attribute."""

    called = "a ban"
    outside: ClassVar[tuple[str, ...]] = ("ends_in", "seen_at")

    reason: Prose
    by: Prose = ""  # the node or caller that wrote the ban
    now: bool = False  # True: also remove a banned member from its round at once
    lasts: float | None = None  # seconds from the write of the ban to its end; None: until lifted
    ends_in: float | None = None  # in a status, the seconds until a limited ban ends
    where: str = ""  # the attribute and value, "rack=17"; empty for a single node
    seen_at: float = 0.0  # when this node received the ban, on its clock

    def __str__(self) -> str:
        span = "" if self.lasts is None else f" for {time_text(self.lasts)}"
        if self.ends_in is not None:
            span = f" for {time_text(self.ends_in)} more"
        terms = f"{f' by {self.by}' if self.by else ''}{span}"
        where = f", as all nodes with {self.where}{',' if terms else ''}" if self.where else ""
        return f"banned{where}{terms}{f': {self.reason}' if self.reason else ''}"


class Unban(Stored, kw_only=True):
    """A lifted ban."""

    called = "the lifting of a ban"
    outside: ClassVar[tuple[str, ...]] = ("revision",)

    who: str  # the nodes that may join again, in words
    reason: Prose = ""
    by: Prose = ""
    revision: int = 0

    def __str__(self) -> str:
        return f"{self.who}{f' by {self.by}' if self.by else ''}{f': {self.reason}' if self.reason else ''}"


class Progress(Stored, kw_only=True):
    """The coordinator's report on the last round and on waiting nodes. A field names at most `NAMED_MOST` nodes."""

    called = "the progress"
    by_place = True

    phase: Phase
    round: int = -1  # the last completed round; -1 for none
    joined: int = 0  # nodes waiting for the next round, spares included
    needed: int = 0  # see `decision.Rules`
    capacity: int = 0
    live: int = 0  # members still in the last round
    waiting: int = 0  # waiting nodes that a round would admit if it began now; 0 without live members
    spares: int = 0  # waiting nodes that the next round would not admit
    # Newcomers that arrived after this revision are spares. 0 also means that a rank order chose too many to name.
    # None: there are no spares, or `spare_ids` names all.
    spares_after: int | None = None
    last_call_left: float | None = None  # seconds left of the last call when written
    lost: int = 0  # how many of the last round's members have died
    lost_ids: tuple[str, ...] = ()
    departed: int = 0  # how many of the last round's members have left
    departed_ids: tuple[str, ...] = ()
    last_arrival: int = 0  # the waiting nodes' last `NodeRecord.arrival`; 0 for none
    problem: Prose = ""  # why no round completes though there are enough nodes, such as a `rank_order` that fails
    spare_ids: tuple[str, ...] = ()  # nodes left out (see `TermView.left_out`), and spares by a rank order's `choose`
    absent: AbsenceReport = AbsenceReport()
    given_up: Prose = ""  # the round that waiting nodes have given up, and why; empty for none
    why_lost: tuple[tuple[str, str], ...] = ()  # members expelled although alive, and why
    standstill: Prose = ""  # a sentence saying that no member makes progress, or empty
    left_early: bool = False  # True: a member has left at another step than agreed
    draining: tuple[str, ...] = ()  # live members with an announced drain

    def for_round_commit(self, number: int, *, size: int) -> Progress | None:
        """Return the progress to write in this round's commit; None if left-over or absent nodes need a report."""
        if self.joined != size or self.absent.count:
            return None
        return Progress(phase=Phase.TRAINING, round=number, needed=self.needed, capacity=self.capacity, live=size)

    def keep_lost_name(self, node_id: str, before: Progress) -> Progress:
        """Return this progress; if `before` names a lost node, name it, too: the limit on names may have dropped it."""
        if self.round != before.round or node_id in self.lost_ids or node_id not in before.lost_ids:
            return self
        why = tuple(one for one in before.why_lost if one[0] == node_id)
        return self.replace(lost_ids=(*self.lost_ids, node_id), why_lost=(*self.why_lost, *why))

    def after_expulsion(self, node_id: str, *, address: str, why: str) -> Progress:
        """Return the progress after an expulsion; it names the expelled member."""
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
    """A node's knowledge of the run in a lost store; see `rdzv.core.hosts.lost_store`."""

    called = "the knowledge of a store that was lost"

    generation: int  # the lost store's generation; a run's first store has 1
    revision: int  # the last revision that the node saw
    round: int = -1  # the highest round number in the lost store or before it; -1 for none
    round_at: int = 0  # the revision of the commit of `round`: another store may have a round of this number
    awaited: int = 0  # how many members of `round` may still be at work
    settings: bytes = b""
    closed: bytes = b""  # a packed `Closed`; empty if the run was not closed
    bans: Mapping[str, bytes] = MappingProxyType({})
    tally: bytes = b""  # a packed `RunCounts`
    host: str = ""  # the lost store's host

    def outranks(self, other: LostStore | None) -> bool:
        """Return True if this knowledge replaces `other`. Revisions are compared last, as each store counts its own."""
        mine = (self.generation, self.round, self.revision)
        return other is None or mine > (other.generation, other.round, other.revision)


class NodeWithStore(NamedTuple):
    """A node in the process that serves the store."""

    arrival: int
    last_round: int  # the revision of the node's last round before this arrival, perhaps in another store; 0 for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The part of a run's keys that every node watches, as one record."""

    coordinator: CurrentCoordinator | None = None
    round: Round | None = None
    closed: Closed | None = None
    closed_over: Progress | None = None  # the progress before the closing, which says which nodes were spares
    progress: Progress | None = None
    progress_at: float = 0.0  # when this node received `progress`, on its clock
    progress_found: bool = False  # True: `progress` was in the watch's snapshot, so its age is unknown
    bans: Mapping[str, Ban] = field(default_factory=lambda: MappingProxyType({}))
    unbans: Mapping[str, Unban] = field(default_factory=lambda: MappingProxyType({}))
    stop: RoundStop | None = None
    drains: Mapping[str, AnnouncedDrain] = field(default_factory=lambda: MappingProxyType({}))
    resized: Resized | None = None
    questions: Mapping[str, OperatorQuestion] = field(default_factory=lambda: MappingProxyType({}))
    lost_store: LostStore | None = None
    lost_store_at: float = 0.0  # when this node received `lost_store`, on its clock
    lost_store_told: int = 0  # the revision at which `lost_store` was written
    hosted: Mapping[str, NodeWithStore] = field(default_factory=lambda: MappingProxyType({}))
    tally: bytes = b""  # a packed `RunCounts`; empty for none
    moves: bool = False  # True: the store's host is about to leave, so no node may join through this store
    moves_over: Progress | None = None  # the progress before `moves`; members that leave later meet in the next store


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedDrain:
    """An announced drain: the node leaves by `until` on this node's clock; `revision` is the announcement's."""

    until: float
    reason: str
    revision: int = 0


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """The number of waiting nodes that a round would admit if it began now; 0 once no node waits."""

    count: int


@dataclass(frozen=True, slots=True)
class NodesLostOrLeft:
    """The members that have gone since the round completed; at most 64 are named."""

    count: int
    node_ids: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


class NodesLost(NodesLostOrLeft):
    """The members that have died."""

    __slots__ = ()


class NodesLeft(NodesLostOrLeft):
    """The members that have left."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """This node is no longer in the round: it lost its lease, or the other members continue without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The members that have to leave, the first of them within `seconds_left`."""

    node_ids: tuple[str, ...]
    seconds_left: float = field(compare=False)  # falls continuously, so a lower value is no change
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StoreEnding:
    """The process that serves the store is about to end; the members meet again at the next host of the URL."""


MOVES = "the host of the store leaves, and the next one serves"


def leaving_in_words(node_ids: Iterable[str], reason: str) -> str:
    """Return "n1, n2 to leave: reason"."""
    return f"{', '.join(node_ids)} to leave{f': {reason}' if reason else ''}"


Change = NodesWaiting | NodesLost | NodesLeft | Draining | Resized | StoreEnding | Closed | Dropped


def pack_settings(shared: Mapping[str, Any]) -> bytes:
    """Pack the shared settings of a run; equal settings give equal bytes."""
    return pack(dict(sorted(shared.items())))


def unpack_settings(value: bytes) -> dict[str, Any]:
    """Unpack the shared settings of a run."""
    return unpack("the settings of the run", value, dict)
