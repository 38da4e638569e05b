"""Goes through every state that a world can come to, each once.

A running program cannot be copied, but its process can: at each step but the last of those that are possible, the
process forks, and the child goes on from there, to the end of everything that follows, before the next step is tried.
All of these processes share one table of the states that were seen.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

from tests.sim.checker import Violation
from tests.sim.explorer.world import World, as_it_is, spell
from tests.sim.machines import quiet_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from store.messages import Request
    from tests.sim.explorer.world import Scenario, Step

__all__ = ["Explored", "explore", "retell", "walk"]

SLOTS = 1 << 22  # of the table; memory that is not touched costs nothing
TOLD_MOST = 60_000  # bytes of a story; what a pipe takes without a reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What a search has found.

    Attributes:
        states: How many different ones.
        steps: How many steps between them.
        ends: In how many of them nothing is left to happen.
        depth: Steps of the longest way.
        whole: Whether these are all; else the time was over, or a promise was broken.
        problem: The first promise that was found broken, how, and by which steps; empty if none was.
    """

    states: int
    steps: int
    ends: int
    depth: int
    whole: bool
    problem: str = ""

    def __str__(self) -> str:
        told = f"{self.states:,} states, {self.steps:,} steps, {self.ends:,} ends, up to {self.depth} steps deep"
        return told + ("" if self.whole else ", not all of them")


class _Count(IntEnum):
    STATES = 0
    STEPS = 1
    ENDS = 2
    DEPTH = 3
    LEFT_OUT = 4


class _Table:
    """What all processes of a search write to, one at a time: the states that were seen, and the counts."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, (SLOTS + len(_Count)) * 8)).cast("Q")

    def add(self, fingerprint: bytes) -> bool:
        """Note a state; False if it was seen before."""
        word = int.from_bytes(fingerprint[:8]) or 1
        slot = word % SLOTS
        while there := self._words[len(_Count) + slot]:
            if there == word:
                return False
            slot = (slot + 1) % SLOTS
        self._words[len(_Count) + slot] = word
        self.count(_Count.STATES)
        return True

    def count(self, what: _Count, more: int = 1) -> None:
        self._words[what] += more

    def raise_to(self, what: _Count, least: int) -> None:
        self._words[what] = max(self._words[what], least)

    def read(self, what: _Count) -> int:
        return self._words[what]


def explore(
    scenario: Scenario,
    *,
    seconds: float = float("inf"),
    mend: Callable[[Request[Any]], Request[Any]] = as_it_is,
    plant: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Explored:
    """Explore all that may come of a scenario.

    Args:
        scenario: What is to happen.
        seconds: After which what is left is left out.
        mend: Changes each request that nodes make.
        plant: Entered for as long as this lasts; with `mend`, where a bug can be planted.
    """
    table, deadline = _Table(), time.monotonic() + seconds
    with _still(), quiet_logs(), plant():
        problem = _in_child(lambda: _search(_begin(scenario, mend), table, deadline))
    return Explored(
        states=table.read(_Count.STATES),
        steps=table.read(_Count.STEPS),
        ends=table.read(_Count.ENDS),
        depth=table.read(_Count.DEPTH),
        whole=not table.read(_Count.LEFT_OUT) and not problem,
        problem=problem,
    )


def walk(
    scenario: Scenario,
    *,
    ways: int,
    mend: Callable[[Request[Any]], Request[Any]] = as_it_is,
    plant: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> str:
    """Go so many ways at random, each to its end; the first promise that was found broken, if any was."""
    with _still(), quiet_logs(), plant():
        for seed in range(ways):
            rng, world = random.Random(seed), World(scenario, mend=mend)
            try:
                while steps := world.steps():
                    world.take(rng.choice(steps))
            except Violation as violation:
                return str(violation)
            finally:
                world.end()
    return ""


def retell(scenario: Scenario, steps: str, *, mend: Callable[[Request[Any]], Request[Any]] = as_it_is) -> Iterator[str]:
    """Go by the steps of a way that was told, and tell what happens."""
    with _still(), quiet_logs():
        world = World(scenario, mend=mend)
        yield from world.story
        for word in steps.split():
            wanted = [step for step in world.steps() if spell([step]) == word]
            if not wanted:
                raise Violation(f"{word} is not possible here, but {spell(world.steps())}")
            what, index = wanted[0]
            yield f"--> {what}" + (f" {index}" if index >= 0 else "")
            told = len(world.story)
            world.take(wanted[0])
            yield from world.story[told:]
        world.end()


@contextlib.contextmanager
def _still() -> Iterator[None]:
    """Let the hour stand still, since it is written into records; and a handler in a forked child be none of a fork."""
    pid = os.getpid()
    with patch("time.time", lambda: 0.0), patch("os.getpid", lambda: pid):
        yield


def _begin(scenario: Scenario, mend: Callable[[Request[Any]], Request[Any]]) -> World:
    warm_up = World(scenario)  # what is imported or made at first use is not to tell two states apart
    while steps := warm_up.steps():
        warm_up.take(steps[0])
    world = World(scenario, mend=mend)
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, all memory that the processes share
    gc.disable()
    return world


def _search(world: World, table: _Table, deadline: float) -> str:
    """Explore everything from here on; what is wrong, if anything."""
    while table.add(world.fingerprint()):
        table.raise_to(_Count.DEPTH, len(world.path))
        steps = world.steps()
        if not steps:
            table.count(_Count.ENDS)
            break
        if time.monotonic() > deadline:
            table.count(_Count.LEFT_OUT)
            break
        table.count(_Count.STEPS, len(steps))
        for step in steps[:-1]:
            problem = _in_child(lambda step=step: _go_on(world, step, table, deadline))  # type: ignore[misc]
            if problem:
                return problem
        world.take(steps[-1])
    return ""


def _go_on(world: World, step: Step, table: _Table, deadline: float) -> str:
    world.take(step)
    return _search(world, table, deadline)


def _in_child(work: Callable[[], str]) -> str:
    """What this comes to in a child process, which leaves everything here as it is."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _tell(work, writing)
    os.close(writing)
    with open(reading, "rb") as told:
        problem = told.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return problem or (f"a process of the search ended with status {status}" if status else "")


def _tell(work: Callable[[], str], writing: int) -> NoReturn:
    try:
        problem = work()
    except BaseException as error:  # noqa: BLE001  nothing of the child may go on as if it were the parent
        problem = f"{type(error).__name__}: {error}"
    os.write(writing, problem.encode()[:TOLD_MOST])
    os._exit(0)
