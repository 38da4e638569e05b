"""A round's process group ends if a member is stuck, and leaves nothing behind."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.support.processes import require, start_python

require("torch")


async def test_a_blocked_collective_ends_when_it_is_aborted_and_the_rest_make_a_new_group(url: str) -> None:
    async with start_python("-m", "tests.rdzv.torch.group_program", url) as program:
        assert await program.wait(timeout=60) == 0, program.written()
        assert sum("from abort to error" in line for line in program.stdout) == 3
        assert sum("nothing is left of" in line for line in program.stdout) == 3


def test_uncaught_errors_are_printed_as_before_once_a_group_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch wraps the hook each time it makes a group. Regression: each line had the ranks of all rounds."""
    import torch.distributed as dist

    from rdzv.torch.group import RoundGroup

    def make() -> RoundGroup:
        group = RoundGroup(dist.HashStore(), rank=0, world_size=1, backend="gloo", timeout=timedelta(minutes=1))
        group.make()
        return group

    before = sys.excepthook
    group = make()
    assert sys.excepthook is not before
    group.close()
    assert sys.excepthook is before
    group = make()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # the user's own hook
    group.close()
    assert sys.excepthook is sys.__excepthook__


@pytest.mark.parametrize(("missing", "needed"), [("ASYNC_ERROR_HANDLING", "0 before"), ("BLOCKING_WAIT", "1 before")])
def test_nccl_is_refused_if_a_loss_would_end_the_process_or_go_unnoticed(
    missing: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rdzv import RendezvousSettingsError
    from rdzv.torch.group import RoundGroup

    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.delenv(f"TORCH_NCCL_{missing}")
    group = RoundGroup(None, rank=0, world_size=1, backend="nccl", timeout=timedelta(seconds=1))
    with pytest.raises(RendezvousSettingsError, match=f"set TORCH_NCCL_{missing}={needed}"):
        group.make()


def test_an_abort_of_nccl_does_not_block_the_nodes_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from rdzv.torch import group as room

    may_end, told = threading.Event(), list[str]()

    def abort_slowly() -> None:
        may_end.wait(60)
        told.append("aborted")

    monkeypatch.setattr(room, "abort_process_group", abort_slowly)
    group = room.RoundGroup(None, rank=0, world_size=2, backend="nccl", timeout=timedelta(seconds=1))
    group.abort()
    group.abort()
    told.append("the node's thread goes on")
    may_end.set()
    group.close()
    told.append("closed")
    assert told == ["the node's thread goes on", "aborted", "closed"]


class Making:
    """Replaces PyTorch's making of a group. Records the timeouts, and fails at the given ranks and attempts."""

    def __init__(self, *fails: tuple[int, int]) -> None:
        self.fails = set(fails)
        self.timeouts: dict[int, list[float]] = {0: [], 1: []}

    def __call__(self, *_: Any, rank: int, timeout: timedelta, **__: Any) -> None:
        self.timeouts[rank].append(timeout.total_seconds())
        if (rank, len(self.timeouts[rank]) - 1) in self.fails:
            raise RuntimeError("Connect timeout")


def make_both(monkeypatch: pytest.MonkeyPatch, making: Making) -> list[str]:
    """Let two members make their group in two threads. Return the outcome of each."""
    import torch.distributed as dist

    from rdzv.torch import group

    monkeypatch.setattr(dist, "init_process_group", making)
    monkeypatch.setattr(group, "set_group_timeout", lambda _: None)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    groups = [
        group.RoundGroup(store, rank=rank, world_size=2, backend="gloo", timeout=timedelta(hours=1)) for rank in (0, 1)
    ]

    def make(one: Any) -> str:
        try:
            one.make()
        except RuntimeError as error:
            return str(error)
        return "made"

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(make, groups))


def test_making_a_group_waits_less_than_two_seconds_for_a_dead_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a first connection, gloo waits five times as long as its timeout. Regression: 11 s without a way to abort."""
    making = Making()
    assert make_both(monkeypatch, making) == ["made", "made"]
    assert all(0 < 5 * timeout < 2 for timeout in making.timeouts[0])


def test_live_members_retry_together_with_a_longer_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    # one fails, then the other: a member whose group was made makes it again all the same
    making = Making((0, 0), (1, 1))
    assert make_both(monkeypatch, making) == ["made", "made"]
    assert making.timeouts[0] == making.timeouts[1]
    assert making.timeouts[0] == [making.timeouts[0][0] * factor for factor in (1, 2, 4)]


def test_if_a_member_never_connects_all_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    making = Making(*((0, attempt) for attempt in range(99)))
    told = make_both(monkeypatch, making)
    assert told[0] == "Connect timeout"
    assert "another member" in told[1]
    assert len(making.timeouts[1]) == len(making.timeouts[0]) < 10


def test_an_abort_does_not_wait_for_a_group_that_is_being_made() -> None:
    """Regression: the node's thread waited, and its leases expired, while gloo tried 10 s to reach a dead peer."""
    from rdzv.torch.group import RoundGroup

    group = RoundGroup(None, rank=0, world_size=2, backend="gloo", timeout=timedelta(seconds=1))
    with group._making:  # as while `make` waits for gloo
        group.abort()
    for aborting in [thread for thread in threading.enumerate() if thread.name == "rdzv group abort"]:
        aborting.join(60)
        assert not aborting.is_alive()
