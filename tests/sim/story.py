"""What every story has: a seed, a world that is drawn from it, an outcome; and what may go wrong until it is calm."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rdzv.testing.machines import STORE
from rdzv.testing.network import Way
from store.limits import Limits
from tests.sim.machines import Cosmos, Seams, quiet_logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.messages import Event
    from tests.sim.machines import HeardProcess

__all__ = ["Outcome", "Story", "Troubles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a story came to."""

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
        calm: Whether nothing goes wrong any more.
        disturbed_until: When what went wrong last may still be felt.
        replay: The command that plays it again.
        durable: Whether the store has a disk.
    """

    command: ClassVar[str]
    dice: ClassVar[str]
    histories: ClassVar[tuple[int, ...]]
    """How many bytes of history the store may keep: so few that watches must begin anew."""
    sessions: ClassVar[tuple[float, ...]]
    """For how many seconds it may keep a session: so few that answers are lost."""

    troubles: Troubles

    def __init__(self, seed: int, seams: Seams, trace: Callable[[str], None] | None) -> None:
        self.rng = rng = random.Random(f"{self.dice} {seed}")
        self.replay = f"python -m tests.sim {self.command} --seed {seed}"
        self.durable = rng.random() < 0.85
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
        self.director = self.cosmos.timeline.host("the director")
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
        """Let it all happen, and check the end; what there is to count of it."""
        raise NotImplementedError

    def start(self, name: str) -> None:
        """Start a process of this name, if there is none."""
        raise NotImplementedError

    def _revision(self, events: tuple[Event, ...]) -> None:
        """Something has become true."""
        raise NotImplementedError

    @property
    def now(self) -> float:
        """True time."""
        return self.cosmos.now

    def say(self, what: str) -> None:
        """One line of the trace."""
        self.truth.say(what)

    def disturbed(self, why: str, *, lasting: float) -> None:
        """Something goes wrong, or its own way, and may be felt for so long."""
        self.say(why)
        self.disturbed_until = max(self.disturbed_until, self.now + lasting)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do this then, unless all is calm by then."""
        self.director.call_later(seconds, lambda: None if self.calm else action())

    def quieten(self, *, lasting: float = 0.0) -> None:
        """No more trouble from here on, with the network, the disk or the store."""
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


PART_HELD_UP = 0.3  # of the tasks of a process, where tasks are held up ...
HELD_UP_MOST = 0.5  # ... for at most so many seconds


class Troubles:
    """Strikes somebody, or something.

    Attributes:
        count: How often something has happened of itself.
    """

    felt_for = 0.0
    """Seconds for which it is felt that the store was away."""

    def __init__(self, story: Story) -> None:
        self._rng = story.rng
        self._cosmos = story.cosmos
        self._later = story.later
        self._disturbed = story.disturbed
        self._start = story.start
        self.count = 0

    def draw_seconds(self) -> float:
        """How long something lasts."""
        raise NotImplementedError

    def draw_way(self) -> Way:
        """Which way nothing passes."""
        return self._rng.choice((Way.BOTH, Way.BOTH, Way.UPWARD, Way.DOWNWARD))

    def befall(self, process: HeardProcess, how: str, seconds: float) -> None:
        """Let one of these things befall a process, for so long."""
        network = self._cosmos.network
        match how:
            case "kill" | "power":
                process.die(silently=how == "power")
                self._later(seconds, partial(self._start, process.name))
            case "stop" | "block":
                process.pause(threads=how == "stop")
                self._later(seconds, process.resume)
            case "thread":  # the main loop goes on, and does not hear from it
                for thread in process.threads.values():
                    thread.pause()
                self._later(seconds, process.resume)
            case "tasks":  # each task waits by itself, say for an answer that comes late
                for host in (process.host, *process.threads.values()):
                    for task in host.unfinished():
                        if self._rng.random() < PART_HELD_UP:
                            host.hold_up(task, self._rng.uniform(0.0, HELD_UP_MOST))
            case "reset" | "cut":
                for source in process.sources:
                    (network.reset if how == "reset" else network.cut)(source)
            case "partition":
                self.hold(process.sources, self.draw_way(), seconds)

    def hold(self, sources: tuple[str, ...], way: Way, seconds: float) -> None:
        """Let nothing pass for so long."""
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
        """All connections break."""
        self._disturbed("all connections are reset", lasting=self.felt_for)
        self._cosmos.network.reset(STORE)

    def partition_store(self) -> None:
        """Nobody reaches the store."""
        self.hold((STORE,), Way.BOTH, self._away("the store is cut off"))

    def stop_store(self) -> None:
        """The store stands still."""
        host = self._cosmos.store.host
        if host is not None:
            host.pause()
            self._later(self._away("the store stands still"), host.resume)

    def kill_store(self) -> None:
        """The store dies, or its machine."""
        if self._cosmos.store.up:
            seconds = self._away("the store is away")
            self._cosmos.store.die(silently=self._rng.random() < 0.3)
            self._later(seconds, self.start_store)

    def start_store(self) -> None:
        """It comes back, once it has gone."""
        if self._cosmos.store.up:  # it takes its time to leave
            self._later(1.0, self.start_store)
        else:
            self._cosmos.store.start()

    def stall_disk(self) -> None:
        """The disk takes nothing."""
        assert self._cosmos.store.disk is not None
        self._cosmos.store.disk.stalled_until = self._cosmos.now + self._away("the disk takes nothing")

    def fill_disk(self) -> None:
        """The disk is full."""
        disk = self._cosmos.store.disk
        assert disk is not None
        seconds = self._away("the disk is full")
        disk.fill()
        self._later(seconds, disk.make_room)
