"""All cells of the tables: `python -m tests.tables [--shard 1/8] [--blocking] [CELL ...]`, or some cells by name."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.support.virtual_time import VirtualTimeLoop
from tests.tables import awaited, blocking
from tests.tables.calls import CALLS
from tests.tables.cells import Cell, by_name, cells_of, covering


def in_virtual_time(cell: Cell) -> list[str]:
    """Play an awaited cell."""
    loop = VirtualTimeLoop()
    try:
        return list(loop.run_until_complete(awaited.play(cell)))
    finally:
        loop.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.tables", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CELL", help="a cell, or the call whose cells are played")
    parser.add_argument("--shard", default="1/1", help="play one part of so many")
    parser.add_argument("--blocking", action="store_true", help="the blocking calls, in real time: some cells of each")
    parser.add_argument("--seed", type=int, default=0, help="of which blocking cells are played")
    options = parser.parse_args()
    part, parts = map(int, options.shard.split("/"))
    calls = {str(call): call for call in CALLS if not (call.awaited_only if options.blocking else call.blocking_only)}
    cells = [by_name(name) for name in options.names if "/" in name]
    for name in options.names or calls:
        if name in calls and options.blocking:
            cells += covering(calls[name], blocking.MANNERS, seed=options.seed)
        elif name in calls:
            cells += cells_of(calls[name])
    logging.disable(logging.CRITICAL)
    failed = 0
    began = time.monotonic()
    machines = [blocking.Machine(durable=durable) for durable in (True, False, False)] if options.blocking else []
    for number, cell in enumerate(cells[part - 1 :: parts], 1):
        try:
            faults = blocking.played_alone(cell, machines) if machines else in_virtual_time(cell)
        except Exception as error:  # noqa: BLE001 - the other cells are played, too
            faults = [f"the run failed: {error!r}"]
        if faults:
            failed += 1
            print(cell, *faults, sep="\n    ", flush=True)
        if number % 1000 == 0:
            print(f"{number} cells in {time.monotonic() - began:.0f} s, {failed} failed", flush=True)
    for machine in machines:
        machine.end()
    print(f"{len(cells[part - 1 :: parts])} cells in {time.monotonic() - began:.0f} s, {failed} failed")
    sys.exit(failed > 0)
