"""Explores every order of the messages of three nodes, one of which may fail, and prints the number of states.

    python -m benchmarks.explorer                   all of it, in a process for each part: half an hour, or more
    python -m benchmarks.explorer --seconds 60      within this time: a part that was not finished says so

docs/protocol.md and `tests/sim/explorer` describe the space and the conditions of each state.
"""

from __future__ import annotations

import argparse
import sys

from tests.sim.__main__ import main as simulate

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it (no limit)")
    chosen = parser.parse_args()
    sys.exit(simulate(["explore", "--seconds", str(chosen.seconds)]) or simulate(["explore", "--bugs", ""]))
