"""A run without a store: the test adds and removes nodes and asks for the coordinator's view and decisions.

It makes the events that a store would send, revision by revision, and keeps the keys that a store would keep, so that a
successor can take over from these alone.
"""

from typing import Any

from rdzv import Closed
from rdzv.core.decision import (
    CommitRound,
    EndJoining,
    Idle,
    JoinClock,
    Joiner,
    JoinerWaits,
    Rules,
    act_of_joiner,
    decide_round,
)
from rdzv.core.ranks import RankOrder, survivors_first
from rdzv.core.round import Member, Round
from rdzv.core.state import CurrentCoordinator, Head, NodeRecord, Progress
from rdzv.core.view import TermView
from store import Event

__all__ = ["NODES", "HandFed", "round_of"]

NODES = "/rdzv/job/nodes/"


class HandFed:
    """A run, and the view of its coordinator.

    Attributes:
        now: The time on the coordinator's clock; the test moves it.
        view: The coordinator's view of the run.
        stored: The nodes' keys as a store would hold them: by id, the revision and the record.
    """

    def __init__(
        self,
        *,
        needed: int = 2,
        capacity: int = 4,
        unit: int = 1,
        last_call: float = 30.0,
        early_last_call: bool = True,
        order: RankOrder = survivors_first,
        expected: tuple[str, ...] = (),
        tells_causes: bool = True,
    ) -> None:
        self.tells_causes = tells_causes
        self.rules = Rules(
            needed=needed,
            capacity=capacity,
            unit=unit,
            last_call=last_call,
            early_last_call=early_last_call,
            order=order,
            expected=expected,
        )
        self.now = 1000.0
        self.revision = 0
        self.closed = False
        self.stored: dict[str, tuple[int, bytes]] = {}
        self.round: Round | None = None
        self.members: list[Member] = []
        self.view = self._new_view()
        self.feed(Event(kind="synced", revision=0))

    def arrive(self, *names: str, **fields: Any) -> None:
        """Nodes arrive, one revision each."""
        for name in names:
            # A member of the last round that joins again knows of that round.
            known: dict[str, Any] = {"arrived_after": self.view.last_number} if name in self.view.members else {}
            told = {"address": name, "port": 1, **known, **fields}
            self.put(name, NodeRecord(node_id=name, incarnation="1", **told).pack())

    def leave(self, *names: str) -> None:
        """Nodes leave on their own account: each says so, and is gone."""
        for name in names:
            self.put(name, NodeRecord(node_id=name, incarnation="1", left=True).pack())
            self.die(name)

    def die(self, *names: str) -> None:
        """Nodes' leases lapse."""
        for name in names:
            self.revision += 1
            del self.stored[name]
            self.feed(Event(kind="delete", revision=self.revision, key=NODES + name))

    def put(self, name: str, value: bytes) -> None:
        """A node's key is written."""
        self.revision += 1
        self.stored[name] = (self.revision, value)
        self.feed(self.put_event(name))

    def feed(self, event: Event) -> None:
        """An event comes to the coordinator."""
        self.view.apply_node_event(event, now=self.now, last_call_timeout=self.rules.last_call)

    def play(self, story: str) -> None:
        """Several of these happen: "arrive a b, die a, leave b"."""
        for step in filter(None, story.split(", ")):
            what, *names = step.split()
            getattr(self, what)(*names)

    def decide(self) -> Idle | CommitRound:
        """Return the decision: the next round can be completed now, or the condition it waits for."""
        closed = Closed(reason="") if self.closed else None
        return decide_round(self.view, self.rules, Head(closed=closed), now=self.now)

    @property
    def progress(self) -> Progress:
        """Return the progress that the coordinator would publish now."""
        return self.decide().progress

    def completes(self) -> list[str] | None:
        """Return the members of the round that completes now, by rank; None if none completes."""
        decision = self.decide()
        return [record.node_id for record in decision.members] if isinstance(decision, CommitRound) else None

    def commit(self) -> list[str]:
        """Let the round complete that can; its members by rank."""
        decision = self.decide()
        assert isinstance(decision, CommitRound), f"nothing completes: {decision}"
        return self.complete(decision)

    def complete(self, decision: CommitRound, **fields: Any) -> list[str]:
        """Let this round complete; its members by rank."""
        self.revision += 1
        self.round = Round(
            number=decision.number,
            term=1,
            size=len(decision.members),
            buckets=1,
            host=decision.members[0].address,
            port=1,
            revision=self.revision,
            **fields,
        )
        self.members = [
            Member(node_id=record.node_id, rank=rank, arrival=record.arrival)
            for rank, record in enumerate(decision.members)
        ]
        self.view.note_round(self.round, self.members, now=self.now)
        return [member.node_id for member in self.members]

    def succeed(self, said: Progress | None, *, said_at: float | None = None) -> None:
        """Let another coordinator take over, from the stored keys and the progress that the last one published."""
        self.view = self._new_view()
        self.view.take_over(self.round, self.members, said, progress_at=self.now if said_at is None else said_at)
        self.snapshot()

    def reset(self) -> None:
        """The coordinator's watch has lost its history, and begins anew."""
        self.feed(Event(kind="reset", revision=0))
        self.snapshot()

    def snapshot(self) -> None:
        """All that is stored comes, by name, as a store sends it."""
        for name in sorted(self.stored):
            self.feed(self.put_event(name))
        self.feed(Event(kind="synced", revision=self.revision))

    def head(self, *, coordinator: bool = True, progress: Progress | None = None) -> Head:
        """Return the head of the run, as nodes read it."""
        return Head(
            coordinator=CurrentCoordinator(node_id="c", term=1) if coordinator else None,
            round=self.round,
            closed=Closed(reason="done", by="c") if self.closed else None,
            progress=progress or self.progress,
            progress_at=self.now,
        )

    def me(self, name: str, **known: Any) -> Joiner:
        """Return the knowledge that a waiting node has of itself."""
        return Joiner(arrival=self.stored[name][0], **known)

    def act_of_joiner(self, name: str, **known: Any) -> JoinerWaits | Round | EndJoining:
        """Return the result of `act_of_joiner` for a waiting node."""
        return act_of_joiner(self.me(name, **known), self.head(), now=self.now)

    def clock(self, timeout: float) -> JoinClock:
        """A node's join timeout, from now on."""
        return JoinClock(timeout, now=self.now)

    def _new_view(self) -> TermView:
        return TermView(NODES, needed=self.rules.needed, expected=self.rules.expected, tells_causes=self.tells_causes)

    def put_event(self, name: str) -> Event:
        """Return the watch event of a record's present state."""
        revision, value = self.stored[name]
        return Event(kind="put", revision=revision, key=NODES + name, value=value, create_revision=revision)


def round_of(*names: str, **rules: Any) -> HandFed:
    """A run whose first round these nodes have just completed."""
    run = HandFed(**{"needed": len(names), "capacity": len(names), **rules})
    run.arrive(*names)
    run.now += run.rules.last_call
    assert run.commit() == list(names)
    return run
