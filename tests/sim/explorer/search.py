"""Visits every state that a world can reach, each once.

A running program cannot be copied, but its process can. For each possible step but the last, the process forks. The
child takes the step and explores everything after it, before the parent tries the next step. All these processes share
one table of the states that were visited.
"""

import contextlib
import gc
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn
from unittest.mock import patch

from store.messages import Request
from tests.sim.checker import Violation
from tests.sim.explorer.world import Scenario, Step, World, as_it_is, spell
from tests.sim.machines import quiet_logs

__all__ = ["Explored", "explore", "retell", "walk"]

SLOTS = 1 << 22  # of the table; memory that is not touched costs nothing
TOLD_MOST = 60_000  # bytes of a message; a pipe holds that many without a reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """The result of a search.

    Attributes:
        states: The number of different states.
        steps: The number of steps between them.
        ends: The number of states without a possible step.
        depth: The number of steps of the longest path.
        whole: True if all states were visited; False if the time was over, or a promise was broken.
        problem: The first broken promise, with the steps that lead to it; empty if there is none.
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
    """The shared memory of a search, which one process at a time writes to: the visited states, and the counts."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, (SLOTS + len(_Count)) * 8)).cast("Q")

    def add(self, fingerprint: bytes) -> bool:
        """Add a state. Return False if it was visited before."""
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
    """Explore every path of a scenario.

    Args:
        scenario: The scenario.
        seconds: The time limit. States that are not visited by then are left out.
        mend: Changes each request that nodes make.
        plant: A context for the search. With `mend`, it can plant a bug.
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
    """Take this many random paths, each to its end. Return the first broken promise, or an empty string."""
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
    """Take the steps of a given path, and yield the lines of its story."""
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
    """Freeze the wall clock, which is written into records, and the process id, so that a handler sees no fork."""
    pid = os.getpid()
    with patch("time.time", lambda: 0.0), patch("os.getpid", lambda: pid):
        yield


def _begin(scenario: Scenario, mend: Callable[[Request[Any]], Request[Any]]) -> World:
    warm_up = World(scenario)  # modules and objects that are made at first use must not make two states differ
    while steps := warm_up.steps():
        warm_up.take(steps[0])
    world = World(scenario, mend=mend)
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, all memory that the processes share
    gc.disable()
    return world


def _search(world: World, table: _Table, deadline: float) -> str:
    """Explore all states from here on. Return the first problem, or an empty string."""
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
    """Return the result of this work in a child process, which leaves the state of this process unchanged."""
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
    except BaseException as error:  # noqa: BLE001  no code of the child may continue as if it were the parent
        problem = f"{type(error).__name__}: {error}"
    os.write(writing, problem.encode()[:TOLD_MOST])
    os._exit(0)
