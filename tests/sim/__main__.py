"""Replays one seed step by step, or runs many: of the store, or of everything together.

    python -m tests.sim store --hours 8           the store: real server, journal and clients in trouble
    python -m tests.sim store --seed 17           one story, told
    python -m tests.sim full --seeds 0:10000      handlers, clients, server and journal together
    python -m tests.sim full --seed 17            one history, told
    python -m tests.sim training --seeds 0:1000   nodes that train by `rounds()`, drained, resized, closed, expelled
    python -m tests.sim bugs                      plants every bug in turn, and looks for the seed that finds it
    python -m tests.sim explore                   every order of the messages of three nodes, one of which may fail

A failure prints the command that plays it again, and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.checker import Violation
from tests.sim.explorer.command import explore_command
from tests.sim.full_bugs import FULL_BUGS
from tests.sim.full_story import tell_full_story
from tests.sim.store_bugs import STORE_BUGS
from tests.sim.store_story import tell_store_story
from tests.sim.training_bugs import TRAINING_BUGS
from tests.sim.training_story import tell_training_story

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tests.sim.full_story import FullOutcome
    from tests.sim.machines import Seams
    from tests.sim.store_story import StoreOutcome

FRESH = 10**9
HISTORIES = {"full": tell_full_story, "training": tell_training_story}


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 if a promise was broken, 2 if nothing of this is what was asked for."""
    given = sys.argv[1:] if arguments is None else arguments
    runs: dict[str, Callable[[list[str]], None]] = {"store": _store, "bugs": _bugs}
    runs |= {name: partial(_histories, name, tell) for name, tell in HISTORIES.items()}
    runs["explore"] = explore_command
    if not given or given[0] not in runs:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        runs[given[0]](given[1:])
    except AssertionError as problem:  # a `Violation`, or a defect that nobody has a name for
        if not isinstance(problem, Violation):
            raise
        print(problem, file=sys.stderr)
        return 1
    return 0


def _store(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one story, told step by step")
    which.add_argument("--hours", type=float, help="as many stories as this takes in simulated hours")
    parser.add_argument("--first", type=int, help="the first of their seeds; without it, a fresh one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time (%(default)s)")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        print(tell_store_story(chosen.seed, trace=print))
        return
    seed = chosen.first if chosen.first is not None else random.SystemRandom().randrange(FRESH)
    print(f"python -m tests.sim store --hours {chosen.hours:g} --first {seed}", flush=True)
    began, seconds, stories, operations, faults, starts = time.perf_counter(), 0.0, 0, 0, 0, 0
    with contextlib.closing(_stories_from(seed, jobs=chosen.jobs)) as outcomes:
        for outcome in outcomes:
            stories += 1
            seconds += outcome.seconds
            operations += outcome.answers_checked
            faults += outcome.faults
            starts += outcome.starts
            if seconds >= chosen.hours * 3600:
                break
    print(
        f"{stories} stories, {seconds / 3600:.1f} simulated hours, {operations} answers and events, {faults} faults, "
        f"{starts} starts of the store in {time.perf_counter() - began:.1f} s; no promise was broken"
    )


def _stories_from(seed: int, *, jobs: int) -> Generator[StoreOutcome, None, None]:
    """Story after story, in the order of their seeds, several told at a time, each by a process."""
    if jobs == 1:
        yield from map(tell_store_story, itertools.count(seed))
    with ProcessPoolExecutor(jobs) as pool:
        seeds = itertools.count(seed)
        being_told = deque(pool.submit(tell_store_story, next(seeds)) for _ in range(2 * jobs))
        try:
            while True:
                yield being_told.popleft().result()
                being_told.append(pool.submit(tell_store_story, next(seeds)))
        finally:
            pool.shutdown(cancel_futures=True)


def _histories(name: str, tell: Callable[..., FullOutcome], arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.sim {name}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one history, told step by step")
    which.add_argument("--seeds", metavar="A:B", help="all seeds from A up to, not including, B")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        print(tell(chosen.seed, trace=print))
        return
    began, rounds, faults, answers, seconds = time.perf_counter(), 0, 0, 0, 0.0
    for seed in _range(chosen.seeds):
        outcome = tell(seed)
        rounds += outcome.rounds
        faults += outcome.faults
        answers += outcome.answers_checked
        seconds += outcome.seconds
    print(
        f"{rounds} rounds, {faults} faults, {answers} answers and events, {seconds / 3600:.1f} simulated hours in "
        f"{time.perf_counter() - began:.1f} s; no promise was broken"
    )


def _bugs(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim bugs", description="Plants every bug in turn.")
    parser.add_argument("--within", type=int, default=1000, help="how many seeds are tried for each (1000)")
    parser.add_argument("--only", default="", help="only bugs whose names have this in them")
    chosen = parser.parse_args(arguments)
    planted: list[tuple[str, Seams, Callable[..., object]]] = [
        *((bug, seams, tell_store_story) for bug, seams in STORE_BUGS.items()),
        *((bug, seams, tell_full_story) for bug, seams in FULL_BUGS.items()),
        *((bug, seams, tell_training_story) for bug, seams in TRAINING_BUGS.items()),
    ]
    for bug, seams, tell in planted:
        if chosen.only in bug:
            print(f"{bug}: {hunt(seams, tell, range(chosen.within))}", flush=True)


def hunt(seams: Seams, tell: Callable[..., object], seeds: range) -> str:
    """What the first of these seeds to find a planted bug says of it; a `Violation` if none does."""
    for seed in seeds:
        try:
            tell(seed, seams=seams)
        except Violation as violation:
            return f"{violation}"
    raise Violation(f"not found within {len(seeds)} seeds")


def _range(seeds: str) -> range:
    first, _, beyond = seeds.partition(":")
    return range(int(first), int(beyond))


if __name__ == "__main__":
    sys.exit(main())
