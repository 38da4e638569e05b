"""The explorer's command: `python -m tests.sim explore [NAME ...]`."""

import argparse
import time

from tests.sim.checker import Violation
from tests.sim.explorer.bugs import BUGS
from tests.sim.explorer.scenarios import SCENARIOS
from tests.sim.explorer.search import Explored, explore, retell, walk

__all__ = ["explore_command", "go_through"]


WAYS = 40  # random paths that are tried for a bug before all of them are explored


def explore_command(arguments: list[str]) -> None:
    """Explore the scenarios of the command line, or plant its bugs, or replay its steps.

    Raises:
        Violation: A promise was broken, or a planted bug was not found.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim explore",
        description="Goes through every state that three nodes, one of which may fail, can come to.",
    )
    parser.add_argument("name", nargs="*", help=f"what to explore ({', '.join(SCENARIOS)}); without one, all of it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which what is left is left out")
    parser.add_argument("--steps", help="one way, told step by step")
    parser.add_argument("--bugs", metavar="PART", help="plant the bugs that have this in their names; '' for all")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.name if name not in SCENARIOS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(SCENARIOS)}")
    if chosen.steps is not None:
        for line in retell(SCENARIOS[chosen.name[0]], chosen.steps):
            print(line)
    elif chosen.bugs is not None:
        for name in (name for name in BUGS if chosen.bugs in name):
            print(f"{name}: {_hunt(name, chosen.seconds)}", flush=True)
    else:
        deadline = time.monotonic() + chosen.seconds
        for name in chosen.name or SCENARIOS:
            go_through(name, seconds=max(deadline - time.monotonic(), 0.0))


def go_through(name: str, *, seconds: float) -> Explored:
    """Explore one scenario and print the result."""
    began = time.monotonic()
    explored = explore(SCENARIOS[name], seconds=seconds)
    if explored.problem:
        raise Violation(explored.problem)
    print(f"{name}: {explored}, in {time.monotonic() - began:.0f} s; no promise was broken", flush=True)
    return explored


def _hunt(name: str, seconds: float) -> str:
    bug = BUGS[name]
    problem = walk(bug.scenario, ways=WAYS, mend=bug.mend, plant=bug.plant)  # mostly one of the first paths finds it
    if bug.says in problem:
        return problem
    explored = explore(bug.scenario, seconds=seconds, mend=bug.mend, plant=bug.plant)
    if bug.says not in explored.problem:
        raise Violation(f"{name} was not found: {explored.problem or explored}")
    return explored.problem
