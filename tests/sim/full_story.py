"""One seed, one story of everything: handlers, clients, sessions, server and journal, on virtual time.

Nodes join, write, leave, and die. Processes stand still, or only their main loops. Connections are cut, delayed, and
half open. The store is killed, stalls, and is restarted from its disk. Clocks run at different rates. Then it is calm,
and a round must complete within the time that follows from the promises.

Three observers check it: `truth.py` the answers of every client (S1, S3, S4, S5), `checker.py` every committed revision
(R2, R3, R4, R7, R10, R11), and this module the knowledge of the nodes (R3, R5, R9).

    python -m tests.sim full --seed 17            one story, told step by step
    python -m tests.sim full --seeds 0:10000      many, told if they fail
"""

from collections.abc import Callable
from typing import Any

from rdzv.core.decision import Rules
from rdzv.core.ranks import rank_order_named
from rdzv.core.round import Participant
from rdzv.core.state import NodesLeft, NodesLost
from rdzv.membership import RendezvousInfo
from rdzv.node.link.role import ELECTION_MOST, ROLE_TTL
from rdzv.node.member.arrival_writer import TTL_MOST
from store.messages import Event
from tests.sim.checker import PROMPTLY, Checker
from tests.sim.full_node import DISCONNECT_TTL, KEYS, NOTICED_WITHIN, TTL, Node
from tests.sim.full_troubles import FullTroubles
from tests.sim.machines import Seams
from tests.sim.story import Story

__all__ = ["FullStory"]

LOOK_EVERY = 0.25  # seconds between two checks of the nodes
CLOCKS_APART = 1.04  # the ratio of the fastest to the slowest clock, and a little more
OWN_CLOCK_GRAIN = 0.05
# seconds for a loss to be noticed, reported and pushed without faults; a check and an election included
PUSHED_WITHIN = 2.5
PATIENCE = 1e5
TRIPS = 20  # successive messages of an election, a takeover and a commit


class FullStory(Story):
    """One story. Its public names are for its nodes and for its checker, to which it is the `Scene`."""

    command, dice = "full", "full story"
    url = "tcp://store/job"
    node_class: type[Node] = Node
    histories, sessions = (64 * 1024 * 1024, 64 * 1024 * 1024, 4_000, 1_500), (300.0, 300.0, 300.0, 2.5)

    def __init__(self, seed: int, seams: Seams, trace: Callable[[str], None] | None) -> None:
        super().__init__(seed, seams, trace)
        rng, limits = self.rng, self.limits
        self.harsh = limits.session_ttl < TTL  # a call may then fail for good, and a node may give up
        unit = rng.choice((1, 1, 1, 1, 2))
        needed = unit * rng.randint(1, 3 if unit == 1 else 1)
        order = rng.choice(("survivors", "survivors", "arrival", "name"))
        self.rules = Rules(
            needed=needed,
            capacity=needed + unit * rng.randint(0, 3 if unit == 1 else 1),
            unit=unit,
            last_call=rng.choice((0.3, 1.0, 3.0)),
            early_last_call=rng.random() < 0.7,
            order=rank_order_named(order),
        )
        self.settings: dict[str, Any] = {
            "min_nodes": needed,
            "max_nodes": self.rules.capacity,
            "last_call_timeout": self.rules.last_call,
            "early_last_call": self.rules.early_last_call,
            "rank_order": order,
            "node_unit": unit,
            "ttl": TTL,
            "disconnect_ttl": DISCONNECT_TTL,
        }
        self.patience = rng.choice((PATIENCE, PATIENCE, 6.0))
        grain = (CLOCKS_APART - 1) * self.rules.last_call + 0.05
        self.promptly = PROMPTLY + TRIPS * self.cosmos.latency_most
        self.checker = Checker(self, KEYS, self.rules, grain=grain, promptly=self.promptly)
        self.nodes: dict[str, Node] = {}
        self.gone_at: dict[tuple[str, int], float] = {}  # by node and arrival: the time when its record was deleted
        self.troubles: FullTroubles = FullTroubles(self)
        self.say(
            f"seed {seed}: {'durable' if self.durable else 'memory only'}, history {limits.history_bytes_max} bytes, "
            f"sessions {limits.session_ttl:g} s, {self.rules}"
        )

    def tell(self) -> dict[str, int]:
        rng, director, timeline = self.rng, self.director, self.cosmos.timeline
        began = self.now
        count = self.rules.needed + rng.randint(0, 2)
        spread = rng.choice((0.05, 1.5, 3.0))
        for index in range(count):
            director.call_later(rng.uniform(0, spread), self.start, f"n{index}")
        director.call_later(LOOK_EVERY, self._look)
        trouble = rng.choice((0.0, 4.0, 8.0, 12.0))
        if trouble:
            if rng.random() < 0.3:
                self.troubles.light_fuse_at_commit()
            for _ in range(rng.randint(1, 8)):
                director.call_later(rng.uniform(0.1, trouble), self.troubles.something_happens)
        timeline.run_until_time(began + max(trouble, spread))
        self._settle(count)
        return {"rounds": len(self.checker.rounds), "fenced_writes": self.checker.fenced_writes}

    def start(self, name: str) -> None:
        before = self.nodes.get(name)
        if before is not None and before.alive:
            return
        self.say(f"{name} starts")
        patience = PATIENCE if self.calm else self.patience
        self.nodes[name] = self.node_class(self, self.cosmos.process(name), join_timeout=patience, **self.settings)

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def gave_up(self, node: Node, error: Exception) -> None:
        """End a node's process that could not join in time, and start it again."""
        self.disturbed(f"{node.name} gives up: {error}", lasting=TTL + 1.0)
        self.truth.require(
            self.harsh or self.patience < PATIENCE, f"{node.name} has all the time, and gave up: {error}"
        )
        self.director.call_later(0.5, lambda: self.start_again(node))

    def start_again(self, node: Node) -> None:
        node.process.die(silently=False)
        self.start(node.name)

    def _revision(self, events: tuple[Event, ...]) -> None:
        """Process the events of a revision."""
        self.troubles.revision(events)
        for event in events:
            of_a_node = event.key.startswith(KEYS.nodes) and not event.key.startswith(KEYS.accusations)
            if event.kind == "delete" and of_a_node:
                name = event.key.removeprefix(KEYS.nodes)
                self.gone_at[name, self.checker.records[name].arrival] = self.now
        self.checker.take(events)
        last = self.checker.last
        if last is not None and last.round.revision == events[0].revision:
            # A member that arrived again for this round has another arrival by now, and does not count as gone.
            self.gone_at = {who: at for who, at in self.gone_at.items() if last.arrivals.get(who[0]) == who[1]}

    def joined(self, node: Node, info: RendezvousInfo) -> None:
        """Check the round that a node has joined (R3)."""
        membership = info._membership
        self.say(f"{node.name} is in round {info.round}, rank {info.rank} of {info.world_size}")
        self.checker.learned(node.name, membership.round, info.rank, membership.arrival)
        committed = self.checker.rounds[membership.round.revision]
        self.truth.require(
            (info.world_size, info.bootstrap_address)
            == (len(committed.ranks), (committed.round.host, committed.round.port)),
            f"{node.name} was given {info} of {committed} (R3)",
        )

    def check_roster(self, info: RendezvousInfo, roster: list[Participant]) -> None:
        """Check the participants that a node has read (R3)."""
        ranks = self.checker.rounds[info._membership.round.revision].ranks
        self.truth.require({one.node_id: one.rank for one in roster} == ranks, f"{roster} are not {ranks} (R3)")

    def _look(self) -> None:
        """Compare each node's knowledge with the facts."""
        self.director.call_later(LOOK_EVERY, self._look)
        self.checker.overdue()
        for node in self.nodes.values():
            if node.awake and node.process.went_on_at < self.now - LOOK_EVERY:
                self._look_at(node)

    def _look_at(self, node: Node) -> None:
        handler, membership, lease = node.handler, node.node.membership, node.node.part.arrival.lease
        if membership is None or membership.over is not None or node.process.node_thread.paused:
            return
        if lease is not None and node.client is not None:
            sent_at = node.client.keep_alives.get(lease.id)
            if sent_at is not None:
                silence, granted = node.process.node_thread.time() - sent_at, node.client.ttls[lease.id]
                self.truth.require(
                    granted <= max(TTL, TTL_MOST), f"{node.name} was granted a lease of {granted:g} s, not {TTL:g}"
                )
                # if the store was slow to answer, the granted ttl is longer than the configured one
                self.truth.require(
                    silence <= granted + OWN_CLOCK_GRAIN,
                    f"{node.name} believes to be in round {membership.round.number}, though it has renewed nothing for "
                    f"{silence:.2f} s of its own clock (R9)",
                )
        last = self.checker.last
        if last is None or last.round.revision != membership.round.revision or self.checker.closed:
            return
        for (name, arrival), at in self.gone_at.items():
            told = any(isinstance(change, NodesLost | NodesLeft) for change in node.heard) or node.node.is_joining
            if last.arrivals.get(name) == arrival and max(at, self.disturbed_until) < self.now - PUSHED_WITHIN:
                self.truth.require(
                    (told and node.heard_for is membership) or handler.num_nodes_changed() > 0 or node.node.is_joining,
                    f"{name} has been gone for {self.now - at:.2f} s, and {node.name} has not been told (R5)",
                )

    def _calm_down(self, count: int) -> None:
        self.quieten(lasting=NOTICED_WITHIN + 2.5 * TTL + ROLE_TTL)
        for node in list(self.nodes.values()):
            node.process.resume()
        for index in range(count):
            self.start(f"n{index}")

    def _settle(self, count: int) -> None:
        """End all faults, and check that all nodes reach a round within the promised time."""
        self._calm_down(count)
        timeline, began = self.cosmos.timeline, self.now
        # Dead connections are noticed. A dead node's lease expires, then that of a node that waits for its name. A node
        # is elected. Then there are two last calls, since nodes that came late make the others meet again.
        promised = (
            NOTICED_WITHIN + 2.5 * TTL + ROLE_TTL + 2 * (self.rules.last_call + self.promptly) * CLOCKS_APART + 4.0
        )
        while self.now < began + promised:
            timeline.run_until_time(self.now + 0.25)
            if self._settled():
                timeline.run_until_time(
                    self.now + 1.0
                )  # it must stay so; and keys of older rounds are deleted meanwhile
                if self._settled():
                    self._be_still()
                    self._check_leftover_keys()
                    self._lose_one()
                    return
        self.truth.fail(
            f"still not settled {promised:.1f} s after the last trouble: "
            + "; ".join(f"{node.name} {self._state_of(node)}" for node in self.alive())
        )

    def _settled(self) -> bool:
        """Return True if every node is in the one last round, or a spare, or knows that the run is closed."""
        alive, last = self.alive(), self.checker.last
        if self.checker.closed:
            return all(node.refused is not None for node in alive)
        if last is None:
            return False
        members = [node for node in alive if self._is_in(node, last.round.revision)]
        return len(members) == last.round.size and all(
            node.handler.reason.startswith("a spare") for node in alive if node not in members
        )

    def _is_in(self, node: Node, revision: int) -> bool:
        membership = node.node.membership
        return membership is not None and membership.over is None and membership.round.revision == revision

    def _check_leftover_keys(self) -> None:
        """Check that no keys of rounds before the last are left (R10)."""
        if self.checker.closed or self.checker.last is None or self.checker.last.at > self.now - 1.0:
            return
        round = self.checker.last.round
        kept = KEYS.round_prefix(round.number, round.term)
        left = [key for key in self.cosmos.store.books.now_under(KEYS.rounds) if not key.startswith(kept)]
        self.truth.require(not left, f"round {round.number} stands, and of older ones there is {left} (R10)")

    def _be_still(self) -> None:
        """Wait until all nodes are connected and there is a coordinator that has read everything."""
        timeline, deadline = self.cosmos.timeline, self.now + NOTICED_WITHIN
        while not all(node.connected for node in self.alive() if node.refused is None) and self.now < deadline:
            timeline.run_until_time(self.now + 0.25)
        timeline.run_until_time(self.now + (ROLE_TTL + ELECTION_MOST) * CLOCKS_APART + self.promptly)

    def _lose_one(self) -> None:
        """Kill a member, and check that the others are told within a second after its time to reconnect (R5)."""
        last = self.checker.last
        if self.checker.closed or last is None or last.round.size < 2:
            return
        timeline = self.cosmos.timeline
        members = [node for node in self.alive() if self._is_in(node, last.round.revision)]
        if len(members) < last.round.size:
            return  # a member that was cut off meanwhile has been dropped
        lost, *others = self.rng.sample(members, len(members))
        lost.process.die(silently=False)
        for node in others:
            node.stays = True
        began = self.now
        timeline.run_until_time(began + DISCONNECT_TTL * CLOCKS_APART + self.promptly)
        for node in others:
            told = [change for change in node.heard if isinstance(change, NodesLost) and lost.name in change.node_ids]
            self.truth.require(
                bool(told) and node.heard_for is not None and node.heard_for.round == last.round,
                f"{lost.name} died {self.now - began:.2f} s ago, and {node.name} has heard {node.heard} (R5)",
            )

    def _state_of(self, node: Node) -> str:
        if node.refused is not None:
            return "knows that the run is closed"
        membership = node.node.membership
        if membership is not None and membership.over is None:
            return f"is in round {membership.round.number}, as rank {membership.rank}"
        return f"waits: {node.handler.reason}"
