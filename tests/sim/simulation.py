"""One seed, one run: nodes come, crash, stand still, are cut off, leave and come again; then it is quiet: they meet.

python -m tests.sim --seed 17         one run, told step by step
python -m tests.sim --seeds 0:2000    many, told if they fail
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdzv.core.decision import Rules
from rdzv.core.ranks import by_arrival, by_name, survivors_first
from rdzv.core.state import Keys
from store.messages import Watch
from tests.sim.checker import PROMPTLY, Checker
from tests.sim.node import LEADER_TTL, TTL, Node, Seams
from tests.sim.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Outcome", "simulate"]

KEYS = Keys(prefix="/rdzv", run_id="job")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to, for those who ask whether anything happened at all."""

    rounds: int
    closed: bool
    faults: int
    fenced_writes: int


def simulate(seed: int, *, seams: Seams | None = None, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed to its end.

    Raises:
        Violation: A promise was broken; the message says which, when, and how to replay it.
    """
    return _Simulation(seed, seams or Seams(), trace).run()


class _Simulation:
    def __init__(self, seed: int, seams: Seams, trace: Callable[[str], None] | None) -> None:
        self.world = World(seed, trace=trace)
        self.seams = seams
        self.rng = rng = self.world.rng
        unit = rng.choice((1, 1, 1, 2))
        needed = unit * rng.randint(1, 3 if unit == 1 else 2)
        self.rules = Rules(
            needed=needed,
            capacity=needed + unit * rng.choice((0, 1, 2, 5)),
            unit=unit,
            last_call=rng.choice((0.3, 1.0, 2.5)),
            early_last_call=rng.random() < 0.7,
            order=rng.choice((survivors_first, survivors_first, by_arrival, by_name)),
        )
        self.checker = Checker(self.world, KEYS, self.rules)
        self.patience = rng.choice((1e6, 1e6, 4.0))
        self.nodes: dict[str, Node] = {}
        self.world.say(f"seed {seed}: {self.rules}")
        self._observe()

    def run(self) -> Outcome:
        """Outcome first, then quiet."""
        world, rng = self.world, self.rng
        trouble = rng.choice((0.0, 2.0, 4.0, 5.0))
        count = self.rules.needed + rng.randint(0, 3)
        spread = rng.choice((0.05, 2.5, 4.0))
        for index in range(count):
            world.at(world.now + rng.uniform(0, spread), lambda index=index: self._start(index))  # type: ignore[misc]
        if trouble:
            world.calm = False
            world.fault_every = rng.choice((60, 150, 400))
            for _ in range(rng.randint(1, 5)):
                world.at(world.now + rng.uniform(0.3, trouble), self._something_happens)
            world.run(world.now + trouble)
        else:
            world.run(world.now + spread)
        self._settle(count)
        world.run(world.now)
        return Outcome(
            rounds=len(self.checker.rounds),
            closed=self.checker.closed,
            faults=world.faults,
            fenced_writes=self.checker.fenced_writes,
        )

    def _observe(self) -> None:
        """Let the checker see every revision as it is made."""
        world, checker = self.world, self.checker
        peer = world.new_peer()
        world.engine.connect(peer, session_id=b"checker", now=world.now)
        world.engine.apply(Watch(prefix=KEYS.root), peer=peer, request_id=1, acknowledged=0, now=world.now)
        world.observer = (peer, checker.take)

    def _start(self, index: int) -> None:
        """Start a node, or start it again."""
        name = f"n{index}"
        before = self.nodes.get(name)
        if before is not None and before.alive:
            return
        self.world.say(f"{name} starts")
        self.nodes[name] = Node(
            self.world,
            name,
            keys=KEYS,
            rules=self.rules,
            checker=self.checker,
            seams=self.seams,
            patience=self.patience,
        )

    def _alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def _something_happens(self) -> None:
        """Somebody does something, well or ill."""
        rng, alive = self.rng, self._alive()
        if not alive:
            return
        node = rng.choice(alive)
        match rng.choice(("strike", "strike", "out", "out", "start", "start", "close")):
            case "strike":
                node.strike()
            case "out":
                node.wants_out = True
                node.poke()
            case "start":
                self._start(rng.randint(0, self.rules.needed + 3))
            case _ if rng.random() < 0.4:
                node.close_run("enough")

    def _settle(self, count: int) -> None:
        """No more trouble: whoever is there comes to a round, in the time promised."""
        world, rules = self.world, self.rules
        world.calm = True
        world.say("quiet from here on")
        for index in range(count):
            self._start(index)
        for node in self._alive():
            node.patience = 1e6
            node.wants_out = False
            node.settle = True
            node.resume()
            node.poke()
        if world.faults:
            world.disturbed("the last trouble may be felt a little longer", lasting=3.0)
        # Whoever died is noticed within a TTL, and another one once a name that it held is free; then somebody takes
        # the role; and twice, because those who came late make the others meet again.
        began = world.now
        promised = 2.5 * TTL + LEADER_TTL + 2 * (rules.last_call + PROMPTLY) + 4.0
        while world.now < began + promised:
            world.run(world.now + 0.2)
            self.checker.overdue()
            if self._settled(began):
                return
        self.checker.require(
            False,
            f"still not settled {promised:.1f} s after the last trouble: "
            + "; ".join(f"{node.name} {self._state_of(node)}" for node in self._alive()),
        )

    def _settled(self, began: float) -> bool:
        """Whether everybody is in the one last round, or a spare, or knows that the run is closed."""
        alive, last = self._alive(), self.checker.last
        if self.checker.closed:
            return all(node.refused is not None for node in alive)
        if last is None or last.at < began:
            return False
        members = [node for node in alive if node.assignment is not None and node.assignment.round == last.round]
        return len(members) == last.round.size and all(node.spare for node in alive if node not in members)

    def _state_of(self, node: Node) -> str:
        if node.refused is not None:
            return "knows that the run is closed"
        if node.assignment is not None:
            return f"is in round {node.assignment.round.number}"
        return "is a spare" if node.spare else "waits"
