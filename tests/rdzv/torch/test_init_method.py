"""`init_process_group` over our store and by our URLs, with real process groups."""

import pytest

import rdzv
from tests.support.processes import require, start_python

require("torch")  # the imports below need it


@pytest.mark.timeout(300)  # it imports PyTorch and forks a process for each rank, which is slow on a busy machine
@pytest.mark.parametrize(("way", "size"), [("store", 8), ("init", 3), ("rpc", 2)])
async def test_gloo_groups_form_and_end_over_our_store(way: str, size: int, url: str, run_id: str) -> None:
    ours = f"rdzv{url.removeprefix('tcp')}/{run_id}"
    where = {"store": f"{url}/{run_id}", "init": f"{ours}?min_nodes={size}", "rpc": f"{ours}/appended"}[way]
    async with start_python("-m", "tests.rdzv.torch.torch_group", way, where, str(size)) as group:
        assert await group.wait(timeout=240) == 0, group.written()
        assert f"all {size} are done" in group.output


THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch.distributed as dist
import rdzv.torch
rdzv.torch.register_init_method()
with ThreadPoolExecutor() as pool:
    made = pool.map(lambda name: next(dist.rendezvous(sys.argv[1] % name, timeout=timedelta(seconds=60)))[1:], "ab")
print("made", *made, flush=True)
"""


async def test_two_threads_that_make_groups_at_once_are_one_member(url: str, run_id: str) -> None:
    async with start_python("-c", THREADS, f"rdzv{url.removeprefix('tcp')}/{run_id}/%s?min_nodes=1") as child:
        await child.line("made (0, 1) (0, 1)", timeout=30)


def test_the_package_does_not_need_torch() -> None:
    assert rdzv.__file__
    assert "torch" not in vars(rdzv)["__all__"]
