"""PyTorch over etcd: its store through C++, and torchrun. Only the URL differs."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from tests.rdzv.torch.test_torchrun import Job
from tests.support.etcd import serve_etcd
from tests.support.processes import require

require("torch")  # the imports below need it

import torch.distributed as dist  # noqa: E402

from rdzv.torch import TorchStore  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_etcd() as served:
        yield served.url


def test_the_store_works_under_a_prefix_store_through_c_plus_plus(url: str) -> None:
    first, second = (dist.PrefixStore("p", TorchStore(f"{url}/job", timeout=timedelta(seconds=10))) for _ in range(2))
    first.set("a", "1")
    assert second.get("a") == b"1"
    assert [first.add("n", 2), second.add("n", 3)] == [2, 5]
    assert first.compare_set("a", "1", "2") == b"2"
    writing = threading.Timer(0.1, lambda: second.set("late", "come"))
    writing.start()
    first.wait(["late"])
    writing.join()
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 100ms, keys: (/p)?/never"):
        first.wait(["never"], timedelta(milliseconds=100))
    assert first.delete_key("a")


async def test_torchrun_takes_etcd_as_its_endpoint(url: str, tmp_path: Path) -> None:
    async with Job(tmp_path, url) as job:
        agent = await job.agent("--rdzv-conf=last_call_timeout=0,etcd_prefix=/my/runs")
        says = await job.first_step(agent)
        assert (says["rank"], says["size"]) == (0, 1), json.dumps(says)
        job.stop()
        assert await agent.wait(timeout=30) == 0
