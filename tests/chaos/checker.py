"""Pure: checks the lines that the nodes of a chaotic run have written against promises R2, R3, R5, R9, R21 and R23.

A *stay* is one node's time in one round: from `in` until it says that it leaves, or is told that it was dropped, or is
killed. The checks:

R3  All members of a round agree on its size, on rank 0's address and on the members. No rank is held twice.
R2  A write to a round that began after a node was in a later round is not acknowledged. So no two groups are current at
    once, even if a zombie believes so. And a node that no fault hit is out of its round before a later one completes.
R5  When a member is killed, every other stay in that round ends, or gets the loss, within a bounded time.
R21 No round has two steps at which members stop, and no member stops in the middle of one.
R23 A round ends in any other way only after a fault without an announcement.
R9  A node that stood still for longer than its TTL does not stay in its round.

Time limits count from the last fault of the node that is to be told, or of the store.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "HOST",
    "Fault",
    "Look",
    "Stay",
    "Violation",
    "check",
    "check_numbers",
    "check_stops",
    "check_stores",
    "false_alarms",
    "stays_of",
]

Line = dict[str, Any]

HOST = "host"
"""The kind of the faults of the host of a store in memory. Such a fault ends rounds, and excuses no overlap of two."""

SEEN_LATER = 3.0
"""In seconds. A fault just before a round completes may still end it, as it is noticed a little later."""


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a node, or of the store (`node` is None), and its time."""

    kind: str
    node: str | None
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Look:
    """A look at one of several hosts, which said between two times that it serves the store of this id."""

    store_id: str
    began: float
    ended: float


@dataclass(slots=True)
class Stay:
    """One node's time in one round."""

    node: str
    round: int
    rank: int
    size: int
    address: tuple[str, int]
    members: tuple[str, ...] | None
    began: float
    ended: float = float("inf")
    end: str = ""  # the line that ended it
    told: list[tuple[float, str, tuple[str, ...]]] = field(default_factory=list)


def stays_of(node: str, lines: list[Line], *, killed_at: float | None = None) -> list[Stay]:
    """Return all stays of one process, in order."""
    stays: list[Stay] = []
    for line in lines:
        current = stays[-1] if stays and not stays[-1].end else None
        what = line["what"]
        if what == "in":
            if current is not None:
                raise Violation(f"{node} is in round {line['round']}, and has not left {current.round}")
            members = line["members"]
            stays.append(
                Stay(
                    node=node,
                    round=line["round"],
                    rank=line["rank"],
                    size=line["size"],
                    address=tuple(line["address"]),
                    members=None if members is None else tuple(members),
                    began=line["at"],
                )
            )
        elif what == "told" and stays and line["round"] == stays[-1].round:
            # Also just after the stay has ended: a blocking node listens in one thread and leaves in another.
            stays[-1].told.append((line["at"], line["kind"], tuple(line["ids"])))
            if line["kind"] == "Dropped" and current is not None:
                current.ended, current.end = line["at"], "dropped"
        elif what in ("leaving", "closed") and current is not None:
            current.ended, current.end = line["at"], what
    if stays and not stays[-1].end and killed_at is not None:
        stays[-1].ended, stays[-1].end = killed_at, "killed"
    return stays


def check(
    stays: list[Stay],
    writes: list[tuple[str, Line]],
    faults: list[Fault],
    *,
    ttl: float,
    told_within: float,
    over_at: float,
) -> None:
    """Check a run against the promises.

    Args:
        stays: The stays of all processes.
        writes: The acknowledged writes, each with its node.
        faults: The faults.
        ttl: The TTL of the nodes' leases, in seconds.
        told_within: Seconds within which a death must be told if there is no other obstacle. The next coordinator may
            stand still at that time, and must be replaced first.
        over_at: The time of the last lines. Events that were due later are not missed.

    Raises:
        Violation: Names the promise and the lines that break it.
    """
    rounds: dict[int, list[Stay]] = defaultdict(list)
    for stay in stays:
        rounds[stay.round].append(stay)
    _check_agreement(rounds)
    first_in = {number: min(stay.began for stay in of_round) for number, of_round in rounds.items()}
    _check_exclusive(stays, writes, faults, first_in)
    _check_told(rounds, faults, told_within=told_within, over_at=over_at)
    _check_paused(stays, faults, ttl=ttl, told_within=told_within, over_at=over_at)


def check_stops(lines: list[tuple[str, Line]], faults: list[Fault]) -> None:
    """Check against the promises how members of `rounds()` have left their rounds.

    Args:
        lines: The lines of all processes, each with its node.
        faults: The faults without an announcement.

    Raises:
        Violation: Names the promise and the lines that break it.
    """
    stops: dict[int, dict[int, str]] = defaultdict(dict)  # by round: the node at each step
    began = {(node, line["round"]): line["at"] for node, line in lines if line["what"] == "in"}
    for node, line in lines:
        if line["what"] != "leaving":
            continue
        number, end = line["round"], line["end"]
        if end == "agreed":
            stops[number][line["step"]] = node
            if len(stops[number]) > 1:
                raise Violation(f"R21: round {number} has {len(stops[number])} steps to stop at: {stops[number]}")
            if line["begun"] is not None:
                raise Violation(f"R23: {node} had begun a step when all left round {number}: {line}")
        elif end != "closed":
            since = began[node, number] - SEEN_LATER
            if not any(fault.began <= line["at"] and fault.ended >= since for fault in faults):
                raise Violation(f"R23: nothing was done that could have ended round {number} so: {node}, {line}")


def check_stores(looks: list[Look]) -> int:
    """Return the number of stores that have served; at most one did at any moment.

    Raises:
        Violation: A store served while another one did. No store serves again after it has ended. So a store has served
            from the end of the first look at it to the beginning of the last one.
    """
    of_store: dict[str, list[Look]] = defaultdict(list)
    for look in looks:
        of_store[look.store_id].append(look)
    for store_id, its in of_store.items():
        since, until = min(look.ended for look in its), max(look.began for look in its)
        for look in looks:
            if look.store_id != store_id and since <= look.began and look.ended <= until:
                raise Violation(f"S13: the store {store_id} served from {since} to {until}, and meanwhile: {look}")
    return len(of_store)


def check_numbers(stays: list[Stay]) -> None:
    """Raise `Violation` if the numbers of the rounds of one process do not rise."""
    for earlier, later in itertools.pairwise(stays):
        if later.round <= earlier.round:
            raise Violation(f"R4: {later.node} was in round {later.round} after round {earlier.round}")


def false_alarms(stays: list[Stay], faults: list[Fault]) -> int:
    """Return the number of members that were lost without any other fault than reset connections."""
    lost = {
        (stay.round, node)
        for stay in stays
        for at, kind, nodes in stay.told
        for node in nodes
        if kind == "NodesLost"
        and not any(
            fault.kind != "cut"
            and fault.node in (node, None)
            and fault.began <= at
            and fault.ended >= stay.began - SEEN_LATER
            for fault in faults
        )
    }
    return len(lost)


def _check_agreement(rounds: dict[int, list[Stay]]) -> None:
    for number, of_round in rounds.items():
        if len({(stay.size, stay.address) for stay in of_round}) != 1:
            raise Violation(f"R3: the members of round {number} do not agree: {of_round}")
        if len({stay.rank for stay in of_round}) != len(of_round):
            raise Violation(f"R3: a rank of round {number} was had twice: {of_round}")
        rosters = {stay.members for stay in of_round if stay.members is not None}
        if len(rosters) > 1:
            raise Violation(f"R3: the members of round {number} do not agree on who they are: {rosters}")
        for roster in rosters:
            if len(set(roster)) != len(roster) or len(roster) != of_round[0].size:
                raise Violation(f"R3: round {number} of {of_round[0].size} has the members {roster}")
            for stay in of_round:
                if roster[stay.rank] != stay.node:
                    raise Violation(f"R3: rank {stay.rank} of round {number} is {roster[stay.rank]}'s: {stay}")


def _check_exclusive(
    stays: list[Stay], writes: list[tuple[str, Line]], faults: list[Fault], first_in: dict[int, float]
) -> None:
    numbers = sorted(first_in)
    for earlier, later in itertools.pairwise(numbers):
        if first_in[later] < first_in[earlier]:
            raise Violation(f"R2: round {later} was there before round {earlier}")
    over_at = {number: first_in[later] for number, later in itertools.pairwise(numbers)}
    for node, line in writes:
        if line["began"] > over_at.get(line["round"], float("inf")):
            raise Violation(f"R2, R9: {node} wrote to round {line['round']}, which was over: {line}")
    for stay in stays:
        over = over_at.get(stay.round, float("inf"))
        # A stopped node that goes on acts at first on what reached it before: it may enter a round that is over.
        meddled_with = any(
            fault.node in (stay.node, None)
            and fault.kind != HOST
            and fault.ended > stay.began - (SEEN_LATER if fault.kind == "pause" else 0)
            for fault in faults
        )
        if stay.end in ("leaving", "closed") and stay.ended > over and not meddled_with:
            raise Violation(f"R2: {stay.node} was in round {stay.round} when a later one completed: {stay}")


def _check_told(rounds: dict[int, list[Stay]], faults: list[Fault], *, told_within: float, over_at: float) -> None:
    for of_round in rounds.values():
        for dead in (stay for stay in of_round if stay.end == "killed"):
            for stay in of_round:
                if stay is dead or not stay.began < dead.ended < stay.ended:
                    continue
                heard = [at for at, kind, ids in stay.told if kind == "NodesLost" and dead.node in ids]
                deadline = _deadline(dead.ended, stay, faults, told_within)
                if deadline < over_at and min([stay.ended, *heard]) > deadline:
                    raise Violation(f"R5: {stay.node} was not told that {dead.node} is lost: {stay}")


def _check_paused(stays: list[Stay], faults: list[Fault], *, ttl: float, told_within: float, over_at: float) -> None:
    for stay in stays:
        for fault in faults:
            was_in = stay.node == fault.node and stay.began < fault.began < stay.ended
            if fault.kind == "pause" and was_in and fault.ended - fault.began > ttl + 1:
                deadline = _deadline(fault.ended, stay, faults, told_within)
                if deadline < over_at and stay.ended > deadline:
                    raise Violation(f"R9: {stay.node} stood still for longer than its TTL, and stayed: {stay}")


def _deadline(at: float, stay: Stay, faults: list[Fault], within: float) -> float:
    """Return the time by which an event at `at` must have been told in this stay."""
    deadline = at + within
    for fault in sorted(faults, key=lambda fault: fault.began):
        if fault.node in (stay.node, None) and fault.began < deadline and fault.ended > at:
            deadline = max(deadline, fault.ended + within)
    return deadline
