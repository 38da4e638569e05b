"""One seed, one story of nodes that train by `rounds()`: drained, resized, closed, failing, expelled and killed.

The world, its faults, and the checks of clients and revisions are those of `full_story.py`. This module adds checks
that are missing there (R21, R22, R23):

- If some members of a round begin a step, all do, unless one of them is lost, or leaves before it.
- A member that leaves as all have agreed does not count as lost, however late another one learns of the agreement.
- The decision about the step to stop at is written once, and is above every step that was begun.
- After a member was lost, or has left early, no other stays in the round's body. The same holds after a close.
- No report takes back a loss or a departure of its round, also over a takeover (`checker.py`).
- A drained member is out in time, and costs no other member a step. After a resize, the lowest ranks stay.
- `newest` is the member that has finished most steps. No member is told to regroup for a node of another round, nor of
  its own loss.

    python -m tests.sim training --seed 17        one story, told step by step
    python -m tests.sim training --seeds 0:1000   many, told if they fail
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from rdzv.config.resizing import unit_limits
from rdzv.core.round_life import EndKind
from rdzv.core.state import NodeRecord, unpack_settings
from rdzv.core.stopping import RoundStop
from rdzv.loop.rounds import Round
from store.messages import Delete, Event, Request, Transact
from tests.sim.checker import Committed
from tests.sim.full_node import DISCONNECT_TTL, KEYS, Fuse
from tests.sim.full_story import LOOK_EVERY, PUSHED_WITHIN, FullStory
from tests.sim.full_troubles import FullTroubles
from tests.sim.machines import Seams
from tests.sim.trainer import Trainer

__all__ = ["TrainingStory"]

OUT_WITHIN = PUSHED_WITHIN + DISCONNECT_TTL + 1.5
"""Seconds for a loss to end a body, also one that failed first and waits for news of a loss."""

LET_OUT_WITHIN, ALONE_OUT_WITHIN = 4.0, 10.0
"""Seconds for the members to agree and to reach the step, each of which takes up to a third of a second.
Where steps need no other member, the slowest may be many steps behind.
"""

HELD_UP = 0.4
"""The probability that a node thread is paused while the agreed step is announced."""

BOTH_ACCUSE = BOTH_STUCK = 2

STALL_TIMEOUT = 1.0
"""Seconds without a step, in stories whose coordinators look for members that are stuck."""

JUDGED_WITHIN = 2.0
"""Seconds after that until a coordinator has looked, and written the result."""


class TrainingStory(FullStory):
    """One story.

    Attributes:
        silent: True if bodies never call `check`.
        on_waiting: What such bodies do when nodes wait to join.
        alone: True if steps need no other member, so that some members finish before others.
        judged: True if members that begin no step while others do are removed from the round.
        total: The number of steps.
    """

    command = "training"
    node_class = Trainer
    troubles: TrainingTroubles

    def __init__(self, seed: int, seams: Seams, trace: Callable[[str], None] | None) -> None:
        super().__init__(seed, seams, trace)
        rng = self.rng
        self.silent = rng.random() < 0.2
        self.on_waiting: Literal["now", "wait"] = "wait" if self.silent and rng.random() < 0.6 else "now"
        self.alone = rng.random() < 0.4
        self.judged = self.alone and not self.silent and rng.random() < 0.7
        self.let_out_within = ALONE_OUT_WITHIN if self.alone else LET_OUT_WITHIN
        self.total = rng.choice((10**9, 40) if self.judged else (10**9, 10, 40))
        if self.judged:
            self._judge_those_that_are_stuck()
        self.stops: dict[int, RoundStop] = {}
        self.broken_at: dict[int, float] = {}  # by round: the time since which a member is missing in its steps
        self.rounds_left_early: set[int] = set()  # by a member, in any way, before an agreement of all
        self.begun_by: dict[int, dict[str, int]] = {}  # by round and name: the last step that was begun
        self.known: dict[str, int] = {}  # by incarnation: the last step that was finished, as far as the node can tell
        self.too_large_at: float | None = None
        self.troubles = TrainingTroubles(self)
        self.checker.writers_sign = False
        self.gone: set[str] = set()  # members of the last round that were lost, or have left, since its commit
        self.say(
            f"silent: {self.silent}, on_waiting: {self.on_waiting}, {self.total} steps"
            f"{' alone' if self.alone else ''}{', judged' if self.judged else ''}"
        )

    def _judge_those_that_are_stuck(self) -> None:
        """Have stuck members removed. With three members or more, two can be stuck while one makes progress."""
        rules = self.rules
        needed = max(rules.needed, rules.unit * -(-(BOTH_STUCK + 1) // rules.unit))
        self.rules = self.checker.rules = replace(rules, needed=needed, capacity=needed + rules.capacity - rules.needed)
        self.settings |= {"min_nodes": needed, "max_nodes": self.rules.capacity, "stall_timeout": STALL_TIMEOUT}

    def trainers(self) -> list[Trainer]:
        """Return the live trainers."""
        return [node for node in self.alive() if isinstance(node, Trainer)]

    def came_in(self, node: Trainer, round: Round) -> None:
        """A trainer has joined a round."""
        self.joined(node, round._info)

    def begun(self, node: Trainer, round: Round, step: int) -> None:
        """A trainer begins a step."""
        if node.node.membership is not round._membership or not self._stands(node.name, round._membership.arrival):
            return  # it was dropped without knowing it: no member waits for it
        self.begun_by.setdefault(round.number, {})[node.name] = step
        stop = self.stops.get(round.number)
        if stop is not None and stop.decided:
            self.truth.require(
                stop.step is not None and step < stop.step,
                f"{node.name} begins step {step} of round {round.number}, and {stop} was agreed on (R21)",
            )

    def came_out(self, node: Trainer, round: Round) -> None:
        """A trainer has left a round, and continues or has finished its loop."""
        ending = round.ending
        self.say(f"{node.name} is out of round {round.number} before step {node.step}: {ending}")
        self.known[node.node.part.incarnation] = node.known
        if ending is None:
            return
        self.truth.require(
            ending.kind is not EndKind.LOST or node.name not in ending.node_ids,
            f"{node.name} was told of its own loss, and not dropped: {ending}",
        )
        self.truth.require(
            ending.kind is not EndKind.LEFT or round.number in self.rounds_left_early or round.number in self.broken_at,
            f"{node.name} takes it for a loss that others have left round {round.number} as all had agreed (R21, R23)",
        )
        stop, begun = self.stops.get(round.number), self.begun_by.get(round.number, {}).get(node.name)
        if ending.kind is EndKind.AGREED and stop is not None and stop.step is not None and begun is not None:
            self.truth.require(
                node.step == min(stop.step, self.total),
                f"{node.name} has left round {round.number} before step {node.step}, and {stop} was agreed on (R21)",
            )

    def has_drained(self, node: Trainer) -> None:
        """A trainer's loop has ended because of a drain."""
        self.say(f"{node.name} has left, as was announced")
        self.director.call_later(1.0, lambda: node.process.die(silently=False))
        self.director.call_later(2.0, self.start, node.name)

    def _stands(self, name: str, arrival: int) -> bool:
        record = self.checker.records.get(name)
        return record is not None and record.arrival == arrival and not record.left

    def _revision(self, events: tuple[Event, ...]) -> None:
        before, waiting = self.checker.last, set(self.checker.waiting())
        for event in events:
            if event.key.startswith(KEYS.nodes) and not event.key.startswith(KEYS.accusations):
                self._node_changed(event)
            elif event.key == KEYS.settings and event.kind == "put":
                needed, capacity = unit_limits(unpack_settings(event.value))
                self.rules = self.checker.rules = replace(self.rules, needed=needed, capacity=capacity)
                self.checker.resized()
            elif event.key == KEYS.stop and event.kind == "put":
                self._stop_written(RoundStop.unpack(event.value))
        super()._revision(events)
        last = self.checker.last
        if last is not None and last is not before:
            self._committed(last, before, waiting)
            self.gone.clear()
        is_large = last is not None and not self.checker.closed and len(self.checker.live()) > self.rules.capacity
        self.too_large_at = (self.too_large_at or self.now) if is_large else None

    def _node_changed(self, event: Event) -> None:
        """Note if a member is missing in the steps of the round from now on."""
        name, last = event.key.removeprefix(KEYS.nodes), self.checker.last
        if event.kind == "delete":
            self.gone.add(name)
        if last is None or not self._stands(name, last.arrivals.get(name, -1)):
            return
        number, early = last.round.number, event.kind == "delete"
        stop = self.stops.get(number)
        if stop is None or not stop.decided:
            self.rounds_left_early.add(number)
        if event.kind == "put":
            record = NodeRecord.unpack(event.value, node_id=name, arrival=event.revision)
            early = record.left and not record.stopped
            if record.left:
                self.gone.add(name)  # a new process of its name may come before the record is deleted
            node = self.nodes[name]
            self.truth.require(
                not (record.stopped and isinstance(node, Trainer) and node.failed_in == number),
                f"{name} has failed in the middle of a step of round {number}, and says that it has stopped (R21)",
            )
        if early:
            self.say(f"{name} is missing in round {number}")
            self.broken_at.setdefault(number, self.now)

    def _stop_written(self, stop: RoundStop) -> None:
        before, last = self.stops.get(stop.round), self.checker.last
        require = self.truth.require
        self.say(f"{stop}")
        require(last is not None and last.round.number == stop.round, f"{stop} is about another round than the last")
        assert last is not None
        if before is not None and before.decided:
            better = before.for_newcomers and before.step is None and not stop.for_newcomers and stop.step is None
            require(better and stop.decided, f"{before} was decided, and then {stop} (R21)")
        begun = self.begun_by.get(stop.round, {})
        live = {name: step for name, step in begun.items() if self._stands(name, last.arrivals[name])}
        if stop.decided and not (self.checker.closed and stop.step is None):
            most = max(live.values(), default=None)
            require(most is None or (stop.step is not None and most < stop.step), f"{stop}, and begun is {live} (R21)")
        self.stops[stop.round] = stop
        if stop.decided:
            self.troubles.hold_up_one_that_is_to_hear()

    def _committed(self, last: Committed, before: Committed | None, waiting: set[str]) -> None:
        """Check that `newest` is the member that has finished most (R21), and that the lowest ranks stay (R23)."""
        records = self.checker.records
        known = {rank: self.known.get(records[name].incarnation, -1) for name, rank in last.ranks.items()}
        most = max(known.values())
        newest = None if most < 0 else (min(rank for rank, step in known.items() if step == most), most)
        self.truth.require(
            last.round.newest == newest, f"{last.round} names {last.round.newest}, and {known} have been finished (R21)"
        )
        if before is not None:
            # A node that was gone may have come back just now; the decision did not know that.
            for name in waiting & before.ranks.keys() - self.gone - last.ranks.keys():
                rank = before.ranks[name]
                self.truth.require(
                    all(before.ranks.get(member, rank) < rank for member in last.ranks),
                    f"{name} was to stay, of {before.ranks}, and {last.ranks} have (R23)",
                )

    def _look(self) -> None:
        super()._look()
        for node in self.trainers():
            round, still = node.inside, node.process.node_thread.paused
            if round is None or not node.awake or still or node.process.went_on_at >= self.now - LOOK_EVERY:
                continue
            broken_at = self.broken_at.get(round.number)
            if broken_at is not None and node.node.membership is round._membership:
                waits = self.now - max(broken_at, self.disturbed_until, node.process.went_on_at)
                self.truth.require(
                    waits <= OUT_WITHIN,
                    f"{node.name} is in round {round.number} still, {waits:.2f} s after a member was lost (R21, R22)",
                )
        if self.too_large_at is not None:
            since = self.now - max(self.too_large_at, self.disturbed_until)
            self.truth.require(
                since <= self.let_out_within,
                f"{self.checker.live()} are in a round still, {since:.2f} s after a resize to {self.rules.capacity}",
            )

    def drained(self, node: Trainer, within: float) -> None:
        """A drain was announced. If that is all, the node is out in time, and no member was interrupted (R23)."""
        round, began = node.inside, self.now
        if round is None or self.disturbed_until > began or round.ending is not None or within <= self.let_out_within:
            return

        def look() -> None:
            if self.disturbed_until > began or self.checker.closed or self.calm or not node.alive:
                return
            ending = round.ending
            self.truth.require(
                node.inside is None and ending is not None and ending.kind is EndKind.AGREED,
                f"{node.name} was to leave {self.let_out_within:g} s ago, and its round has come to {ending} (R23)",
            )

        self.director.call_later(self.let_out_within, look)

    def _settled(self) -> bool:
        last = self.checker.last
        if self.on_waiting == "wait" and last is not None and not self.checker.closed:
            live = self.checker.live()
            return bool(live) and all(self._is_in(self.nodes[name], last.round.revision) for name in live)
        return super()._settled()

    def _lose_one(self) -> None:
        """Let one member leave by a drain, then kill another. Check that no other stays in that body (R21, R23)."""
        if (members := self._members()) and self.on_waiting == "wait":
            self.start("late")  # this node has to wait
            self.cosmos.timeline.run_until_time(self.now + self.let_out_within)
        if members := self._members():
            self._see_out(members, EndKind.AGREED, self.rng.choice(members).leave)
        if len(members := self._members()) > 1:
            lost, *others = self.rng.sample(members, len(members))
            self._see_out(others, EndKind.LOST, lambda: lost.process.die(silently=False))

    def _members(self) -> list[Trainer]:
        """Return all members of the last round if all are in its body; otherwise an empty list."""
        last = self.checker.last
        if self.checker.closed or last is None:
            return []
        members = [node for node in self.trainers() if node.inside and node.inside.number == last.round.number]
        return members if len(members) == last.round.size else []

    def _see_out(self, members: list[Trainer], kind: EndKind, happens: Callable[[], object]) -> None:
        rounds = {node.name: node.inside for node in members}
        happens()
        self.cosmos.timeline.run_until_time(self.now + max(OUT_WITHIN, self.let_out_within) + self.promptly)
        for name, round in rounds.items():
            ending = None if round is None else round.ending
            self.truth.require(
                self.checker.closed or (ending is not None and ending.kind is kind),
                f"{name} is not out of its round, or for another reason than that it has {kind.value}: {ending}",
            )


class TrainingTroubles(FullTroubles):
    """Also drains, resizes, closes, fails and accuses."""

    _story: TrainingStory

    def something_happens(self) -> None:
        """Make one random event happen."""
        if self._story.calm:
            return
        if self._rng.random() < 0.4:
            super().something_happens()
            return
        self.count += 1
        ways = [self._drain] * 3 + [self._resize] * 2 + [self._fail] * 3 + [self._accuse] * 3 + [self._close]
        ways += [self._get_stuck] * 6 * self._story.judged
        self._rng.choice(ways)()

    def _at_work(self) -> list[Trainer]:
        return [node for node in self._story.trainers() if node.awake and node.inside is not None]

    def hold_up_one_that_is_to_hear(self) -> None:
        """At random, pause the node thread of a member. It may then read the decision and the departures at once."""
        is_running = [node for node in self._at_work() if not node.process.node_thread.paused]
        if is_running and self._rng.random() < HELD_UP:
            node, seconds = self._rng.choice(is_running), self._rng.uniform(0.1, 0.6)
            self._story.disturbed(f"{node.name}: its node thread stands still, {seconds:.2f} s", lasting=seconds + 0.5)
            node.process.node_thread.pause()
            self._director.call_later(seconds, node.process.node_thread.resume)

    def _drain(self) -> None:
        """Drain a node, which may also be waiting for a round."""
        is_running = self._at_work()
        if self._rng.random() < 0.4:
            is_running = [node for node in self._story.trainers() if node.awake and node.connected] or is_running
        if is_running:
            node, within = self._rng.choice(is_running), self._rng.choice((2.0, 30.0, 30.0))
            self._story.say(f"{node.name} is to leave within {within:g} s")
            if within <= self._story.let_out_within:
                self._story.disturbed("which may be too soon", lasting=within + 1.0)
            node.leave(within)
            self._story.drained(node, within)
            if self._rng.random() < 0.5:
                self._later(self._rng.uniform(0.0, 0.5), self._fail)

    def _resize(self) -> None:
        if is_running := self._at_work():
            rules, live = self._story.rules, len(self._story.checker.live())
            most = rules.needed + rules.unit * self._rng.randint(0, 3)
            if live > rules.needed and self._rng.random() < 0.5:
                most = live - rules.unit
            self._story.say(f"the run is resized to {most}")
            node = self._rng.choice(is_running)
            node.ask(partial(node.handler.resize, max_nodes=most))

    def _fail(self) -> None:
        """Let a member raise an error of its own in its next step."""
        if is_running := self._at_work():
            node = self._rng.choice(is_running)
            self._story.disturbed(f"{node.name} is about to fail", lasting=1.0 + DISCONNECT_TTL + 1.0)
            node.raises = True

    def _get_stuck(self) -> None:
        """Let two members at once begin no step for longer than allowed. A single look finds both."""
        if is_running := self._at_work():
            stuck = self._rng.sample(is_running, min(BOTH_STUCK, len(is_running)))
            lasting = STALL_TIMEOUT + JUDGED_WITHIN
            names = " and ".join(node.name for node in stuck)
            self._story.disturbed(f"{names} begin no step for {lasting:g} s", lasting=lasting + 1.0)
            for node in stuck:
                node.stuck_until = self._story.now + lasting

    def _close(self) -> None:
        """Close the run in an orderly way, and then strike members that are still at work."""
        if is_running := self._at_work():
            node = self._rng.choice(is_running)
            self._story.disturbed(f"{node.name} closes the run", lasting=0.0)
            node.close_run()
            for _ in range(self._rng.randint(0, 2)):
                self._later(self._rng.uniform(0.0, 0.5), self._rng.choice((self._fail, self._strike_node)))

    def _accuse(self) -> None:
        """Let two members accuse a third. The coordinator may die just then."""
        is_running = [
            node for node in self._at_work() if node.inside is not None and node.inside.world_size > BOTH_ACCUSE
        ]
        if not is_running:
            return
        first = self._rng.choice(is_running)
        assert first.inside is not None
        number, size = first.inside.number, first.inside.world_size
        accused = self._rng.randrange(size)
        by = [
            one
            for one in is_running
            if one.inside and (one.inside.number, one.inside.rank != accused) == (number, True)
        ]
        self._story.disturbed(f"rank {accused} of round {number} is accused", lasting=2.0)
        for node in by[:BOTH_ACCUSE]:
            assert node.inside is not None
            node.ask(partial(node.inside.accuse, accused, "it does not answer"))
        if self._rng.random() < 0.7:
            self.fuse = Fuse(self._rng.randrange(2), _expels, lambda who: self._strike(who, "kill", 3.0))


def _expels(request: Request[Any]) -> bool:
    """Return True if this request removes a member from the round."""
    return isinstance(request, Transact) and any(
        isinstance(one, Delete) and one.key.startswith(KEYS.nodes) for one in request.then
    )
