"""One seed, one story of nodes that train while the store in memory is lost again and again: several hosts.

An empty store begins after a moment, as at the next host. The coordinator may die with the store, members may be cut
off and work on, and fresh nodes may come first. Above the checks of `training_story.py`:

- No round of a new store completes while a member of an earlier store's round may be at work by its own clock (R2).
- No round completes in a store whose end was announced, as that of a host that is drained.
- The numbers of each process's rounds rise, and are above those of earlier stores (R4).
- The best knowledge of the lost store that a member of the first round, or a spare, has told holds in it: closing,
  bans, numbers of nodes, the tally. The truth is read from the books of the lost store, at the revision that this node
  had seen.

    python -m tests.sim hosts --seed 17        one story, told step by step
    python -m tests.sim hosts --seeds 0:1000   many, told if they fail
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from rdzv.config.resizing import unit_limits
from rdzv.core.state import Ban, LostStore, unpack_settings
from rdzv.errors import RendezvousError
from rdzv.membership import RendezvousInfo
from rdzv.node.run.run import Run
from store import StoreError
from store.messages import Event
from tests.sim.checker import Committed
from tests.sim.full_node import KEYS, NOTICED_WITHIN, TTL, Node
from tests.sim.full_story import OWN_CLOCK_GRAIN, FullStory
from tests.sim.machines import Seams
from tests.sim.trainer import Trainer
from tests.sim.training_story import TrainingStory, TrainingTroubles

__all__ = ["HostsStory"]

STORE_BACK_WITHIN = 60.0  # seconds for which nodes look for a store: longer than any outage here
ENDS_WITHIN = 5.0  # seconds after its end was announced, a store is gone, or its host has stayed
STARTED_AGAIN_AFTER = 2.0  # seconds, if a run is closed for this node only


class HostsStory(TrainingStory):
    """One story."""

    command, dice, on_disk = "hosts", "hosts story", 0.0
    url = "tcp://a,b,c:29400/job"
    troubles: HostsTroubles

    def __init__(self, seed: int, seams: Seams, trace: Callable[[str], None] | None) -> None:
        super().__init__(seed, seams, trace)
        self.settings["store_gone_timeout"] = STORE_BACK_WITHIN
        self.stores: dict[str, int] = {}  # by id, the order of the stores that have had a change
        self.anew = 0  # the store in which fresh nodes have begun the run anew, as the docs say that they can
        self.store_of: dict[int, str] = {}  # by the revision of a round
        self.last_in: dict[Node, int] = {}  # the number of the last round that a process has joined
        self.refused_at: dict[Node, float] = {}
        self.troubles = HostsTroubles(self)

    def joined(self, node: Node, info: RendezvousInfo) -> None:
        before = self.last_in.get(node, -1)
        self.truth.require(info.round > before, f"{node.name} is in round {info.round} after round {before} (R4)")
        self.last_in[node] = info.round
        super().joined(node, info)

    def alive(self) -> list[Node]:
        """Return the live nodes; without those that know of a closing which was lost with its store."""
        return [node for node in super().alive() if node.refused is None or self.checker.closed]

    def _revision(self, events: tuple[Event, ...]) -> None:
        if self.cosmos.store.store_id not in self.stores:
            self.stores[self.cosmos.store.store_id] = len(self.stores)
            if len(self.stores) > 1:
                self._replaced()
        super()._revision(events)

    def _replaced(self) -> None:
        self.checker.replaced()
        for of_one_store in (self.gone_at, self.gone, self.stops, self.begun_by):
            of_one_store.clear()
        self.disturbed("another store has begun", lasting=TTL + NOTICED_WITHIN)

    def _committed(self, last: Committed, before: Committed | None, waiting: set[str]) -> None:
        super()._committed(last, before, waiting)
        self.store_of[last.round.revision] = self.cosmos.store.store_id
        announced = self.cosmos.store.books.at(KEYS.moving, last.round.revision)
        self.truth.require(announced is None, f"{last.round} has begun in a store whose end was announced")
        knowing = [node for node in self._at(last) if self._knows(node)]
        if before is None and not any(_rank_of_knowledge(node)[1] >= 0 for node in knowing):
            self.anew = self.stores[self.cosmos.store.store_id]  # fresh nodes only: the run begins anew for them
        if not knowing:
            return
        for node in FullStory.alive(self):
            membership = node.node.membership
            if membership is not None and self._is_at_work(node):
                where = self.store_of[membership.round.revision]
                self.truth.require(
                    where == self.cosmos.store.store_id or self.stores[where] < self.anew,
                    f"round {last.round.number} has begun, and {node.name} may be at work in round "
                    f"{membership.round.number} of {where} (R2)",
                )
        if before is None:
            self._knowledge_holds(last, knowing)

    def _at(self, last: Committed) -> list[Node]:
        return [
            node for node in FullStory.alive(self) if last.arrivals.get(node.name) == node.node.part.arrival.revision
        ]

    def _knows(self, node: Node) -> bool:
        known = node.node.part.known
        return known is not None and known.store_id != self.cosmos.store.store_id

    def _is_at_work(self, node: Node) -> bool:
        """Return True if a node takes itself for a member, and its lease has not ended by its own clock."""
        membership, lease = node.node.membership, node.node.part.arrival.lease
        if isinstance(node, Trainer) and node.inside is None:
            return False  # it has left the round, and perhaps not heard the answer to its next arrival
        if membership is None or membership.over is not None or lease is None or node.client is None:
            return False
        sent_at = node.client.keep_alives.get(lease.id)
        granted = node.client.ttls.get(lease.id, 0.0)
        return sent_at is not None and node.process.node_thread.time() - sent_at < granted - OWN_CLOCK_GRAIN

    def _knowledge_holds(self, last: Committed, knowing: list[Node]) -> None:
        """Check that what the best-informed member knew holds, as it was in the store that was lost."""
        best = max(knowing, key=_rank_of_knowledge)
        known, books, require = best.node.part.known, self.cosmos.store.books, self.truth.require
        assert known is not None
        there = books.at(KEYS.lost_store, books.revision)
        told = None if there is None else LostStore.unpack_or_log(there.key, there.value)
        require(
            told is not None and not known.lost.outranks(told),
            f"{best.name} knows of {known}, and round {last.round.number} has begun without it",
        )
        assert told is not None
        if told.outranks(known.lost):  # a node that is not in the round knew better
            tellers = [one for node in FullStory.alive(self) if (one := node.node.part.known) and one.lost == told]
            if not tellers:
                return  # it has died, or has lost another store since
            known = tellers[0]
        was, at = self.truth.books_of(known.store_id), known.lost.revision
        require(was.at(KEYS.closed, at) is None, f"{best.name} knew that the run is closed; {last.round} (R8)")
        settings = was.at(KEYS.settings, at)
        if settings is not None and books.at(KEYS.resized, books.revision) is None:
            sizes = unit_limits(unpack_settings(settings.value))
            now = self.rules.needed, self.rules.capacity
            require(now == sizes, f"{best.name} knew of {sizes} nodes, and {last.round} has begun with {now}")
        bans = {key for key, ban in was.under(KEYS.bans, at).items() if Ban.unpack(ban.value).lasts is None}
        lifted = bans - books.now_under(KEYS.bans).keys()
        require(not lifted, f"{best.name} knew of {lifted}, which does not hold in {last.round}")
        counted, carried = was.at(KEYS.tally, at), books.at(KEYS.tally, books.revision)
        require(
            counted is None or (carried is not None and carried.value.startswith(counted.value)),
            f"{best.name} knew of the tally {counted}, and {last.round} has begun with {carried}",
        )

    def _look(self) -> None:
        super()._look()
        for node in FullStory.alive(self):
            over = node.refused is not None and not self.checker.closed and self.cosmos.store.is_up
            if over and self.now - self.refused_at.setdefault(node, self.now) > STARTED_AGAIN_AFTER:
                self.start_again(node)


class HostsTroubles(TrainingTroubles):
    """Also kills the process of the store, announces its end, bans, and counts in the run's tally."""

    _story: HostsStory

    def something_happens(self) -> None:
        """Make one random event happen."""
        if self._story.calm or self._rng.random() < 0.5:
            super().something_happens()
            return
        self.count += 1
        self._rng.choice((self._lose_store, self._lose_store, self._lose_store, self._ban))()
        if self._rng.random() < 0.5:
            self._count()

    def _count(self) -> None:
        if is_running := self._at_work():
            node = self._rng.choice(is_running)
            self._story.say(f"{node.name} counts")
            node.ask(partial(node.handler.change_counts, lambda before: before + b"1"))

    def _ban(self) -> None:
        if is_running := [node for node in self._at_work() if node.connected and isinstance(node, Trainer)]:
            node, link = self._rng.choice(is_running), None
            name = f"banned{self._rng.randrange(3)}"
            self._story.say(f"{name} is banned")
            link = node.node._link
            if link is not None:
                run = Run(link.store, KEYS, head=lambda: node.node.head)
                order: Callable[[str], Awaitable[object]] = run.ban if self._rng.random() < 0.7 else run.unban
                node.process.node_thread.start_task(_quietly(partial(order, name)))

    def _lose_store(self) -> None:
        """Kill the store, at random with its coordinator, with members cut off before, and after an order."""
        rng, story = self._rng, self._story
        if not self._cosmos.store.is_up:
            return
        if rng.random() < 0.4:
            rng.choice((self._resize, self._close, self._ban, self._ban))()
        if rng.random() < 0.4 and (node := self._random_node()) is not None:
            self._strike(node, rng.choice(("partition", "kill", "stop", "thread")), self.draw_seconds())
        if rng.random() < 0.3:
            self._announce_the_end()
            self._later(rng.choice((0.1, 1.0, 4.0)) * rng.random(), self._kill)
        else:
            self._later(rng.choice((0.0, 0.1, 0.5)) * rng.random(), self._kill)
        if rng.random() < 0.4:
            self._later(rng.uniform(0.0, 1.0), lambda: story.start(f"n{rng.randrange(story.rules.needed + 3)}"))

    def _announce_the_end(self) -> None:
        """Let the store reject arrivals and rounds, as its host does before it leaves."""
        connected = [node for node in self._story.alive() if node.awake and node.connected and node.node._link]
        if connected:
            node = self._rng.choice(connected)
            link = node.node._link
            assert link is not None
            self._story.disturbed("the end of the store is announced", lasting=ENDS_WITHIN + self.felt_for)
            node.process.node_thread.start_task(_quietly(partial(link.store.put, KEYS.moving, b"", ttl=ENDS_WITHIN)))

    def _kill(self) -> None:
        if not self._cosmos.store.is_up:
            return
        away = self._rng.choice((0.05, 0.3, 2.0)) * self._rng.random()
        self._story.disturbed(f"the store's host dies; the next serves in {away:.2f} s", lasting=away + self.felt_for)
        self._cosmos.store.die()
        if self._rng.random() < 0.3 and (node := self._random_node()) is not None:
            self._strike(node, "kill", self.draw_seconds())  # they were on one machine
        self._later(away, lambda: None if self._cosmos.store.is_up else self._cosmos.store.start())
        if self._rng.random() < 0.35:
            self._later(away + self._rng.choice((0.1, 1.0)) * self._rng.random(), self._kill)


async def _quietly(order: Callable[[], Awaitable[object]]) -> None:
    with contextlib.suppress(RendezvousError, StoreError):
        await order()  # called here: a process that dies before this task begins leaves no coroutine behind


def _rank_of_knowledge(node: Node) -> tuple[int, int, int]:
    known = node.node.part.known
    return (0, -1, 0) if known is None else (known.lost.generation, known.lost.round, known.lost.revision)
