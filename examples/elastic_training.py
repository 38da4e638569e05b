"""Elastic data-parallel training: a worker is killed, the others continue from memory, a new one gets their state.

    python examples/elastic_training.py

Three processes fit a line to points by gradient descent. Each has its share of the points; the gradients are summed in
the round's shared store. One process is killed with SIGKILL: the other two learn of it, meet again, divide the points
anew and continue. A replacement joins at a step that all agree on, and gets the parameters from the member with the
most finished steps, which the round names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict, dataclass

import anyio

import rdzv
import store

POINTS = [(x / 50, 3 * x / 50 - 2) for x in range(-50, 50)]  # on the line 3 x - 2, to be found
STEPS = 250
STEP_TIME = 0.01  # seconds; without it the example would end before the kill


@dataclass
class Model:
    """The learned parameters, and the number of steps."""

    slope: float = 0.0
    offset: float = 0.0
    step: int = 0

    def gradient(self, points: list[tuple[float, float]]) -> list[float]:
        """Return the gradient of the squared error, summed over the points."""
        errors = [(x, self.slope * x + self.offset - y) for x, y in points]
        return [sum(2 * x * error for x, error in errors), sum(2 * error for _, error in errors)]

    def descend(self, gradient: list[float]) -> None:
        """Make one step."""
        self.slope -= 0.3 / len(POINTS) * gradient[0]
        self.offset -= 0.3 / len(POINTS) * gradient[1]
        self.step += 1


async def worker(url: str, name: str) -> None:
    """Train as one process, round after round, until all steps are made."""
    model = Model()
    async for round in rdzv.rounds(url, node_id=name):
        async with round:  # ends waits for a lost worker's gradient
            newest = round.newest[0] if round.newest is not None else 0
            if round.rank == newest:
                await round.store.set("model", json.dumps(asdict(model)))
            else:  # an earlier member, too, may be a step behind
                vars(model).update(json.loads(await round.store.get("model")))
            say(f"{name}: round {round.number}, rank {round.rank} of {round.world_size}, from step {model.step}")
            while model.step < STEPS:
                await round.check(model.step)  # all leave here together when a node wants to join or leave
                await anyio.sleep(STEP_TIME)
                mine = POINTS[round.rank :: round.world_size]
                model.descend(await all_reduce(round, model.step, model.gradient(mine)))
                if model.step % 50 == 0 and round.rank == 0:
                    say(f"{name}: step {model.step}")
        if round.ending is not None:
            say(f"{name}: after step {model.step}: {round.ending.reason}")
    say(f"{name}: trained {json.dumps(asdict(model))}")


async def all_reduce(round: rdzv.Round, step: int, values: list[float]) -> list[float]:
    """Return the sum of all members' values, through the round's store."""
    await round.store.set(f"{step}/{round.rank}", json.dumps(values))
    parts = await round.store.multi_get([f"{step}/{rank}" for rank in range(round.world_size)])
    # All have written this step's values, so all have read those of the step before.
    await round.store.delete_key(f"{step - 1}/{round.rank}")
    return [sum(column) for column in zip(*map(json.loads, parts), strict=True)]


def say(line: str) -> None:
    """Print a line for the parent process."""
    print(line, flush=True)


# ------------------------------------------------------------------------------- starting and killing the workers


def end(process: Process) -> None:
    """End a process that still runs."""
    if process.returncode is None:
        process.terminate()


async def main() -> None:
    """Start three workers, kill rank 0, start another, and check the result."""
    lines: asyncio.Queue[str] = asyncio.Queue()

    async def read(process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            print(line.decode(), end="", flush=True)
            lines.put_nowait(line.decode())

    async def heard(*, containing: str) -> str:
        with anyio.fail_after(30):
            while containing not in (line := await lines.get()):
                pass
        return line

    async with store.serve() as server, anyio.create_task_group() as group, contextlib.AsyncExitStack() as ending:
        url = f"{server.url}/example?min_nodes=2&max_nodes=3"
        workers: dict[str, Process] = {}

        async def start(name: str) -> None:
            workers[name] = await asyncio.create_subprocess_exec(sys.executable, __file__, url, name, stdout=PIPE)
            ending.callback(end, workers[name])
            group.start_soon(read, workers[name])

        for name in ("ada", "ben", "cleo"):
            await start(name)
        victim = (await heard(containing=": step 50")).partition(":")[0]  # rank 0 prints the steps
        workers[victim].kill()
        print(f"SIGKILL for {victim}, which had rank 0")
        await heard(containing="round 1, rank 0 of 2, from step")
        await start("dan")
        await heard(containing="dan: round 2, rank 2 of 3, from step")
        learned = [(await heard(containing="trained")).partition("trained ")[2] for _ in range(3)]
        statuses = {name: await process.wait() for name, process in workers.items()}

    assert len(set(learned)) == 1, "all have learned the same"
    model = Model(**json.loads(learned[0]))
    assert model.step == STEPS
    assert abs(model.slope - 3) < 1e-6, model
    assert abs(model.offset + 2) < 1e-6, model
    assert statuses.pop(victim) == -9
    assert set(statuses.values()) == {0}, statuses
    print(f"verified: {model.slope:.4f} x + {model.offset:.4f} is the line, after {STEPS} steps and one death")


if __name__ == "__main__":
    asyncio.run(worker(*sys.argv[1:3]) if len(sys.argv) > 1 else main())
