"""A program for `test_wrapped`: wrappers of models, and helpers beside a training, each through the loss of a member.

python -m tests.rdzv.torch.wrapped_program URL KIND...

Three processes are forked for each kind. One of them is killed in its fifth step, and the others train to the end.
"""

import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rdzv.torch

LAST: Final = 10
DIES_AT: Final = 5


def new_model() -> Any:
    """Return the model. It is the same on every member."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def trained(model: Any, optimizer: Any, batch: Any, backward: Callable[[Any], None] = torch.Tensor.backward) -> None:
    """Make one step."""
    optimizer.zero_grad()
    backward(model(batch).pow(2).mean())
    optimizer.step()


class Replicated:
    """A model that each member has as a whole. `sync_state` transfers it, and it is wrapped again in each round."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 0

    def begin(self, round: rdzv.torch.TorchRound) -> int:
        """Get the newest state, and set up the objects that last as long as the round's groups."""
        self.round = round
        self.step = round.sync_state(self.model, self.optimizer, self.step)
        if self.kind == "mesh":
            mesh = dist.init_device_mesh("cpu", (1, round.world_size), mesh_dim_names=("replicate", "shard"))
            self.wrapped = DistributedDataParallel(self.model, process_group=mesh.get_group("shard"))
        else:
            self.wrapped = DistributedDataParallel(self.model)
        if self.kind == "compile":
            self.wrapped = torch.compile(self.wrapped, backend="aot_eager")
        self.batches = self.endless_batches()
        self.saving: Any = None
        self.saves = round.new_group() if self.kind == "async_save" else None
        return self.step

    def train_one(self) -> None:
        """Make one step of the wrapped model."""
        trained(self.wrapped, self.optimizer, next(self.batches))

    def endless_batches(self) -> Iterator[Any]:
        """Yield batches for ever, from a worker process if the kind asks for it."""
        data = TensorDataset(torch.ones(64, 8))
        while True:
            for (batch,) in DataLoader(data, batch_size=4, num_workers=int(self.kind == "workers")):
                yield batch

    def train(self, step: int) -> None:
        """Make one step, with the helpers that run beside it."""
        self.train_one()
        self.step = step + 1
        if self.kind == "monitored_barrier":
            dist.monitored_barrier(timeout=timedelta(minutes=2))
        if self.saves is not None:
            self.finish()
            folder = os.path.join(os.environ["CHECKPOINTS"], f"{self.round.number}-{step}")
            self.saving = dcp.async_save(
                {"model": self.model.state_dict()}, checkpoint_id=folder, process_group=self.saves
            )

    def finish(self) -> None:
        """Wait for the helpers."""
        if self.saving is not None:
            self.saving.result()

    def state(self) -> Any:
        """Return the state for comparison."""
        return self.model.state_dict()


class ByFabric(Replicated):
    """Lightning Fabric gets the member's rank and the world size, and finds the round's group."""

    def begin(self, round: rdzv.torch.TorchRound) -> int:
        """Begin as usual. Then wrap again with Fabric."""
        from lightning_fabric import Fabric

        super().begin(round)
        os.environ["NODE_RANK"] = str(round.rank)
        self.fabric = Fabric(accelerator="cpu", devices=1, num_nodes=round.world_size, strategy="ddp")
        self.fabric.launch()
        assert (self.fabric.global_rank, self.fabric.world_size) == (round.rank, round.world_size)
        self.wrapped, self.prepared = self.fabric.setup(self.model, self.optimizer)
        return self.step

    def train_one(self) -> None:
        """Make one step with Fabric."""
        trained(self.wrapped, self.prepared, next(self.batches), self.fabric.backward)


class ByAccelerate(Replicated):
    """accelerate keeps its state in the process, so it is reset in each round."""

    def begin(self, round: rdzv.torch.TorchRound) -> int:
        """Begin as usual. Then wrap again with accelerate."""
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        super().begin(round)
        os.environ.update(RANK=str(round.rank), WORLD_SIZE=str(round.world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        # the group exists already; accelerate only wants the variables to be set
        os.environ.update(MASTER_ADDR="unused", MASTER_PORT="1")
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True)
        assert (self.accelerator.process_index, self.accelerator.num_processes) == (round.rank, round.world_size)
        self.wrapped, self.prepared = self.accelerator.prepare(self.model, self.optimizer)
        return self.step

    def train_one(self) -> None:
        """Make one step with accelerate."""
        trained(self.wrapped, self.prepared, next(self.batches), self.accelerator.backward)


class Sharded:
    """A model of which each member has a shard (FSDP2). Each round makes it again, from state that the run keeps."""

    def __init__(self, _: str) -> None:
        """Do nothing: each round makes all of it."""

    def begin(self, round: rdzv.torch.TorchRound) -> int:
        """Read the newest state, and shard it over the members of this round."""
        self.round = round
        kept = round.restore("state")
        saved = torch.load(io.BytesIO(kept)) if kept is not None else {"step": 0, "model": new_model().state_dict()}
        self.model = new_model()
        self.model.load_state_dict(saved["model"])
        fully_shard(self.model, mesh=dist.init_device_mesh("cpu", (round.world_size,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return int(saved["step"])

    def train(self, step: int) -> None:
        """Make one step. Then rank 0 keeps the full state with the run (a real model would need a checkpoint)."""
        trained(self.model, self.optimizer, torch.ones(4, 8))
        whole = self.state()
        if self.round.rank == 0:
            file = io.BytesIO()
            torch.save({"step": step + 1, "model": whole}, file)
            self.round.keep("state", file.getvalue())

    def finish(self) -> None:
        """Do nothing: no helpers run beside."""

    def state(self) -> Any:
        """Return the full state, on every member."""
        return get_model_state_dict(
            self.model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        )


OF_KIND: Final[dict[str, Callable[[str], Any]]] = {
    "fully_shard": Sharded,
    "fabric": ByFabric,
    "accelerate": ByAccelerate,
}


def member(url: str, kind: str, name: str) -> None:
    """Train until the last step, through a loss. All remaining members end with the same state."""
    training: Any = OF_KIND.get(kind, Replicated)(kind)
    for round in rdzv.torch.rounds(url, node_id=name):
        with round:
            step = training.begin(round)
            while step < LAST:
                round.check(step)
                training.train(step)
                step += 1
                if name == "c" and step == DIES_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
            training.finish()
            states: list[Any] = [None] * round.world_size
            dist.all_gather_object(states, {key: value.tolist() for key, value in training.state().items()})
            assert all(state == states[0] for state in states)
            told = f"{kind}: {name} ends with the others, {round.world_size} of 3, after {step} steps\n"
            os.write(1, told.encode())  # with a single write: the members share the stream


def main(url: str, *kinds: str) -> None:
    """Fork the members of each kind, one kind after the other."""
    torch.set_num_threads(1)
    torch.optim.SGD(new_model().parameters(), lr=0.1)  # it imports modules that are slow to import
    for kind in kinds:
        children = {}
        for name in "abc":
            pid = os.fork()
            if pid == 0:
                with tempfile.TemporaryDirectory() as folder:
                    os.environ.setdefault("CHECKPOINTS", folder)
                    member(f"{url}/{kind}?min_nodes=2&max_nodes=3&last_call_timeout=60", kind, name)
                sys.exit()
            children[name] = pid
        ends = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in children.items()}
        assert ends == {"a": 0, "b": 0, "c": -signal.SIGKILL}, (kind, ends)


if __name__ == "__main__":
    main(*sys.argv[1:])
