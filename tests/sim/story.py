"""The parts that all stories share: a seed, a world drawn from it, an outcome, and the faults until it is calm."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from rdzv.testing.machines import STORE
from store.limits import Limits
from store.messages import Event
from tests.sim.machines import Cosmos, HeardProcess, Seams, quiet_logs
from tests.support.faults import FaultyHost, Way

__all__ = ["Outcome", "Story", "Troubles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The counts of a story."""

    seconds: float
    faults: int
    starts: int  # of the store
    answers_checked: int
    lapses: int
    unanswered: int = 0
    rounds: int = 0
    fenced_writes: int = 0


class Story:
    """One story.

    Attributes:
        calm: True after the last fault.
        disturbed_until: The time until which the effects of the last fault may last.
        replay: The command that replays the story.
        durable: True if the store has a disk.
    """

    command: ClassVar[str]
    dice: ClassVar[str]
    histories: ClassVar[tuple[int, ...]]
    """Choices for the bytes of history that the store keeps. Some are so few that watches must begin again."""
    sessions: ClassVar[tuple[float, ...]]
    """Choices for the seconds that the store keeps a session. Some are so few that answers are lost."""

    on_disk: ClassVar[float] = 0.85
    """The share of stories whose store has a disk."""

    troubles: Troubles

    def __init__(self, seed: int, seams: Seams, trace: Callable[[str], None] | None) -> None:
        self.rng = rng = random.Random(f"{self.dice} {seed}")
        self.replay = f"python -m tests.sim {self.command} --seed {seed}"
        self.durable = rng.random() < self.on_disk
        self.limits = Limits(history_bytes_max=rng.choice(self.histories), session_ttl=rng.choice(self.sessions))
        self.cosmos = Cosmos(
            seed,
            replay=self.replay,
            durable=self.durable,
            limits=self.limits,
            seams=seams,
            trace=trace,
            on_revision=self._revision,
        )
        self.truth = self.cosmos.truth
        self.director = self.cosmos.timeline.new_host("the director")
        self.calm = False
        self.disturbed_until = 0.0

    @classmethod
    def play(
        cls, seed: int, *, seams: Seams | None = None, trace: Callable[[str], None] | None = None, **options: Any
    ) -> Outcome:
        """Play one seed to its end.

        Raises:
            Violation: A promise was broken; the message says which, when, and how to replay it.
        """
        seams = seams or Seams()
        with quiet_logs(), seams.plant():
            story = cls(seed, seams, trace, **options)
            began = story.now
            story.cosmos.store.start()
            try:
                counts = story.tell()
            finally:
                story.cosmos.end()
        return Outcome(
            seconds=story.now - began,
            faults=story.troubles.count,
            starts=story.cosmos.store.starts,
            answers_checked=story.truth.checked,
            lapses=story.truth.lapses,
            **counts,
        )

    def tell(self) -> dict[str, int]:
        """Play the story and check its end. Return further counts."""
        raise NotImplementedError

    def start(self, name: str) -> None:
        """Start a process of this name, if there is none."""
        raise NotImplementedError

    def _revision(self, events: tuple[Event, ...]) -> None:
        """Process the events of a revision."""
        raise NotImplementedError

    @property
    def now(self) -> float:
        """True time."""
        return self.cosmos.now

    def say(self, what: str) -> None:
        """Write one line of the trace."""
        self.truth.say(what)

    def disturbed(self, why: str, *, lasting: float) -> None:
        """Note a fault or another disturbance, and how long its effects may last."""
        self.say(why)
        self.disturbed_until = max(self.disturbed_until, self.now + lasting)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Schedule an action, which is skipped if it is calm by then."""
        self.director.call_later(seconds, lambda: None if self.calm else action())

    def quieten(self, *, lasting: float = 0.0) -> None:
        """End all faults of the network, the disk and the store."""
        self.calm = True
        self.disturbed("quiet from here on", lasting=lasting)
        store = self.cosmos.store
        self.cosmos.network.heal()
        if store.disk is not None:
            store.disk.stalled_until = 0.0
            store.disk.fail_next = 0
            store.disk.make_room()
        if store.leaving:
            store.die()
        if store.host is not None:
            store.host.resume()
        else:
            store.start()


PART_HELD_UP = 0.3  # the share of a process's tasks that are delayed ...
HELD_UP_MOST = 0.5  # ... by at most this many seconds


class Troubles:
    """Strikes processes, the network, the store and its disk.

    Attributes:
        count: The number of faults so far.
    """

    felt_for = 0.0
    """Seconds for which the effects of an outage of the store last."""

    def __init__(self, story: Story) -> None:
        self._rng = story.rng
        self._cosmos = story.cosmos
        self._later = story.later
        self._disturbed = story.disturbed
        self._start = story.start
        self.count = 0

    def draw_seconds(self) -> float:
        """Draw a duration."""
        raise NotImplementedError

    def draw_way(self) -> Way:
        """Draw the directions in which a connection is blocked."""
        return self._rng.choice((Way.BOTH, Way.BOTH, Way.UPWARD, Way.DOWNWARD))

    def befall(self, process: HeardProcess, how: str, seconds: float) -> None:
        """Strike a process with one of the faults."""
        network = self._cosmos.network
        match how:
            case "kill" | "power":
                process.die(silently=how == "power")
                self._later(seconds, partial(self._start, process.name))
            case "stop" | "block":
                process.pause(threads=how == "stop")
                self._later(seconds, process.resume)
            case "thread":  # the main loop runs on, but gets no news from that thread
                for thread in process.threads.values():
                    thread.pause()
                self._later(seconds, process.resume)
            case "tasks":  # each task is delayed separately, as by a late answer
                for host in (process.host, *process.threads.values()):
                    assert isinstance(host, FaultyHost), "as in any `FaultyWorld`"
                    for task in host.unfinished():
                        if self._rng.random() < PART_HELD_UP:
                            host.hold_up(task, self._rng.uniform(0.0, HELD_UP_MOST))
            case "reset" | "cut":
                for source in process.connection_names:
                    (network.reset if how == "reset" else network.cut)(source)
            case "partition":
                self.hold(process.connection_names, self.draw_way(), seconds)

    def hold(self, sources: tuple[str, ...], way: Way, seconds: float) -> None:
        """Block these connections for a while."""
        for source in sources:
            self._cosmos.network.partition(source, way=way)
            self._later(seconds, partial(self._let_pass, source))

    def _let_pass(self, source: str) -> None:
        if source != STORE or not self._cosmos.store.dark:
            self._cosmos.network.heal(source)

    def _away(self, what: str) -> float:
        seconds = self.draw_seconds()
        self._disturbed(f"{what} for {seconds:.2f} s", lasting=seconds + self.felt_for)
        return seconds

    def cut_store(self) -> None:
        """Reset all connections."""
        self._disturbed("all connections are reset", lasting=self.felt_for)
        self._cosmos.network.reset(STORE)

    def partition_store(self) -> None:
        """Cut the store off."""
        self.hold((STORE,), Way.BOTH, self._away("the store is cut off"))

    def stop_store(self) -> None:
        """Pause the store."""
        host = self._cosmos.store.host
        if host is not None:
            host.pause()
            self._later(self._away("the store stands still"), host.resume)

    def kill_store(self) -> None:
        """Kill the store, or its machine."""
        if self._cosmos.store.is_up:
            seconds = self._away("the store is away")
            self._cosmos.store.die(silently=self._rng.random() < 0.3)
            self._later(seconds, self.start_store)

    def start_store(self) -> None:
        """Start the store again, once it has ended."""
        if self._cosmos.store.is_up:  # it takes some time to leave
            self._later(1.0, self.start_store)
        else:
            self._cosmos.store.start()

    def stall_disk(self) -> None:
        assert self._cosmos.store.disk is not None
        self._cosmos.store.disk.stalled_until = self._cosmos.now + self._away("the disk takes nothing")

    def fill_disk(self) -> None:
        disk = self._cosmos.store.disk
        assert disk is not None
        seconds = self._away("the disk is full")
        disk.fill()
        self._later(seconds, disk.make_room)
