"""Goes through every order of the messages of three nodes, one of which may fail, and says how many states there are.

    python -m benchmarks.explorer                   all of it, in a process for each part: half an hour, or more
    python -m benchmarks.explorer --seconds 60      as much as there is time for: a part that was not ended says so

What is explored, and what must hold in each state, is said in docs/protocol.md and in `tests/sim/explorer`.
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
