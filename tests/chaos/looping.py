"""One node of a run of `rounds()`, as a process of its own: it makes steps that need all members.

    python -m tests.chaos.looping URL NAME awaited|blocking

Each line is a JSON object, as those of `tests.chaos.node`:

    in        it is a member: round, rank, size, address of rank 0 and members
    told      a member was lost, which has ended the round
    leaving   its body has ended: round; `end`, the kind of the ending (see `EndKind`), and why; `step`, the next step;
              `begun`, the step that was interrupted, if any
    closed    the loop has ended: the run is closed, or this node was drained
"""

import asyncio
import sys
import time
from typing import Any

import rdzv
import rdzv.sync
from rdzv.core.round_life import EndKind
from tests.chaos.node import begin, say

STEPS_EVERY = 0.01  # seconds between two steps


def say_in(round: rdzv.Round | rdzv.sync.Round, members: list[Any] | None) -> None:
    """Write the facts of a new round."""
    ids = None if members is None else [one.node_id for one in members]
    address = round.bootstrap_address
    say("in", round=round.number, rank=round.rank, size=round.world_size, address=address, members=ids)


def say_leaving(round: rdzv.Round | rdzv.sync.Round, step: int, begun: int | None) -> None:
    """Write how a round has ended."""
    ending = round.ending
    assert ending is not None, "no body ends by itself"
    if ending.kind is EndKind.LOST:
        say("told", round=round.number, kind="NodesLost", ids=ending.node_ids)
    say("leaving", round=round.number, end=ending.kind.value, why=ending.reason, step=step, begun=begun)


async def live(url: str, name: str) -> None:
    """Run a node that awaits."""
    async for round in rdzv.rounds(url, node_id=name):
        step, begun = 0 if round.newest is None else round.newest[1] + 1, None
        async with round:
            try:
                say_in(round, await round.participants())
            except rdzv.RendezvousError:
                say_in(round, None)
            while True:
                await round.check(step)
                begun = step
                await round.store.barrier(f"step {step}", round.world_size)
                step, begun = step + 1, None
                await asyncio.sleep(STEPS_EVERY)
        say_leaving(round, step, begun)


def live_blocking(url: str, name: str) -> None:
    """Run a node that blocks."""
    for round in rdzv.sync.rounds(url, node_id=name):
        step, begun = 0 if round.newest is None else round.newest[1] + 1, None
        with round:
            try:
                say_in(round, round.participants())
            except rdzv.RendezvousError:
                say_in(round, None)
            while True:
                round.check(step)
                begun = step
                round.store.barrier(f"step {step}", round.world_size)
                step, begun = step + 1, None
                time.sleep(STEPS_EVERY)
        say_leaving(round, step, begun)


def main(url: str, name: str, twin: str) -> None:
    """Run a node until the run is closed, or the node is drained."""
    begin(url)
    if twin == "awaited":
        asyncio.run(live(url, name))
    else:
        live_blocking(url, name)
    say("closed")


if __name__ == "__main__":
    main(*sys.argv[1:4])
