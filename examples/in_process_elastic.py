"""Elastic training with PyTorch, one async program per node: no process starts anew, nothing is read from disk.

    python examples/in_process_elastic.py

Each node forms a gloo group in every round, over the round's own store, and trains. When it is told that a node was
lost, or that one waits, it aborts the group, meets the others again and goes on from memory. One of two nodes is killed
with SIGKILL; the other trains on within a second or two, alone; then a newcomer gets the parameters from rank 0, which
is always a node that has them: survivors keep their order, and newcomers come behind.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import torch
import torch.distributed as dist

import rdzv
import store
from rdzv.node.handler import Handler
from rdzv.torch import TorchStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STEPS = 300
STEP_TIME = 0.02  # seconds; the toy would be done before anybody could be killed
X = torch.linspace(-1, 1, 64)
Y = 3 * X - 2  # the line that is to be found


class Model:
    """What is learned, and how far it is; in memory only."""

    def __init__(self) -> None:
        self.state = torch.zeros(3)  # slope, offset, step

    @property
    def step(self) -> int:
        """How many steps were made."""
        return int(self.state[2])

    def gradient(self, rank: int, size: int) -> torch.Tensor:
        """The gradient of the squared error, summed over this rank's share of the points."""
        x = X[rank::size]
        error = self.state[0] * x + self.state[1] - Y[rank::size]
        return torch.stack([(2 * x * error).sum(), (2 * error).sum()])

    def descend(self, gradient: torch.Tensor) -> None:
        """Make one step."""
        self.state[:2] -= 0.3 / len(X) * gradient
        self.state[2] += 1


class Group:
    """A gloo group of one round.

    Its operations are awaited, so that being told of a loss gets out of one that will never end.
    """

    aborted: ClassVar[list[Any]] = []  # kept: on letting go of a group, PyTorch waits for what still runs in it

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    @classmethod
    async def form(cls, handler: Handler, info: rdzv.RendezvousInfo) -> Group:
        """Connect with every other member, through the store of the round."""

        def connect() -> Any:  # it blocks, and gets out with an error when the round is over
            shared = TorchStore(info.store.blocking(client))
            return dist.ProcessGroupGloo(shared, info.rank, info.world_size, timedelta(seconds=20))

        client = handler.open_blocking_store()
        info.on_superseded(lambda reason: client.interrupt(store.ConnectionLost(reason, maybe_applied=False)))
        return cls(await anyio.to_thread.run_sync(connect, abandon_on_cancel=True))

    async def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up everybody's tensor, in place."""
        await self._done(self._gloo.allreduce([tensor]))
        return tensor

    async def from_rank_0(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor with that of rank 0."""
        await self._done(self._gloo.broadcast(tensor, 0))

    async def _done(self, work: Any) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        work.get_future().then(lambda _: loop.call_soon_threadsafe(done.set))
        await done.wait()
        work.wait()  # raises what went wrong

    def abort(self) -> None:
        """Let go of it, whatever still runs in it."""
        self._gloo.abort()
        self.aborted.append(self._gloo)


async def node(url: str, name: str) -> None:
    """One program: train in one round after the other, until the run is closed."""
    torch.set_num_threads(1)
    model = Model()
    say(f"{name}: ready")
    await anyio.to_thread.run_sync(sys.stdin.read)  # until it is let join
    async with rdzv.connect(url, node_id=name) as handler, handler.changes() as changes:
        assert isinstance(handler, Handler)  # and not somebody else's backend, which may have no blocking store
        while True:
            info = await handler.next_rendezvous()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(train, handler, info, model)
                change = await next_change(changes)
                tasks.cancel_scope.cancel()  # what waits for a dead node's gradient is freed by this
            if isinstance(change, rdzv.Closed):
                break
            say(f"{name}: {change} at step {model.step}")
    say(f"{name}: trained {model.state[0]:.4f} x + {model.state[1]:.4f} in {model.step} steps")


async def train(handler: Handler, info: rdzv.RendezvousInfo, model: Model) -> None:
    """Train from where rank 0 is, to the end; cancelled when the members change."""
    group = None
    try:
        group = await Group.form(handler, info)
        await group.from_rank_0(model.state)  # also to who has been in before: it may be one step ahead, or behind
        say(f"{info.node_id}: round {info.round}, rank {info.rank} of {info.world_size}, from step {model.step}")
        while model.step < STEPS:
            await anyio.sleep(STEP_TIME)
            model.descend(await group.sum(model.gradient(info.rank, info.world_size)))
            if model.step % 50 == 0 and info.rank == 0:
                say(f"{info.node_id}: step {model.step}")
        # Nobody may leave before all have made the last step, lest the rest meet again without them.
        await info.store.barrier("trained", info.world_size)
        if info.rank == 0:
            await handler.set_closed("trained")
    except (RuntimeError, rdzv.RoundSupersededError) as error:
        # A dead node's socket tells of it before its lease has lapsed: the change that says so is on its way.
        say(f"{info.node_id}: out of step {model.step}: {str(error).partition('.')[0][-40:]}")
    finally:
        if group is not None:
            group.abort()


async def next_change(changes: AsyncIterator[rdzv.Change]) -> rdzv.Change:
    """The next change for which members must meet again, or go home."""
    async for change in changes:
        if change != rdzv.NodesWaiting(0):
            return change
    raise AssertionError("changes never end by themselves")


def say(line: str) -> None:
    """Tell whoever started this process."""
    print(line, flush=True)


# --------------------------------------------------------------------------------- starting and killing the nodes


async def main() -> None:
    """Start two nodes, kill that of rank 0, let another join, and look at what they have learned."""
    lines: asyncio.Queue[str] = asyncio.Queue()

    async def read(process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            print(line.decode(), end="", flush=True)
            lines.put_nowait(line.decode().rstrip())

    async def heard(*, containing: str) -> str:
        with anyio.fail_after(60):
            while containing not in (line := await lines.get()):
                pass
        return line

    async with store.serve() as server, anyio.create_task_group() as group:
        url = f"{server.url}/example?min_nodes=1&max_nodes=2&last_call_timeout=10"
        nodes: dict[str, Process] = {}

        async def start(name: str) -> None:
            nodes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, url, name), stdin=PIPE, stdout=PIPE
            )
            group.start_soon(read, nodes[name])

        def let_join(name: str) -> None:
            pipe = nodes[name].stdin
            assert pipe is not None
            pipe.close()

        # Importing PyTorch takes longer than the whole training on a busy machine: all have done so before it begins.
        for name in ("ada", "ben", "cleo"):
            await start(name)
        for _ in nodes:
            await heard(containing=": ready")
        let_join("ada")
        let_join("ben")
        victim = (await heard(containing=": step 50")).partition(":")[0]  # rank 0 tells the steps
        nodes[victim].kill()
        print(f"SIGKILL for {victim}, which had rank 0", flush=True)
        alone = await heard(containing="rank 0 of 1, from step")
        await heard(containing=": step 100")
        let_join("cleo")
        joined = await heard(containing="cleo: round ")
        learned = [(await heard(containing="trained ")).partition("trained ")[2] for _ in range(2)]
        statuses = {name: await process.wait() for name, process in nodes.items()}

    assert learned == [f"3.0000 x + -2.0000 in {STEPS} steps"] * 2, learned
    assert int(alone.rpartition(" ")[2]) >= 49, alone
    assert int(joined.rpartition(" ")[2]) > 50, joined
    assert statuses.pop(victim) == -9
    assert set(statuses.values()) == {0}, statuses
    print(f"verified: {learned[0]}, from memory: {alone.partition(', ')[2]}; {joined.partition(', ')[2]}")


if __name__ == "__main__":
    asyncio.run(node(*sys.argv[1:3]) if len(sys.argv) > 1 else main())
