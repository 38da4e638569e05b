"""A round's process group ends where a member is stuck, and leaves nothing behind."""

from __future__ import annotations

import threading

import pytest

from tests.support.processes import require, start_python

require("torch")


async def test_a_blocked_collective_ends_when_it_is_aborted_and_the_rest_make_a_new_group(url: str) -> None:
    async with start_python("-m", "tests.rdzv.torch.group_program", url) as program:
        assert await program.wait(timeout=60) == 0, program.written()
        assert sum("from abort to error" in line for line in program.stdout) == 3
        assert sum("nothing is left of" in line for line in program.stdout) == 3


def test_nccl_is_refused_where_its_watchdog_would_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from rdzv import RendezvousSettingsError
    from rdzv.torch.group import RoundGroup

    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    group = RoundGroup(None, rank=0, world_size=1, backend="nccl", timeout=timedelta(seconds=1))
    with pytest.raises(RendezvousSettingsError, match="set TORCH_NCCL_ASYNC_ERROR_HANDLING=0 before"):
        group.make()


def test_an_abort_does_not_wait_for_a_group_that_is_being_made() -> None:
    """From the node's thread, whose leases ran out while gloo tried to reach for ten seconds who was killed."""
    from datetime import timedelta

    from rdzv.torch.group import RoundGroup

    group = RoundGroup(None, rank=0, world_size=2, backend="gloo", timeout=timedelta(seconds=1))
    with group._noting_sockets():  # as while `make` waits for gloo
        group.abort()
    for aborting in [thread for thread in threading.enumerate() if thread.name == "rdzv group abort"]:
        aborting.join(60)
        assert not aborting.is_alive()
