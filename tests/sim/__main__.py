"""Replays one seed step by step, or runs many."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.checker import Violation
from tests.sim.simulation import simulate


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds that were asked for; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one seed, told step by step")
    which.add_argument("--seeds", metavar="A:B", help="all seeds from A up to, not including, B")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.seed is not None:
            print(simulate(chosen.seed, trace=print))
            return 0
        first, _, beyond = chosen.seeds.partition(":")
        began, rounds, faults = time.perf_counter(), 0, 0
        for seed in range(int(first), int(beyond)):
            outcome = simulate(seed)
            rounds += outcome.rounds
            faults += outcome.faults
        print(f"{rounds} rounds, {faults} faults in {time.perf_counter() - began:.1f} s; no promise was broken")
    except Violation as violation:
        print(violation, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
