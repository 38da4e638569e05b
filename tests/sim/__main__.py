"""Replays one seed step by step, or runs many: of the store alone, or of everything together.

    python -m tests.sim store --hours 8           the store: real server, journal and clients, with faults
    python -m tests.sim full --seeds 0:10000      handlers, clients, server and journal together
    python -m tests.sim training --seeds 0:1000   nodes that train by `rounds()`, drained, resized, closed, expelled
    python -m tests.sim hosts --seeds 0:1000      the same, over stores in memory that are lost one after the other
    python -m tests.sim full --seed 17            one story of any of these, told step by step
    python -m tests.sim bugs                      plants every bug in turn, and looks for the seed that finds it
    python -m tests.sim explore                   every order of the messages of three nodes, one of which may fail

A failure prints the command that replays it, and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial

from tests.sim.checker import Violation
from tests.sim.explorer.command import explore_command
from tests.sim.full_bugs import FULL_BUGS
from tests.sim.full_story import FullStory
from tests.sim.hosts_bugs import HOSTS_BUGS
from tests.sim.hosts_story import HostsStory
from tests.sim.machines import Seams
from tests.sim.store_bugs import STORE_BUGS
from tests.sim.store_story import StoreStory
from tests.sim.story import Outcome, Story
from tests.sim.training_bugs import TRAINING_BUGS
from tests.sim.training_story import TrainingStory

FRESH = 10**9
STORIES: dict[str, type[Story]] = {
    "store": StoreStory,
    "full": FullStory,
    "training": TrainingStory,
    "hosts": HostsStory,
}
BUGS: dict[str, dict[str, Seams]] = {
    "store": STORE_BUGS,
    "full": FULL_BUGS,
    "training": TRAINING_BUGS,
    "hosts": HOSTS_BUGS,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 1 if a promise was broken, and 2 for an unknown command."""
    given = sys.argv[1:] if arguments is None else arguments
    runs: dict[str, Callable[[list[str]], None]] = {"bugs": _bugs, "explore": explore_command}
    runs |= {name: partial(_stories, name) for name in STORIES}
    if not given or given[0] not in runs:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        runs[given[0]](given[1:])
    except AssertionError as problem:  # a `Violation`, or a defect found by an assertion
        if not isinstance(problem, Violation):
            raise
        print(problem, file=sys.stderr)
        return 1
    return 0


def _stories(name: str, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.sim {name}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one story, told step by step")
    which.add_argument("--seeds", metavar="A:B", help="all seeds from A up to, not including, B")
    which.add_argument("--hours", type=float, help="as many stories as this takes in simulated hours")
    parser.add_argument("--first", type=int, help="the first of these; without it, a fresh one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time (%(default)s)")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        print(STORIES[name].play(chosen.seed, trace=print))
        return
    seeds: Iterator[int]
    if chosen.seeds is not None:
        first, _, beyond = chosen.seeds.partition(":")
        hours, seeds = float("inf"), iter(range(int(first), int(beyond)))
    else:
        start = chosen.first if chosen.first is not None else random.SystemRandom().randrange(FRESH)
        hours, seeds = chosen.hours, itertools.count(start)
        print(f"python -m tests.sim {name} --hours {hours:g} --first {start}", flush=True)
    began, told = time.perf_counter(), Counter[str]()
    with contextlib.closing(_play(STORIES[name], seeds, jobs=chosen.jobs)) as outcomes:
        for outcome in outcomes:
            told.update({"stories": 1, **asdict(outcome)})
            if told["seconds"] >= hours * 3600:
                break
    simulated = told.pop("seconds") / 3600
    counts = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in told.items() if count)
    print(f"{counts}; {simulated:.1f} simulated hours in {time.perf_counter() - began:.1f} s; no promise was broken")


def _play(story: type[Story], seeds: Iterator[int], *, jobs: int) -> Generator[Outcome, None, None]:
    """Yield the outcomes of stories in the order of their seeds. Several are played at a time, each in a process."""
    if jobs == 1:
        yield from map(story.play, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        being_told = deque(pool.submit(story.play, seed) for seed in itertools.islice(seeds, 2 * jobs))
        try:
            while being_told:
                yield being_told.popleft().result()
                being_told.extend(pool.submit(story.play, seed) for seed in itertools.islice(seeds, 1))
        finally:
            pool.shutdown(cancel_futures=True)


def _bugs(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim bugs", description="Plants every bug in turn.")
    parser.add_argument("--within", type=int, default=1000, help="how many seeds are tried for each (1000)")
    parser.add_argument("--only", default="", help="only bugs whose names have this in them")
    chosen = parser.parse_args(arguments)
    for name, bugs in BUGS.items():
        for bug, seams in bugs.items():
            if chosen.only in bug:
                print(f"{bug}: {hunt(seams, STORIES[name], range(chosen.within))}", flush=True)


def hunt(seams: Seams, story: type[Story], seeds: range) -> str:
    """Return the message of the first seed that finds a planted bug. Raise a `Violation` if none does."""
    for seed in seeds:
        try:
            story.play(seed, seams=seams)
        except Violation as violation:
            return f"{violation}"
    raise Violation(f"not found within {len(seeds)} seeds")


if __name__ == "__main__":
    sys.exit(main())
