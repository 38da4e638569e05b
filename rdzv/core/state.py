"""The nouns of a rendezvous, where they stand in the store, and how they travel: to and from plain data.

Everything is msgpack of plain data, maps by name where room allows, so that a later release can add to it. What cannot
be read is `RendezvousStateError`: the store holds something that is not ours.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rdzv.core.absent import Absent
from rdzv.core.plain_data import attributes_of, maybe, names_of, of, pack, row_of, unpack
from rdzv.core.stopping import Resized
from store.fast_init import constructor
from store.printable import in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from rdzv.core.absent import Missing
    from rdzv.core.asking import Question
    from rdzv.core.stopping import Stop
    from store.messages import Cause

__all__ = [
    "ARRIVALS_MOST",
    "BUCKET_SIZE",
    "GONE_MOST",
    "NAMED_MOST",
    "RUNS_MOST",
    "Arrivals",
    "Assignment",
    "Ban",
    "Change",
    "Closed",
    "Coordinator",
    "Draining",
    "Dropped",
    "Head",
    "Kept",
    "Leaving",
    "Member",
    "NodeRecord",
    "NodesLeft",
    "NodesLost",
    "NodesWaiting",
    "Participant",
    "Phase",
    "Progress",
    "Round",
    "RunStatus",
    "bucket_of",
    "place",
]

T = TypeVar("T")

BUCKET_SIZE = 16  # nodes in one bucket: what a node reads to learn its rank stays below a kilobyte
SINCE_MOST = 16  # node ids of each kind that a round itself names: every node gets them
ARRIVALS_MOST = 512  # members up to which a round itself says who has which rank, in two bytes each ...
GONE_MOST = 64  # members of the last round that are named by rank because they are not in this one
RUNS_MOST = 128  # ... or in so many runs of arrivals one after the other, however many members: in a kilobyte, too
NAMED_MOST = 64  # node ids listed by name in a change; the count goes on


class Phase(Enum):
    """Where a run is."""

    GATHERING = "gathering"  # fewer nodes than it needs
    LAST_CALL = "last call"  # enough nodes, and a little time for more
    COMPLETE = "complete"  # a round stands
    CLOSED = "closed"  # over


def _phase_of(word: object) -> Phase:
    """Return the phase of this name. One that only later releases know says no more than that the run goes on."""
    try:
        return Phase(of(str, word))
    except ValueError:
        return Phase.GATHERING


def bucket_of(node_id: str, buckets: int) -> int:
    """Return which bucket of ranks a node is in; the same on every machine."""
    return zlib.crc32(node_id.encode()) % buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One arrival of one node.

    Attributes:
        node_id: What it is called; no two live nodes of a run share it.
        incarnation: Random; tells two processes of one name apart.
        arrived_after: The last round it knew when it arrived; -1 for none.
        address: Where the other nodes reach it.
        port: A port that was free there.
        payload: What it brings for the others to read.
        attributes: What an order by topology goes by.
        requested_rank: The rank it would like.
        sends_from: The address from which it sends to the store; empty if the user has said where it is reached.
        store_at: The address at which it reaches the store; empty in the same case.
        lapsed_in: The round that it was dropped from, and comes back from; -1 for none.
        checks: It checks that rank 0 is reached before it takes a round.
        unreached: It was rank 0 of a round that was given up, since not all reached it.
        gave_up: Which round it gave up before this arrival, and why, in words; empty if it gave up none.
        left: It has left on its own account, and its record is about to go.
        stopped: It has left before the step at which all members had agreed to stop.
        why: Why it has left, in words, if it says.
        release: Of which release of this package it is; empty if it does not say.
        since: The hour of this arrival by the node's own clock, in seconds since 1970; 0 if it does not say.
        progress: The last step that it has finished, -1 for none, if it goes from round to round by `rounds()`: then
            it answers when it is asked which step it has begun. None if it does not.
        arrival: The revision that wrote this record: which arrival this is.
    """

    node_id: str
    incarnation: str
    arrived_after: int = -1
    address: str = ""
    port: int = 0
    payload: Any = None
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    requested_rank: int | None = None
    sends_from: str = ""
    store_at: str = ""
    lapsed_in: int = -1
    checks: bool = False
    unreached: bool = False
    gave_up: str = ""
    left: bool = False
    stopped: bool = False
    why: str = ""
    release: str = ""
    since: float = 0.0
    progress: int | None = None
    arrival: int = 0

    def pack(self) -> bytes:
        """Pack it into bytes; the node's id is in its key, the arrival in its revision."""
        plain: dict[str, Any] = {"incarnation": self.incarnation, "address": self.address, "port": self.port}
        if self.arrived_after >= 0:
            plain["arrived_after"] = self.arrived_after
        if self.payload is not None:
            plain["payload"] = self.payload
        if self.attributes:
            plain["attributes"] = dict(self.attributes)
        if self.requested_rank is not None:
            plain["requested_rank"] = self.requested_rank
        if self.store_at:
            plain["path"] = [self.sends_from, self.store_at]
        if self.lapsed_in >= 0:
            plain["lapsed_in"] = self.lapsed_in
        if self.checks:
            plain["checks"] = True
        if self.unreached:
            plain["unreached"] = True
        if self.gave_up:
            plain["gave_up"] = self.gave_up
        if self.left:
            plain["left"] = True
        if self.stopped:
            plain["stopped"] = True
        if self.why:
            plain["why"] = self.why
        if self.release:
            plain["release"] = self.release
        if self.since:
            plain["since"] = self.since
        if self.progress is not None:
            plain["progress"] = self.progress
        return pack(plain)

    @classmethod
    def unpack(cls, node_id: str, value: bytes, *, arrival: int) -> NodeRecord:
        """Unpack what a node's key holds; `arrival` is the revision at which it was written."""

        def build(plain: Mapping[str, Any]) -> NodeRecord:
            sends_from, store_at, *_ = plain.get("path", ("", ""))
            return _new_record(
                node_id=node_id,
                incarnation=of(str, plain["incarnation"]),
                arrived_after=of(int, plain.get("arrived_after", -1)),
                address=of(str, plain["address"]),
                port=of(int, plain["port"]),
                payload=plain.get("payload"),
                attributes=attributes_of(plain.get("attributes", {})),
                requested_rank=maybe(int, plain.get("requested_rank")),
                sends_from=of(str, sends_from),
                store_at=of(str, store_at),
                lapsed_in=of(int, plain.get("lapsed_in", -1)),
                checks=of(bool, plain.get("checks", False)),
                unreached=of(bool, plain.get("unreached", False)),
                gave_up=of(str, plain.get("gave_up", "")),
                left=of(bool, plain.get("left", False)),
                stopped=of(bool, plain.get("stopped", False)),
                why=of(str, plain.get("why", "")),
                release=of(str, plain.get("release", "")),
                since=of(float, plain.get("since", 0.0)),
                progress=maybe(int, plain.get("progress")),
                arrival=arrival,
            )

        return unpack(f"the record of node {node_id}", value, build)


_new_record = constructor(NodeRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node's place in a completed round: its rank, and which arrival of it was taken in."""

    node_id: str
    rank: int
    arrival: int


def pack_members(members: Sequence[Member]) -> bytes:
    """Pack one bucket of ranks."""
    return pack([(member.node_id, member.rank, member.arrival) for member in members])


def unpack_members(value: bytes) -> list[Member]:
    """Unpack one bucket of ranks."""

    def build(plain: Sequence[Any]) -> list[Member]:
        return [
            Member(node_id=of(str, node_id), rank=of(int, rank), arrival=of(int, arrival))
            for node_id, rank, arrival, *_ in plain
        ]

    return unpack("a bucket of ranks", value, build)


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A member of a round, as every member may read it.

    Attributes:
        node_id: What it is called.
        rank: Its place, from 0.
        address: Where the others reach it.
        payload: What it brought.
        attributes: What it said of itself.
    """

    node_id: str
    rank: int
    address: str
    payload: Any = None
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def pack_roster(participants: Sequence[Participant]) -> bytes:
    """Pack one bucket of the roster."""
    return pack([(one.node_id, one.rank, one.address, one.payload, dict(one.attributes)) for one in participants])


def unpack_roster(value: bytes) -> list[Participant]:
    """Unpack one bucket of the roster."""

    def build(plain: Sequence[Any]) -> list[Participant]:
        return [
            Participant(
                node_id=of(str, node_id),
                rank=of(int, rank),
                address=of(str, address),
                payload=payload,
                attributes=attributes_of(attributes),
            )
            for node_id, rank, address, payload, attributes, *_ in plain
        ]

    return unpack("a bucket of the roster", value, build)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Which arrival has which rank in a round, as far as the round itself says so: every member is sent this.

    Those who come for the first time are ranked as they came, and came one after the other: a few runs say it, however
    many they are. Members of the last round come again in any order, and keep their ranks.

    Attributes:
        runs: The first arrival of each run, and how many follow it one by one, in order of rank.
        least: Else, the least arrival, and ...
        after: ... by how much each is above it, in order of rank, in two bytes.
    """

    runs: tuple[tuple[int, int], ...] = ()
    least: int = 0
    after: bytes = b""

    @classmethod
    def of(cls, arrivals: Sequence[int]) -> Arrivals:
        """Return these, in order of rank; none, if they are too many for either way, or too far apart."""
        runs = tuple(_runs(arrivals))
        if len(runs) <= min(RUNS_MOST, len(arrivals) // 4):  # else two bytes for each member are less
            return cls(runs=runs)
        least = min(arrivals, default=0)
        if not 0 < len(arrivals) <= ARRIVALS_MOST or max(arrivals) - least >= 1 << 16:
            return cls()
        return cls(least=least, after=struct.pack(f">{len(arrivals)}H", *(one - least for one in arrivals)))

    def __bool__(self) -> bool:
        return bool(self.runs or self.after)

    def rank_of(self, arrival: int) -> int | None:
        """Return the rank of an arrival; None: it has none, or it is not said here."""
        rank = 0
        for first, count in self.runs:
            if first <= arrival < first + count:
                return rank + arrival - first
            rank += count
        with contextlib.suppress(ValueError):
            return struct.unpack(f">{len(self.after) // 2}H", self.after).index(arrival - self.least)
        return None

    def plain(self) -> dict[str, object]:
        """Return it as plain data: fields of the round."""
        if self.runs:
            return {"runs": self.runs}
        return {"arrivals": (self.least, self.after)} if self.after else {}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Arrivals:
        """Return what the fields of a round say."""
        if "runs" in plain:
            return cls(runs=tuple((of(int, first), of(int, count)) for first, count in plain["runs"]))
        least, after = plain.get("arrivals", (0, b""))
        if len(of(bytes, after)) % 2:
            raise ValueError("half of an arrival")
        return cls(least=of(int, least), after=after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Which members of the last round are in this one, too, in the same order and before all others: all but a few.

    Each of them knows its rank by that, whatever their number. It is said only of processes that were members
    themselves, and where the commit was conditional on the arrival of each: else one that does not know yet that its
    lease has lapsed would take itself for the process that has come under its name.

    Attributes:
        revision: That of the last round.
        count: How many they are.
        gone: The ranks in it of those who are not, upwards.
    """

    revision: int
    count: int
    gone: tuple[int, ...] = ()

    def rank_of(self, rank: int) -> int | None:
        """Return the rank in this round of who had a rank in the last one; None if it is not one of these."""
        below = bisect_left(self.gone, rank)
        return None if rank in self.gone[below : below + 1] else rank - below

    def plain(self) -> object:
        """Return it as plain data, by position."""
        return self.revision, self.count, self.gone


def place(
    members: Sequence[Member], last: Round | None, before: Mapping[str, Member], same: Collection[str]
) -> tuple[Kept | None, Arrivals]:
    """Return who is known by its rank in the last round, and by its arrival who is not.

    Args:
        members: Of this round, by rank.
        last: The last round, if there was one.
        before: Its members.
        same: The ids of those nodes whose process was a member of it, as far as is known.
    """
    ranks: list[int] = []
    for member in members:
        there = before.get(member.node_id)
        if there is None or member.node_id not in same or (ranks and there.rank < ranks[-1]):
            break
        ranks.append(there.rank)
    if last is None or not ranks or len(before) != last.size or last.size - len(ranks) > GONE_MOST:
        return None, Arrivals.of([member.arrival for member in members])
    kept = Kept(revision=last.revision, count=len(ranks), gone=tuple(sorted(set(range(last.size)).difference(ranks))))
    return kept, Arrivals.of([member.arrival for member in members[len(ranks) :]])


def _runs(arrivals: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of those that follow one another, and how many they are."""
    first = count = 0
    for arrival in arrivals:
        if count and arrival == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = arrival, 1
    if count:
        yield first, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A completed round.

    Attributes:
        number: Counted from 0.
        term: The coordinator that completed it; its buckets lie under this.
        size: How many members it has.
        buckets: Over how many buckets their ranks are spread.
        host: Where rank 0 is reached.
        port: A port that was free there.
        lease: That of what its members share, which goes soon after nobody coordinates any more.
        newest: Rank and last finished step of the member who has finished the most; None if nobody has finished any.
        in_steps: Whether any member goes from round to round by `rounds()`.
        since: Who has been lost, has left and is new since the round before, at most `SINCE_MOST` of each by name.
        checked: Its members check that they reach rank 0 before they take it.
        kept: Who was a member of the last round, and how its rank follows from that; None if that is not said.
        arrivals: Which arrival has which rank, of those who are not kept and come after them, so that no member need
            read its bucket; empty where that takes too much.
        revision: The revision of its commit.
    """

    number: int
    term: int
    size: int
    buckets: int
    host: str
    port: int
    lease: int | None = None
    newest: tuple[int, int] | None = None
    in_steps: bool = False
    since: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    checked: bool = False
    kept: Kept | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    revision: int = 0

    def rank_of(self, arrival: int, *, last: tuple[int, int] | None = None) -> int | None:
        """Return the rank of an arrival; None: it has none, or the round itself does not say so.

        Args:
            arrival: Which stands since before the round.
            last: The revision of the round that the same node was a member of last, and its rank there.
        """
        kept = self.kept
        if kept is not None and last is not None and last[0] == kept.revision:
            rank = kept.rank_of(last[1])
            if rank is not None:
                return rank
        rank = self.arrivals.rank_of(arrival)
        return None if rank is None else rank + (0 if kept is None else kept.count)

    def names_all(self, *, last: tuple[int, int] | None) -> bool:
        """Return whether a node that finds no rank of its own here has none; else its bucket tells."""
        kept = self.kept
        if kept is None:
            return bool(self.arrivals)
        is_known = last is not None and last[0] == kept.revision  # it may be kept, and not know what it was
        return is_known and (bool(self.arrivals) or kept.count == self.size)

    def pack(self) -> bytes:
        """Pack it into bytes."""
        kept = self.kept
        return pack(
            {
                # Apart: who knows nothing of those who are kept must not take the first of the others for rank 0.
                **(self.arrivals.plain() if kept is None else {"kept": kept.plain(), "others": self.arrivals.plain()}),
                **({"checked": True} if self.checked else {}),
                "number": self.number,
                "term": self.term,
                "size": self.size,
                "buckets": self.buckets,
                "host": self.host,
                "port": self.port,
                "lease": self.lease,
                **({"newest": self.newest} if self.newest is not None else {}),
                **({"in_steps": True} if self.in_steps else {}),
                **({"since": self.since} if any(self.since) else {}),
            }
        )

    @classmethod
    def unpack(cls, value: bytes, *, revision: int) -> Round:
        """Unpack what the key holds; `revision` is that at which it was written."""

        def build(plain: Mapping[str, Any]) -> Round:
            return _new_round(
                number=of(int, plain["number"]),
                term=of(int, plain["term"]),
                size=of(int, plain["size"]),
                buckets=of(int, plain["buckets"]),
                host=of(str, plain["host"]),
                port=of(int, plain["port"]),
                lease=maybe(int, plain.get("lease")),
                newest=_newest(plain.get("newest")),
                in_steps=of(bool, plain.get("in_steps", False)),
                since=_since(plain.get("since")),
                checked=of(bool, plain.get("checked", False)),
                kept=_kept(plain.get("kept")),
                arrivals=Arrivals.of_plain(plain.get("others", plain)),
                revision=revision,
            )

        return unpack("the round", value, build)


_new_round = constructor(Round)


def _kept(plain: Any) -> Kept | None:
    if plain is None:
        return None
    revision, count, gone, *_ = plain
    return Kept(revision=of(int, revision), count=of(int, count), gone=tuple(of(int, rank) for rank in gone))


def _newest(plain: Any) -> tuple[int, int] | None:
    return None if plain is None else (of(int, plain[0]), of(int, plain[1]))


def _since(plain: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    return ((), (), ()) if plain is None else (names_of(plain[0]), names_of(plain[1]), names_of(plain[2]))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The run is closed.

    Attributes:
        reason: As given by whoever closed it, perhaps empty.
        by: The node that did, or what else it was.
        given_up: Whether it is a verdict not to go on, rather than the end of the work.
        status: The exit status that every launcher ends with; 0 for none in particular.
    """

    reason: str
    by: str = ""
    given_up: bool = False
    status: int = 0

    def pack(self) -> bytes:
        """Pack it into bytes."""
        verdict = {"given_up": True, "status": self.status} if self.given_up else {}
        return pack({"reason": self.reason, "by": self.by, **verdict})

    @classmethod
    def unpack(cls, value: bytes) -> Closed:
        """Unpack what the key holds."""

        def build(plain: Mapping[str, Any]) -> Closed:
            return cls(
                reason=of(str, plain["reason"]),
                by=of(str, plain["by"]),
                given_up=of(bool, plain.get("given_up", False)),
                status=of(int, plain.get("status", 0)),
            )

        return unpack("the closing", value, build)


_WITH = "with/"  # no node is called so: names have no slash
WITH = "nodes with "  # and then the attribute: who is refused, in a status


def ban_name(where: str) -> str:
    """The name of a ban of all nodes with an attribute and value, "rack=17"; that of one node is the node's id."""
    return f"{_WITH}{where}"


def ban_names(node_id: str, attributes: Mapping[str, str]) -> tuple[str, ...]:
    """The names of all bans that keep such a node out, its own first."""
    return node_id, *(ban_name(f"{name}={value}") for name, value in attributes.items())


def ban_among(bans: Mapping[str, Ban], node_id: str, attributes: Mapping[str, str]) -> Ban | None:
    """The one of these bans that keeps such a node out, if there is one."""
    return next((bans[name] for name in ban_names(node_id, attributes) if name in bans), None) if bans else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """A node may not join.

    Attributes:
        reason: As given by whoever banned it, perhaps empty.
        by: Who did.
        now: Whether it was put out of its round at once, rather than kept out of the next one.
        lasts: Seconds from when it was written; then it ends by itself. None: it lasts until it is lifted.
        left: How many of these are left, in a status.
        where: The attribute and value, "rack=17", that it is a ban of; empty if it is one of a single node.
    """

    reason: str
    by: str = ""
    now: bool = False
    lasts: float | None = None
    left: float | None = None
    where: str = ""

    def pack(self) -> bytes:
        """Pack it into bytes."""
        lasts = {} if self.lasts is None else {"lasts": self.lasts}
        where = {"where": self.where} if self.where else {}
        return pack({"reason": self.reason, "by": self.by, "now": self.now, **lasts, **where})

    @classmethod
    def unpack(cls, value: bytes) -> Ban:
        """Unpack what the key holds."""
        return unpack(
            "a ban",
            value,
            lambda plain: cls(
                reason=of(str, plain["reason"]),
                by=of(str, plain["by"]),
                now=of(bool, plain.get("now", False)),
                lasts=maybe(float, plain.get("lasts")),
                where=of(str, plain.get("where", "")),
            ),
        )

    def __str__(self) -> str:
        by = (f", as all nodes with {self.where}," if self.where else "") + (f" by {self.by}" if self.by else "")
        span = "" if self.lasts is None else f" for {in_words(self.lasts)}"
        if self.left is not None:
            span = f" for {in_words(self.left)} more"
        return f"banned{by}{span}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the next round is, as the coordinator sees it.

    Attributes:
        phase: Where the run is.
        round: The number of the last completed round; -1 for none.
        joined: Nodes that have arrived for the next round.
        needed: How many it takes.
        capacity: How many there is room for.
        live: Members of the last round that are still in it.
        waiting: Arrivals that a regroup now would admit.
        spares: Arrivals for which there is no room.
        spares_after: Newcomers that arrived after this revision are the spares; None if there are none, or if
            `spare_ids` has them. Where an order chooses more of them than can be named, each newcomer may be one: 0.
        last_call_left: Seconds of last call that were left when this was written; None if it does not run.
        lost: Members of the last round that have died.
        lost_ids: The first of them by name, at most `NAMED_MOST`.
        departed: Members of the last round that have left it.
        departed_ids: The first of them by name.
        last_arrival: The latest arrival that was taken into account: those up to it stood when this was written.
        problem: Why no round completes though everything is there for one: a `rank_order` that fails, say. Else empty.
        spare_ids: The spares by name, where an order chooses who they are, if they are at most `NAMED_MOST`.
        absent: Who is not here, and for how long.
        given_up: Which round those who wait have given up, and why, in words; empty if none.
        why_lost: Of members that were dropped though they are alive, the first by name, each with why.
        standstill: That no member gets on, in words; else empty.
        left_early: Whether any of those who have left did so elsewhere than where all had agreed to stop.
    """

    phase: Phase
    round: int = -1
    joined: int = 0
    needed: int = 0
    capacity: int = 0
    live: int = 0
    waiting: int = 0
    spares: int = 0
    spares_after: int | None = None
    last_call_left: float | None = None
    lost: int = 0
    lost_ids: tuple[str, ...] = ()
    departed: int = 0
    departed_ids: tuple[str, ...] = ()
    last_arrival: int = 0
    problem: str = ""
    spare_ids: tuple[str, ...] = ()
    absent: Absent = field(default_factory=Absent)
    given_up: str = ""
    why_lost: tuple[tuple[str, str], ...] = ()
    standstill: str = ""
    left_early: bool = False

    def once_committed(self, number: int, *, size: int) -> Progress | None:
        """How far the run is once this round is; None if somebody is left over, or missing: the coordinator sees that.

        It is said with the round, so that each node is told both in one push.
        """
        if self.joined != size or self.absent.count:
            return None
        return Progress(phase=Phase.COMPLETE, round=number, needed=self.needed, capacity=self.capacity, live=size)

    def pack(self) -> bytes:
        """Pack it into bytes, by position: every node is sent this, so it is kept short."""
        return pack(
            (
                self.phase.value,
                self.round,
                self.joined,
                self.needed,
                self.capacity,
                self.live,
                self.waiting,
                self.spares,
                self.spares_after,
                self.last_call_left,
                self.lost,
                self.lost_ids,
                self.departed,
                self.departed_ids,
                self.last_arrival,
                self.problem,
                self.spare_ids,
                self.absent.plain(),
                self.given_up,
                self.why_lost,
                self.standstill,
                self.left_early,
            )
        )

    @classmethod
    def unpack(cls, value: bytes) -> Progress:
        """Unpack what the key holds."""

        def build(plain: Sequence[Any]) -> Progress:
            phase, round, joined, needed, capacity, live, waiting, spares = row_of(_COUNTS, plain[:8])
            after, left = plain[8:10]
            lost, ids, gone, gone_ids, last_arrival, problem, spare_ids = row_of(_WHO, plain[10:17])
            absent = plain[17] if len(plain) > 17 else None
            given_up = plain[18] if len(plain) > 18 else ""
            why_lost, standstill = plain[19:21] if len(plain) > 20 else ((), "")
            left_early = plain[21] if len(plain) > 21 else False
            return _new_progress(
                phase=_phase_of(phase),
                round=round,
                joined=joined,
                needed=needed,
                capacity=capacity,
                live=live,
                waiting=waiting,
                spares=spares,
                spares_after=maybe(int, after),
                last_call_left=maybe(float, left),
                lost=lost,
                lost_ids=names_of(ids),
                departed=gone,
                departed_ids=names_of(gone_ids),
                last_arrival=last_arrival,
                problem=problem,
                spare_ids=names_of(spare_ids),
                absent=Absent.of_plain(absent),
                given_up=of(str, given_up),
                why_lost=tuple((of(str, node_id), of(str, why)) for node_id, why in why_lost),
                standstill=of(str, standstill),
                left_early=of(bool, left_early),
            )

        return unpack("the progress", value, build)


_new_progress = constructor(Progress)
_COUNTS: Final = (str, *(int,) * 7)  # the kinds of its first columns ...
_WHO: Final = (int, list, int, list, int, str, list)  # ... and of others


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every node watches.

    `progress_at` is when the progress came, on this node's clock; `progress_found`, that it had been written before.
    """

    coordinator: Coordinator | None = None
    round: Round | None = None
    closed: Closed | None = None
    progress: Progress | None = None
    progress_at: float = 0.0
    progress_found: bool = False
    bans: Mapping[str, Ban] = field(default_factory=lambda: MappingProxyType({}))
    stop: Stop | None = None
    drains: Mapping[str, Leaving] = field(default_factory=lambda: MappingProxyType({}))
    resized: Resized | None = None
    questions: Mapping[str, Question] = field(default_factory=lambda: MappingProxyType({}))

    def ban_of(self, node_id: str, attributes: Mapping[str, str]) -> Ban | None:
        """The ban that keeps such a node out: its own, or else one of an attribute."""
        return ban_among(self.bans, node_id, attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A node is to leave, by a moment on this node's clock; the revision is that of the announcement."""

    until: float
    reason: str
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a node learns from a round that took it in."""

    round: Round
    rank: int


# -------------------------------------------------------------------------------------------------- changes


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """So many arrivals would be admitted if the members met again now; 0 if they have gone away."""

    count: int


@dataclass(frozen=True, slots=True)
class NodesLost:
    """So many members of the round have died since it completed; the first of them by name, at most 64.

    `addresses` says where each of these was, and `reasons` why it is not here any more, as far as that is known.
    """

    count: int
    node_ids: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class NodesLeft:
    """So many members have left the round since it completed; the first of them by name, at most 64."""

    count: int
    node_ids: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)


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


Change = NodesWaiting | NodesLost | NodesLeft | Draining | Resized | Closed | Dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOf:
    """How far a member has come.

    Attributes:
        step: The last step that it has begun; None before the first.
        age: Seconds since then.
        rate: Steps a second, lately.
        busy: What it is busy with, as it has said; empty if it is not.
    """

    step: int | None
    age: float
    rate: float
    busy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as it stands in the store.

    Attributes:
        run_id: Which run.
        round: The number of the last completed round; None if there was none.
        phase: Where it is.
        reason: What it waits for, in words.
        members: The live members of the last round, by rank.
        waiting: Nodes that have arrived for the next round, in order of arrival.
        spares: Those among them for whom there is no room.
        coordinator: The node that decides now, or None.
        world_size: The size of the last round; 0 if there was none.
        bans: The nodes that are banned: by whom, and why.
        bans_where: The attributes with a value, "rack=17", whose nodes are banned, also those that come later.
        settings: What all nodes of the run have agreed on, by name; empty before the first one has come.
        bootstrap_address: Rank 0's host and port, or None.
        closed: Why it was closed, or None.
        refused: Nodes that may not join, and why: those that are banned, and those whose health check failed.
        releases: How many of the nodes that are here are of which release.
        missing: Nodes that are not here, the first of them by name, and what is known of each: "lost 41 s ago".
        addresses: Where each node is reached, or was, of those that are here and those that are missing.
        accused: Members of whom another one says that they do not answer: who, by whom, and why.
        draining: Nodes that are to leave, and what was said of it: within how many seconds, and why.
        resized: The last resize of the run, as long as no round has begun with it; else None.
        absent: The same nodes, as data: how, since when, and why.
        absent_count: How many they are, also beyond those that are named.
        waited: Seconds for which too few nodes have waited for a round; None if nobody waits, or there are enough.
        since: The hour at which each node that is here arrived, by its own clock, in seconds since 1970.
        steps: How far each member has come that has said so, as of now.
    """

    run_id: str
    round: int | None
    phase: Phase
    reason: str
    members: tuple[Participant, ...]
    waiting: tuple[str, ...]
    spares: tuple[str, ...]
    coordinator: str | None
    world_size: int = 0
    bans: Mapping[str, Ban] = field(default_factory=lambda: MappingProxyType({}))
    bans_where: Mapping[str, Ban] = field(default_factory=lambda: MappingProxyType({}))
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    bootstrap_address: tuple[str, int] | None = None
    closed: str | None = None
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    releases: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    missing: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    accused: tuple[tuple[str, str, str], ...] = ()
    draining: Mapping[str, tuple[float, str]] = field(default_factory=lambda: MappingProxyType({}))
    resized: Resized | None = None
    absent: tuple[Missing, ...] = ()
    absent_count: int = 0
    waited: float | None = None
    since: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    steps: Mapping[str, StepOf] = field(default_factory=lambda: MappingProxyType({}))


# ------------------------------------------------------------------------------------------------ settings


def pack_settings(shared: Mapping[str, Any]) -> bytes:
    """Pack what all nodes of a run must agree on; equal settings give equal bytes."""
    return pack(dict(sorted(shared.items())))


def unpack_settings(value: bytes) -> dict[str, Any]:
    """Unpack what the key holds."""
    return unpack("the settings of the run", value, dict)
