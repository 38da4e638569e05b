"""A group gets other members in place, with data exchanged in a round. PyTorch 2.14 and later can do that."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tests.support.processes import require

require("torch")

import pytest  # noqa: E402

import rdzv.sync  # noqa: E402
import rdzv.torch  # noqa: E402
from rdzv.torch import pytorch  # noqa: E402

if TYPE_CHECKING:
    from rdzv.loop.blocking import Round

TIMEOUT = timedelta(seconds=60)


def in_rounds(url: str, name: str, told: Any) -> None:
    """Run a member whose default group goes through two rounds. The member `c` is killed in the first."""
    import torch
    import torch.distributed as dist

    store = rdzv.torch.TorchStore(url, TIMEOUT)
    for round in rdzv.sync.rounds(url, node_id=name):
        with round:
            if not dist.is_initialized():
                options: Any = {"enable_reconfigure": True}
                size, rank = round.world_size, round.rank
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT, **options)
            uuid, handles = rdzv.torch.rendezvous_reconfigure(round)
            dist._reconfigure(uuid=uuid, handles=handles, timeout=TIMEOUT).wait()
            total = torch.ones(1)
            dist.all_reduce(total)
            told.put((round.number, dist.get_rank(), dist.get_world_size(), int(total), uuid))
            if round.world_size == 2:
                break
            if name == "c":
                told.close()
                told.join_thread()
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                round.check(0)


@pytest.mark.skipif(pytorch.reconfigure_handle is None, reason="this release of PyTorch cannot reconfigure groups")
@pytest.mark.timeout(300)
def test_a_group_continues_with_the_remaining_members(url: str, run_id: str) -> None:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    where = f"{url}/{run_id}?min_nodes=2&max_nodes=3&last_call_timeout=60"
    members = [context.Process(target=in_rounds, args=(where, name, told)) for name in "abc"]
    for member in members:
        member.start()
    heard = sorted(told.get(timeout=240) for _ in range(5))
    for member in members:
        member.join()
    uuids = [uuid for *_, uuid in heard]
    assert [tuple(it) for *it, _ in heard] == [(0, 0, 3, 3), (0, 1, 3, 3), (0, 2, 3, 3), (1, 0, 2, 2), (1, 1, 2, 2)]
    assert len(set(uuids)) == 2, "one number for all members of a round, and a fresh one in the next"


class Exchange:
    """A round with one member, whose store is a dictionary."""

    number, rank, world_size = 3, 0, 1

    def __init__(self) -> None:
        self.store = self
        self.kept: dict[str, bytes] = {}
        self.calls = 0

    def add(self, _: str, amount: int) -> int:
        self.calls += amount
        return self.calls

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.kept[key] for key in keys]


def test_each_call_in_a_round_gives_a_new_id_and_old_releases_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = importlib.import_module("rdzv.torch.rounds")  # `rdzv.torch.rounds` is the function
    round: Round = Exchange()  # type: ignore[assignment]
    monkeypatch.setattr(rounds, "reconfigure_handle", lambda group: f"of {group}")
    first, handles = rdzv.torch.rendezvous_reconfigure(round, "a group")
    second, _ = rdzv.torch.rendezvous_reconfigure(round)
    assert handles == ["of a group"]
    assert first != second
    monkeypatch.setattr(rounds, "reconfigure_handle", None)
    with pytest.raises(rdzv.RendezvousSettingsError, match=r"cannot reconfigure a group; 2\.14"):
        rdzv.torch.rendezvous_reconfigure(round)
