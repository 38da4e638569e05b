"""A training loop over `rdzv.rounds`, as a user writes it; `test_training.py` tests it."""

from __future__ import annotations

import anyio

import rdzv


async def train(url: str, *, steps: int = 20) -> None:
    """Train for `steps` steps, through all changes of the run's nodes."""
    async for round in rdzv.rounds(url):
        async with round:
            step = int(await round.restore("step") or 0)
            while step < steps:
                await round.check(step)  # all members leave here together when a node wants to join or leave
                await all_reduce(round, step)
                step += 1
                if round.rank == 0:
                    await round.keep("step", str(step).encode())


async def all_reduce(round: rdzv.Round, step: int) -> None:
    """Compute for a second, then wait for all the others, as a collective does."""
    await anyio.sleep(1)
    await round.store.barrier(f"step {step}", round.world_size)
