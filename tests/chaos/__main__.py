"""Runs real processes with faults until a promise is broken or the time is over.

python -m tests.chaos                                five minutes
python -m tests.chaos --seconds 30 --seed 7          as in the test suite
python -m tests.chaos --announced                    drains and resizes, with kills and outages in between
python -m tests.chaos --hosts                        several hosts: the one that serves is killed, stopped, drained
python -m tests.chaos --store etcd://127.0.0.1:2379  over a store that runs already
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

from tests.chaos.announced import announced_chaos
from tests.chaos.checker import Violation
from tests.chaos.hosts import hosts_chaos
from tests.chaos.runner import chaos


def main() -> int:
    """Run. The exit status is 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--nodes", type=int, help="default: 6, or 4 with --announced or --hosts")
    parser.add_argument("--store", metavar="URL", help="instead of a durable store of our own")
    parser.add_argument("--announced", action="store_true", help="drains and resizes, of nodes that use rounds()")
    parser.add_argument("--hosts", action="store_true", help="kills, stops and drains of the host of several")
    parser.add_argument("--quietly", action="store_true", help="say only what came of it")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    play = hosts_chaos if chosen.hosts else announced_chaos if chosen.announced else chaos
    nodes = chosen.nodes or (6 if play is chaos else 4)
    say = (lambda _: None) if chosen.quietly else print
    try:
        outcome = asyncio.run(play(seconds=chosen.seconds, seed=chosen.seed, nodes=nodes, url=chosen.store, say=say))
    except Violation as violation:
        print("\n".join([str(violation), *getattr(violation, "__notes__", ())]), file=sys.stderr)
        return 1
    print(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
