"""The faults of a full story: of nodes, their connections, the store, and its disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.node.link.role import ROLE_DISCONNECT_TTL, ROLE_TTL
from tests.sim.full_node import DISCONNECT_TTL, KEYS, NOTICED_WITHIN, TTL, Fuse, commits
from tests.sim.story import HELD_UP_MOST, Troubles

if TYPE_CHECKING:
    from store.messages import Event
    from tests.sim.full_node import Node
    from tests.sim.full_story import FullStory

__all__ = ["FullTroubles"]

HOW = ("kill", "power", "stop", "block", "reset", "cut", "partition", "quit", "thread", "tasks")


class FullTroubles(Troubles):
    """Strikes nodes, the store, and its disk.

    Attributes:
        fuse: A fault of the node that makes the awaited request.
    """

    felt_for = TTL + NOTICED_WITHIN

    def __init__(self, story: FullStory) -> None:
        super().__init__(story)
        self._story = story
        self._director = story.director
        self.fuse: Fuse | None = None
        # a held connection, and the prefix of the key whose change releases it
        self._held: tuple[str, str] | None = None

    def revision(self, events: tuple[Event, ...]) -> None:
        """Release a held connection if the awaited change has happened."""
        if self._held is not None and any(event.key.startswith(self._held[1]) for event in events if _tells(event)):
            self._let_go()

    def draw_seconds(self) -> float:
        """Draw a duration: up to some seconds, or about one of the TTLs."""
        if self._rng.random() < 0.4:
            return self._rng.choice((ROLE_TTL, TTL, DISCONNECT_TTL, ROLE_DISCONNECT_TTL)) + self._rng.uniform(0, 0.25)
        return self._rng.choice((0.1, 1.5, 5.0)) * self._rng.uniform(0.5, 1.5)

    def something_happens(self) -> None:
        """Make one random fault happen."""
        if self._story.calm:
            return
        self.count += 1
        faults = [self._strike_node] * 4 + [self._light_fuse] * 2 + [self.light_fuse_at_commit] * 2
        faults += [self._start_another] * 2
        faults += [self.stop_store, self.cut_store, self.partition_store]
        if self._story.durable:
            faults += [self.kill_store, self.kill_store, self.stall_disk, self.fill_disk]
        self._rng.choice(faults)()

    def _random_node(self) -> Node | None:
        """Return a random node; in half of the cases the coordinator."""
        alive = [node for node in self._story.alive() if node.refused is None]
        entry = self._cosmos.store.books.at(KEYS.coordinator, self._cosmos.store.books.revision)
        if entry is not None and self._rng.random() < 0.5:
            alive = [node for node in alive if node.name == entry.value.decode()] or alive
        return self._rng.choice(alive) if alive else None

    def _strike_node(self) -> None:
        node = self._random_node()
        if node is not None:
            self._strike(node, self._rng.choice(HOW), self.draw_seconds())

    def _light_fuse(self) -> None:
        """Strike a node before or after one of its next requests."""
        node = self._random_node()
        if node is not None:
            how, seconds = self._rng.choice(HOW), self.draw_seconds()
            node.fuse = Fuse(self._rng.randrange(12), lambda _: True, lambda who: self._strike(who, how, seconds))

    def light_fuse_at_commit(self) -> None:
        """Strike the node that commits the next round, before or just after the commit."""
        how = self._rng.choice(("hold", "hold", "hold", "stop", "kill"))
        # If it is held or stopped, its commit arrives around the time when another node takes over.
        seconds = ROLE_TTL * self._rng.uniform(0.6, 1.1)
        left = int(self._rng.random() < 0.25)
        self.fuse = Fuse(left, commits, lambda who: self._strike(who, how, seconds))

    def _strike(self, node: Node, how: str, seconds: float) -> None:
        if self._story.calm:
            return
        felt = {
            "kill": DISCONNECT_TTL,
            "power": TTL,
            "stop": seconds + TTL,
            "block": seconds + 1.0,
            "thread": seconds + TTL,
            "tasks": HELD_UP_MOST + 1.0,
            "partition": seconds + TTL + NOTICED_WITHIN,
            "hold": 2 * seconds + TTL + NOTICED_WITHIN,
        }
        self._story.disturbed(f"{node.name}: {how}, {seconds:.2f} s", lasting=felt.get(how, 2.0) + 1.5)
        match how:
            case "quit":
                node.quit()
                self._director.call_later(max(seconds, 1.0), self._story.start_again, node)
            case "hold":
                self._hold_until_something_happens(node, seconds * 2)
            case _:
                self.befall(node.process, how, seconds)

    def _hold_until_something_happens(self, node: Node, at_most: float) -> None:
        """Hold a node's messages until another node coordinates, leaves, or closes the run; they arrive after that."""
        self.hold(tuple(node.process.threads), self.draw_way(), at_most)
        key = self._rng.choice((KEYS.coordinator, KEYS.coordinator, KEYS.nodes, KEYS.nodes, KEYS.closed))
        (source,) = node.process.threads
        self._held = source, key
        others = [other for other in self._story.alive() if other is not node and other.awake and other.refused is None]
        if others and key != KEYS.coordinator:
            other, soon = self._rng.choice(others), self._rng.uniform(0.0, 0.3)
            self._later(soon, other.close_run if key == KEYS.closed else lambda: self._strike(other, "quit", 0.1))

    def _let_go(self) -> None:
        assert self._held is not None
        (source, key), self._held = self._held, None
        # A node that waits for the round learns of a close and withdraws. Only a quick commit meets the close alone.
        late = 0.5 if key == KEYS.closed else 10.0
        self._later(self._rng.uniform(0.0, late * self._cosmos.latency_most), lambda: self._cosmos.network.heal(source))

    def _start_another(self) -> None:
        self._story.disturbed("somebody comes", lasting=1.0)
        self._story.start(f"n{self._rng.randrange(self._story.rules.needed + 3)}")

    def fill_disk(self) -> None:
        """Fill the disk. Writes fail then, and nodes that fail are started again."""
        self._story.harsh = True
        super().fill_disk()


def _tells(event: Event) -> bool:
    """Return True if this event can release a held connection. The deletion of the coordinator's key does not."""
    return event.kind == "put" or event.key.startswith(KEYS.nodes)
