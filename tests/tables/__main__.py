"""The whole tables: `python -m tests.tables [--shard 1/8] [CELL ...]`, or some cells by the names that were printed."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.support.virtual_time import VirtualTimeLoop
from tests.tables import awaited
from tests.tables.calls import CALLS
from tests.tables.cells import by_name, cells_of

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.tables", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CELL", help="a cell, or the call whose cells are played")
    parser.add_argument("--shard", default="1/1", help="play one part of so many")
    options = parser.parse_args()
    part, parts = map(int, options.shard.split("/"))
    calls = {str(call): call for call in CALLS if not call.blocking_only}
    cells = [by_name(name) for name in options.names if "/" in name]
    for name in options.names or calls:
        cells += cells_of(calls[name]) if name in calls else []
    logging.disable(logging.CRITICAL)
    failed = 0
    began = time.monotonic()
    for number, cell in enumerate(cells[part - 1 :: parts], 1):
        loop = VirtualTimeLoop()
        try:
            faults = loop.run_until_complete(awaited.play(cell))
        except Exception as error:  # noqa: BLE001 - the other cells are played, too
            faults = [f"the run failed: {error!r}"]
        finally:
            loop.close()
        if faults:
            failed += 1
            print(cell, *faults, sep="\n    ", flush=True)
        if number % 1000 == 0:
            print(f"{number} cells in {time.monotonic() - began:.0f} s, {failed} failed", flush=True)
    print(f"{len(cells[part - 1 :: parts])} cells in {time.monotonic() - began:.0f} s, {failed} failed")
    sys.exit(failed > 0)
