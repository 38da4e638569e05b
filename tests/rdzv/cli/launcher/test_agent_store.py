"""`rdzv run --agent-store`: rank 0's launcher serves PyTorch's TCPStore at the workers' MASTER_PORT."""

import contextlib
import sys

import pytest

import store
from tests.support.launched import TAKES_MASTER_PORT
from tests.support.processes import Child, start_python

pytest.importorskip("torch")

GROUP = """
import os, torch, torch.distributed as dist
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)  # it listens before any worker does
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print("sum", int(ones), flush=True)
dist.destroy_process_group()
"""


def run(url: str, program: str, *options: str) -> contextlib.AbstractAsyncContextManager[Child]:
    return start_python("-m", "rdzv", "run", url, *options, "--", sys.executable, "-c", program)


async def test_workers_are_clients_of_the_store_that_rank_zeros_launcher_serves() -> None:
    with store.sync.serve() as server:
        url = f"{server.url}/job?min_nodes=2"
        async with run(url, GROUP, "--agent-store") as one, run(f"{url}&agent_store=1", GROUP) as other:
            for node in (one, other):
                await node.line(containing="sum 2", timeout=60)
                assert await node.wait(timeout=30) == 0


@pytest.mark.parametrize("options", [(), ("--agent-store",)])
async def test_it_is_off_by_default_and_then_torch_is_not_imported(options: tuple[str, ...]) -> None:
    shows = ("sh", "-c", "echo $TORCHELASTIC_USE_AGENT_STORE")
    with store.sync.serve() as server:
        words = ("-X", "importtime", "-m", "rdzv", "run", *options, f"{server.url}/job?min_nodes=1", "--", *shows)
        async with start_python(*words) as node:
            assert await node.wait() == 0
    imported = {line.rpartition("|")[2].strip() for line in node.output if line.startswith("import time:")}
    assert ("torch" in imported, f"[0] {bool(options)}" in node.stdout) == (bool(options), True)


async def test_a_worker_that_listens_at_the_port_itself_gets_an_error_with_the_remedy() -> None:
    with store.sync.serve() as server:
        async with run(f"{server.url}/job?min_nodes=1", TAKES_MASTER_PORT, "--agent-store") as node:
            await node.says("no --agent-store, leaves that port to the workers", timeout=60)
