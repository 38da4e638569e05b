"""A program for `test_r25_equal_after_a_loss`: runs that lose, gain or drain a member, and the same without.

python -m tests.rdzv.torch.interrupted_program STORE FOLDER CASE...

A case is `KIND.WAY.PLACE.TWIN`. WAY is the change in the run of members a and b:

* `killed`: b is killed in its step 5, at PLACE, and c replaces it; at `sync`, c is killed, too, before its `sync_state`
* `drained`: a drains b after its step 5, and c replaces it
* `resized`: a shrinks the run to itself after its step 5, and two steps later accepts b again
* `newcomer`: a begins alone, and b joins in its step 5

Each step has two batches. Gradients are dropped only after the optimizer's step, so gradients left over from an
interrupted step would count in the next one. A run ends four steps after the last change. Each member that reaches the
end writes its state to FOLDER. Afterwards runs of each kind without any change write the state after each step:
`KIND.calm` of two members, and `KIND.alone` of one. (In `resized` and `newcomer` all members have the same data, and
the mean of two equal gradients is exact.)
"""

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # otherwise each member would import it, in almost a second
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import rdzv
import rdzv.sync
import rdzv.torch
from rdzv.node.blocking_handler import Handler

AT = 5
BATCHES = 2
AFTER = 4  # steps of a run after its last change
AT_ONCE = 4  # runs that are played concurrently


class Case(NamedTuple):
    """One run."""

    kind: str
    way: str
    place: str = ""
    twin: str = "blocking"

    @property
    def last_round(self) -> int:
        """The number of the round after the last change."""
        return 0 if self.is_calm else 2 if self.place == "sync" or self.way == "resized" else 1

    @property
    def undisturbed(self) -> str:
        """The way of a run without changes that ends in the same state."""
        return "alone" if self.way in {"alone", "resized", "newcomer"} else "calm"

    @property
    def is_calm(self) -> bool:
        """True for a run without changes."""
        return self.way in {"calm", "alone"}

    @property
    def members(self) -> str:
        """The names of the members, the last one to join first."""
        return {"alone": "a", "drained": "cba", "killed": "dcba" if self.place == "sync" else "cba"}.get(self.way, "ba")

    def url(self, store: str) -> str:
        """The URL of its run."""
        least, most = {"alone": (1, 1), "newcomer": (1, 2)}.get(self.way, (2, 2))
        return f"{store}/{'-'.join(self)}?min_nodes={least}&max_nodes={most}&is_host=false&rank_order=name"


class Count(torch.nn.Module):  # type: ignore[misc]  # PyTorch is read without its types
    """Counts batches in two buffers, which are replaced at each batch. One of them grows."""

    batches: torch.Tensor
    growing: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))
        self.register_buffer("growing", torch.zeros(0))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.batches = self.batches + 1
        self.growing = torch.zeros(int(self.batches) % 2)
        return data


class Member:
    """A member that trains with SGD. Other kinds override the parts that differ."""

    def __init__(self, case: Case, store: str, folder: Path, name: str) -> None:
        torch.set_num_threads(1)
        torch.set_printoptions(precision=10, threshold=sys.maxsize)  # all digits of a float32
        self.case, self.url, self.folder, self.name = case, case.url(store), folder, name
        self.model = self.new_model()
        self.optimizer = self.new_optimizer()
        self.step = 0

    def new_model(self) -> torch.nn.Module:
        """Make the model. It is the same on all members."""
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), Count(), torch.nn.Linear(8, 1))

    def new_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def brought(self, round: Any) -> tuple[Any, Any, Any]:
        """Return the arguments of `sync_state`."""
        self.round, self.rank = round.number, round.rank
        if self.case.place == "sync" and self.name == "c":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.model, self.optimizer, (self.step, self.more())

    def more(self) -> Any:
        """Return the data that also goes through `extra`."""

    def begin(self, extra: Any) -> None:
        """Take over the data that came through `extra`, and wrap the model for this round."""
        self.step, _ = extra
        self.wrapped = DistributedDataParallel(self.model)

    def expect_end(self) -> None:
        """Set the last step of the run, if this is its last round."""
        self.began = self.step
        if self.case.is_calm:
            self.end = int((self.folder / f"{self.case.kind}.{self.case.way}.steps").read_text())
        else:
            self.end = self.step + AFTER if self.round >= self.case.last_round else sys.maxsize

    def batch(self, number: int) -> torch.Tensor:
        """Return the batch of a step, and of a rank if all runs of this way have two members."""
        apart = self.rank if self.case.undisturbed == "calm" else 0
        torch.manual_seed(self.step * 10 + number * 5 + apart)
        return torch.randn(8, 4)

    def gradients(self) -> torch.Tensor:
        """Collect the gradients of all batches; return the loss."""
        losses = []
        for number in range(BATCHES):
            self.wrapped.require_backward_grad_sync = number == BATCHES - 1
            losses.append(self.wrapped(self.batch(number)).sub(1).pow(2).mean())
            self.backward(losses[-1])
            if number == 0:
                self.die_at("batch")
        self.die_at("backward")
        return torch.stack(losses).detach().sum()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one batch."""
        loss.backward()

    def take_step(self) -> None:
        """Make the optimizer's step."""
        self.gradients()
        self.optimizer.step()

    def make_step(self) -> None:
        """Make one step, then begin a change if it is due."""
        self.take_step()
        self.die_at("stepped")
        self.optimizer.zero_grad()
        self.step += 1
        if self.case.is_calm:
            self.write()
        elif self.name == "a" and self.round < self.case.last_round:
            self.change()

    def change(self) -> None:
        """Begin a change at its step. From then on make slow steps, so that few are made until it happens."""
        first, second = self.round == 0 and self.step >= AT, self.round == 1 and self.step >= self.began + 2
        if first and not self.path("first").exists():
            self.path("first").touch()
            self.announce(nodes=1)
        if second and not self.path("second").exists():
            self.path("second").touch()
            self.announce(nodes=2)
        time.sleep(0.02 * (first or second))

    def announce(self, nodes: int) -> None:
        """Drain b, or resize the run."""
        with rdzv.sync.connect(self.url, is_host=False) as handler:
            assert isinstance(handler, Handler)
            if self.case.way == "drained":
                handler.drain(within=600, reason="its turn", node_id="b")
            elif self.case.way == "resized":
                handler.resize(nodes, nodes)

    def die_at(self, place: str) -> None:
        """Kill b at the place of its case."""
        wished = "batch" if self.case.place == "sync" else self.case.place
        if (self.case.way, self.step, self.name, place) == ("killed", AT, "b", wished):
            os.kill(os.getpid(), signal.SIGKILL)

    def train(self) -> None:
        """Train in a loop that blocks."""
        self.wait_for_turn()
        for round in rdzv.torch.rounds(self.url, node_id=self.name):
            with round:
                self.begin(round.sync_state(*self.brought(round)))
                self.expect_end()
                while self.step < self.end:
                    self.die_at("check")
                    round.check(self.step)
                    self.make_step()
                self.write()

    async def train_awaited(self) -> None:
        self.wait_for_turn()
        async for round in rdzv.torch.rounds(self.url, node_id=self.name):
            async with round:
                extra = await round.sync_state(*self.brought(round))
                await round.in_thread(self.begin, extra)
                self.expect_end()
                while self.step < self.end:
                    self.die_at("check")
                    await round.check(self.step)
                    await round.in_thread(self.make_step)
                await round.in_thread(self.write)

    def wait_for_turn(self) -> None:
        """Wait until the run can accept this member."""
        while self.case.way == "newcomer" and self.name == "b" and not self.path("first").exists():
            time.sleep(0.01)

    def path(self, what: str) -> Path:
        """Return the path of a file of this run."""
        return self.folder / f"{'.'.join(self.case)}.{what}"

    def write(self) -> None:
        """Write this member's state after this step."""
        weights, optimizer = self.whole()
        buffers = [tensor.flatten().tolist() for tensor in self.model.buffers()]
        state = {
            "weights": repr(weights),
            "optimizer": repr(optimizer),
            "more": self.more(),
            "counted": [int(self.model[1].num_batches_tracked), int(self.model[2].batches)],
            "buffers": buffers if self.name == "a" else None,  # DDP broadcasts those of rank 0
        }
        self.path(f"{self.name}.{self.step}").write_text(json.dumps(state))

    def whole(self) -> tuple[Any, Any]:
        """Return the full state of the parameters and of the optimizer."""
        return list(self.model.parameters()), self.optimizer.state_dict()


class WithAdam(Member):
    """A member that trains with AdamW."""

    def new_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)


class WithScaler(Member):
    """A member with scaled gradients. Every fifth step overflows, and the scaler skips the optimizer's step."""

    def __init__(self, case: Case, store: str, folder: Path, name: str) -> None:
        super().__init__(case, store, folder, name)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def new_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)  # a fused optimizer would not be skipped

    def more(self) -> Any:
        return self.scaler.state_dict()

    def begin(self, extra: Any) -> None:
        super().begin(extra)
        self.scaler.load_state_dict(extra[1])

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss * float("inf") if self.step % 5 == 0 else loss).backward()

    def take_step(self) -> None:
        self.gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class WithLbfgs(Member):
    """A member that trains with LBFGS, each step of which calls its closure several times."""

    def new_optimizer(self) -> Any:
        return torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3, history_size=4)

    def take_step(self) -> None:
        self.evaluations = 0
        self.optimizer.step(self.closure)

    def closure(self) -> torch.Tensor:
        """Evaluate the model. All members get the mean of their losses, which decides the steps of LBFGS."""
        self.evaluations += 1
        self.optimizer.zero_grad()
        loss = self.gradients() / dist.get_world_size()
        dist.all_reduce(loss)
        return loss

    def die_at(self, place: str) -> None:
        """Die in the third evaluation."""
        if place not in {"batch", "backward"} or self.evaluations == 3:
            super().die_at(place)


class WithShards(Member):
    """A member with a shard of the model. Each round reads it from a checkpoint, which is written every second step."""

    def brought(self, round: Any) -> tuple[Any, Any, Any]:
        return None, None, super().brought(round)[2]

    def begin(self, _: Any) -> None:
        from torch.distributed.fsdp import fully_shard  # in 2.6 and later

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = fully_shard(self.new_model(), mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.wrapped, self.step = self.model, 0
        found = sorted(self.path("checkpoints").glob("*"), key=lambda one: int(one.name))
        if found:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=found[-1])
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            self.step = int(found[-1].name)

    def take_step(self) -> None:
        """Make the step, and before every second one a checkpoint, which is complete or does not exist."""
        if self.step % 2 == 0 and not self.path(f"checkpoints/{self.step}").exists():
            model, optimizer = get_state_dict(self.model, self.optimizer)
            being_made = self.path("unfinished")
            planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # the buffers of rank 0
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=being_made, planner=planner)
            if self.rank == 0:
                self.path("checkpoints").mkdir(exist_ok=True)
                being_made.rename(self.path(f"checkpoints/{self.step}"))
            dist.barrier()
        super().take_step()

    def whole(self) -> tuple[Any, Any]:
        weights, optimizer = get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))
        return [weights[name] for name, _ in self.model.named_parameters()], optimizer


KINDS = {"sgd": Member, "adam": WithAdam, "scaler": WithScaler, "lbfgs": WithLbfgs, "shards": WithShards}


def forked(case: Case, store: str, folder: Path, name: str) -> int:
    """Fork one member; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        member = KINDS[case.kind](case, store, folder, name)
        if case.twin == "awaited":
            asyncio.run(member.train_awaited())
        else:
            member.train()
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def play(cases: list[Case], store: str, folder: Path) -> None:
    """Fork the members of all runs, some runs at once. When a member ends early, fork the next one of its run."""
    to_come = {case: list(case.members) for case in cases}
    alive: dict[int, Case] = {}
    while to_come or alive:
        for case in [case for case in to_come if case not in alive.values()][: AT_ONCE - len(set(alive.values()))]:
            for _ in range(1 if case.way == "alone" else 2):
                alive[forked(case, store, folder, to_come[case].pop())] = case
        pid, status = os.wait()
        case = alive.pop(pid)
        assert status in {0, signal.SIGKILL}, f"a member of {'.'.join(case)} ended with {status}"
        if to_come[case]:
            alive[forked(case, store, folder, to_come[case].pop())] = case
        elif case not in alive.values():
            del to_come[case]
            print(".".join(case), flush=True)


def calm_after(cases: list[Case], folder: Path) -> Iterator[Case]:
    """Yield the runs without changes, as long as the longest of these."""
    for kind, way in dict.fromkeys((case.kind, case.undisturbed) for case in cases):
        like = [".".join(case) for case in cases if (case.kind, case.undisturbed) == (kind, way)]
        steps = [int(path.suffix[1:]) for one in like for path in folder.glob(f"{one}.[a-d].*")]
        (folder / f"{kind}.{way}.steps").write_text(str(max(steps)))
        yield Case(kind, way)


def main(store: str, folder: str, *named: str) -> None:
    """Play all these runs, and then those without changes."""
    cases = [Case(*one.split(".")) for one in named]
    play(cases, store, Path(folder))
    play(list(calm_after(cases, Path(folder))), store, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
