"""Checks every change of the store as it is made, against the promises.

It keeps its own books, from its own watch, which no message delays. It shares no code with the product but the reading
of records.
"""

from dataclasses import dataclass
from typing import Protocol

import msgpack

from rdzv.core.decision import Rules
from rdzv.core.keys import Keys
from rdzv.core.round import Member, Participant, Round
from rdzv.core.state import NodeRecord, Progress
from store.messages import Event

__all__ = ["Checker", "Committed", "Violation"]

PROMPTLY = 0.8  # seconds for an election, a takeover and a commit, without the latency of the messages


class Scene(Protocol):
    """The checker's access to the simulated world.

    Attributes:
        disturbed_until: The time until which the effects of the last fault may last.
        replay: The command that replays the story.
    """

    disturbed_until: float
    replay: str

    @property
    def now(self) -> float:
        """True time."""
        ...

    def say(self, what: str, /) -> None:
        """Write one line of the trace."""
        ...


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed round."""

    round: Round
    ranks: dict[str, int]
    arrivals: dict[str, int]
    at: float


class Checker:
    """The books of one run.

    Args:
        world: The world of the run.
        keys: The run's keys.
        rules: The run's settings.
        promptly: The time limit in seconds for acts that need no wait.
        grain: The error in seconds of a last call's length by the coordinator's clock.
    """

    def __init__(
        self, world: Scene, keys: Keys, rules: Rules, *, grain: float = 0.0, promptly: float = PROMPTLY
    ) -> None:
        self.world, self.keys, self.rules, self.grain, self.promptly = world, keys, rules, grain, promptly
        self.records: dict[str, NodeRecord] = {}
        self.rounds: dict[int, Committed] = {}  # by revision: rounds of two stores may have one number
        self.last: Committed | None = None
        self.closed = self.was_closed = False  # in this store, and in this or an earlier one
        self.lost: Committed | None = None  # the last round of a store that was lost
        self.term = 0
        self.in_office_since = 0.0
        self.enough_at: float | None = None
        self.clear_at = world.now  # time since which no member of the last round was live
        self.fenced_writes = 0
        self.writers_sign = True  # their values in the round's store carry their name, arrival and round
        self.said: Progress | None = None  # the last report of any coordinator
        self._values: dict[str, bytes] = {}

    def take(self, events: tuple[Event, ...]) -> None:
        """Process the events of one revision."""
        keys = self.keys
        self.overdue()
        for event in events:
            key = event.key
            if key.startswith(keys.accusations):
                continue
            if event.kind == "put":
                if key.startswith(keys.nodes):
                    node_id = key.removeprefix(keys.nodes)
                    self.records[node_id] = NodeRecord.unpack(event.value, node_id=node_id, arrival=event.revision)
                    self._count()
                elif key == keys.round:
                    self._commit(Round.unpack(event.value, revision=event.revision))
                elif key == keys.closed:
                    self.closed = self.was_closed = True
                    self.world.say("closed")
                elif key == keys.coordinator:
                    self.term = event.create_revision
                    self.in_office_since = self.world.now
                    self.world.say(f"{event.value.decode()} coordinates, term {self.term}")
                elif key == keys.progress:
                    self._reported(Progress.unpack(event.value))
                elif key.startswith(keys.rounds):
                    self._values[key] = event.value
                elif key.startswith(keys.stores):
                    self._fenced_write(key, event.value)
            elif event.kind == "delete":
                if key.startswith(keys.nodes):
                    del self.records[key.removeprefix(keys.nodes)]
                    self.world.say(f"record of {key.removeprefix(keys.nodes)} gone")
                    self._count()
                elif key == keys.coordinator:
                    self.term = 0
                self._values.pop(key, None)

    def replaced(self) -> None:
        """Begin with an empty store, after one in memory was lost."""
        self.lost, self.last = self.last or self.lost, None
        self.closed, self.term, self.said, self.enough_at, self.clear_at = False, 0, None, None, self.world.now
        self.records.clear()
        self._values.clear()

    def learned(self, node_id: str, round: Round, rank: int, arrival: int) -> None:
        """Check the round that a node believes to be in."""
        committed = self.rounds.get(round.revision)
        self.require(committed is not None, f"{node_id} is in round {round.number}, which never was")
        assert committed is not None
        self.require(committed.round == round, f"{node_id} knows another round {round.number}: {round}")
        self.require(
            committed.ranks.get(node_id) == rank and committed.arrivals.get(node_id) == arrival,
            f"{node_id} has rank {rank} in round {round.number}, which is {committed.ranks}",
        )

    def refused_write(self, node_id: str, round: Round, arrival: int, *, refused: bool) -> None:
        """Check the outcome of a fenced write, as its writer saw it."""
        if not refused:
            self.fenced_writes += 1
            self.require(round.revision in self.rounds and arrival > 0, f"{node_id} wrote to no round")

    def overdue(self) -> None:
        """Check that a round completed in time if it could, unless there was a fault."""
        if self.closed or self.enough_at is None or self.live() or not self.term:
            return
        began = max(self.enough_at, self.in_office_since)
        if self.world.disturbed_until >= min(began, self.clear_at):
            return  # the check at the end of the simulation covers this case
        due = max(began + self.rules.last_call, self.clear_at) + self.promptly + self.grain
        self.require(
            self.world.now <= due,
            f"no round yet, though {len(self.waiting())} nodes have been enough for {self.world.now - began:.1f} s, "
            f"and the last call lasts {self.rules.last_call:.1f} s",
        )

    def resized(self) -> None:
        """Use the new rules."""
        self._count()

    def live(self) -> list[str]:
        """Return the live members of the last round that are still in it."""
        if self.last is None:
            return []
        arrivals = self.last.arrivals
        return [
            node_id
            for node_id, record in self.records.items()
            if not record.left and arrivals.get(node_id) == record.arrival
        ]

    def waiting(self) -> list[str]:
        """Return the nodes that have arrived for the next round."""
        arrivals = self.last.arrivals if self.last is not None else {}
        return [
            node_id
            for node_id, record in self.records.items()
            if not record.left and arrivals.get(node_id) != record.arrival
        ]

    def require(self, holds: bool, otherwise: str) -> None:
        """Stop the simulation if a promise does not hold."""
        if not holds:
            raise Violation(f"{otherwise} (at {self.world.now - 1000:.3f} s; replay with: {self.world.replay})")

    def _reported(self, progress: Progress) -> None:
        """Check that no report takes back a loss or a departure of its round, whoever writes it (R5, R7)."""
        before, self.said = self.said, progress
        if before is None or before.round != progress.round:
            return
        for what in ("lost", "departed"):
            ids = f"{what}_ids"
            taken_back = set(getattr(before, ids)) - set(getattr(progress, ids))
            counts = getattr(before, what), getattr(progress, what)
            self.require(
                not taken_back and counts[0] <= counts[1],
                f"a report of round {progress.round} takes back that {sorted(taken_back)} are {what}: {counts[0]} "
                f"were, and now {counts[1]} are (R5)",
            )

    def _count(self) -> None:
        now = self.world.now
        if len(self.waiting()) < self.rules.needed:
            self.enough_at = None
        elif self.enough_at is None:
            self.enough_at = now
        if self.live():
            self.clear_at = float("inf")
        elif self.clear_at == float("inf"):
            self.clear_at = now

    def _commit(self, round: Round) -> None:
        """Check a commit at its revision."""
        rules, keys, require = self.rules, self.keys, self.require
        require(round.term == self.term, f"round {round.number} was committed in term {round.term}, not {self.term}")
        members = []
        roster = []
        for index in range(round.buckets):
            ranks_key, roster_key = (
                keys.ranks(round.number, round.term, index),
                keys.roster(round.number, round.term, index),
            )
            require(
                ranks_key in self._values and roster_key in self._values,
                f"round {round.number} was committed before its ranks",
            )
            members.extend(Member.unpack_all(self._values[ranks_key]))
            roster.extend(Participant.unpack_all(self._values[roster_key]))
        members.sort(key=lambda member: member.rank)
        self.world.say(f"round {round.number}: {[member.node_id for member in members]}, term {round.term}")
        require(not self.closed, f"round {round.number} was committed after the run was closed")
        number = self.last.round.number if self.last else -1
        require(round.number > number, f"round {round.number} came after round {number}")
        require([member.rank for member in members] == list(range(round.size)), f"ranks are {members}")
        require(len({member.node_id for member in members}) == round.size, f"a node has two ranks: {members}")
        require(
            rules.needed <= round.size <= rules.capacity and round.size % rules.unit == 0,
            f"round {round.number} has {round.size} nodes, not {rules.needed} to {rules.capacity} by {rules.unit}",
        )
        for member in members:
            record = self.records.get(member.node_id)
            require(
                record is not None and record.arrival == member.arrival and not record.left,
                f"round {round.number} took in arrival {member.arrival} of {member.node_id}; its record: {record}",
            )
        require(not self.live(), f"round {round.number} began while {self.live()} remained in round {number}")
        first = self.records[members[0].node_id]
        require((round.host, round.port) == (first.address, first.port), f"{round} does not meet at {first}")
        require(
            [(one.node_id, one.rank, one.address) for one in roster]
            == [(member.node_id, member.rank, self.records[member.node_id].address) for member in members],
            f"the roster of round {round.number} is {roster}",
        )
        if self.last is not None and rules.order.__name__ == "survivors_first":
            before = self.last.ranks
            kept = [before[member.node_id] for member in members if member.node_id in before]
            require(kept == sorted(kept), f"survivors changed their order from {before} to {members}")
        self._last_call_was_kept(round)
        self.last = self.rounds[round.revision] = Committed(
            round=round,
            ranks={member.node_id: member.rank for member in members},
            arrivals={member.node_id: member.arrival for member in members},
            at=self.world.now,
        )
        self.enough_at = None
        self._count()

    def _last_call_was_kept(self, round: Round) -> None:
        """Check that a last call was not cut short, unless no other node can or will come. `overdue` checks that it was
        not late.
        """
        self.require(self.enough_at is not None, f"round {round.number} was committed with too few nodes")
        assert self.enough_at is not None
        if self.last is None and self.lost is not None:
            return  # survivors of a lost store do not wait for the last call
        full = self.rules.round_size(len(self.waiting())) == self.rules.capacity
        nobody_else = self.rules.early_last_call and self.last is not None
        if full or nobody_else or round.size == self.rules.capacity or self.in_office_since > self.enough_at:
            return
        self.require(
            self.world.now >= self.enough_at + self.rules.last_call - self.grain,
            f"the last call of round {round.number} lasted {self.world.now - self.enough_at:.2f} s "
            f"instead of {self.rules.last_call:.2f} s",
        )

    def _fenced_write(self, key: str, value: bytes) -> None:
        if not self.writers_sign:
            return
        node_id, arrival, number = msgpack.unpackb(value)
        record = self.records.get(node_id)
        self.require(
            record is not None and record.arrival == arrival,
            f"{node_id} wrote {key} as arrival {arrival}, but its record is {record}",
        )
        self.require(
            self.last is not None and self.last.round.number == number,
            f"{node_id} wrote {key} after round {number} was over",
        )
