"""Every Python sample in README.md and docs/ runs as it stands, and passes `mypy --strict`."""

import itertools
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

import rdzv
import store
from tests.support.processes import ROOT, require, start, start_python

PAGES = [
    ROOT / "README.md",
    # Those of two pages have tests of their own: test_testing.py, test_roles.py.
    *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "testing.md", ROOT / "docs" / "roles.md"}),
]
SAMPLES = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
]


JOINS = [sample for sample in SAMPLES if "tcp://" in str(sample.values[0]) and "--json" not in str(sample.values[0])]


def the_one_with(part: str) -> str:
    """Return the only sample that contains this text and does not run a node."""
    (code,) = [str(sample.values[0]) for sample in SAMPLES if part in str(sample.values[0]) and sample not in JOINS]
    return code


def test_every_sample_is_run_by_one_of_these_tests() -> None:
    assert any(str(sample.id).startswith("README") for sample in JOINS)
    apart = [str(sample.values[0]) for sample in SAMPLES if sample not in JOINS]
    assert sorted(apart) == sorted(map(the_one_with, ("--json", "init_process_group", "manual_seed(epoch)")))


async def test_all_samples_pass_mypy_strict(tmp_path: Path) -> None:
    require("mypy.api")  # a `mypy` command may belong to another Python
    files = []
    for sample in SAMPLES:
        (code,) = sample.values
        files.append(tmp_path / f"{str(sample.id).replace('-', '_')}.py")
        files[-1].write_text(str(code))
    command = (sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"))
    async with start(*command, *map(str, files), cwd=ROOT) as mypy:
        assert await mypy.wait(timeout=120) == 0, mypy.written()


@pytest.mark.in_ci
@pytest.mark.parametrize("code", JOINS)
async def test_a_sample_runs_with_a_second_node_and_until_the_run_is_closed(code: str, tmp_path: Path) -> None:
    """It uses the store of the test in place of the machine `head`. Nothing else is changed."""
    if "import torch" in code:
        require("torch")
    async with store.serve() as server, AsyncExitStack() as started:
        here = re.sub(r"tcp://[\w.]+:29400", server.url, code)
        assert here != code, "a sample names a store at its usual port"
        path = tmp_path / "sample.py"
        path.write_text(here)
        environment = {"RDZV_LAST_CALL_TIMEOUT": "0.2", "RDZV_JOIN_TIMEOUT": "20"}
        samples = [
            await started.enter_async_context(start_python("-W", "error", str(path), env=environment)) for _ in range(2)
        ]
        # a sample that uses only the store meets no other node
        if "store.connect(" not in code and "set_closed" not in code:
            async with rdzv.connect(f"{server.url}/job-7", is_host=False) as observer:
                while (status := await observer.status()).world_size != 2:
                    assert status.closed is None, f"it was over before two nodes had met: {status.reason}"
                    await anyio.sleep(0.05)  # there is no event for an observer
                await observer.set_closed("the test has seen enough")
        for sample in samples:
            assert await sample.wait(timeout=30) == 0, sample.written()


def test_the_rest_of_an_epoch_is_divided_among_the_members() -> None:
    require("torch")
    sample: dict[str, Any] = {}
    exec(the_one_with("manual_seed(epoch)"), sample)
    before = [sample["rest_of_epoch"](100, 7, 0, rank, 4)[:5] for rank in range(4)]  # a step with batches of 5
    after = [sample["rest_of_epoch"](100, 7, 20, rank, 3) for rank in range(3)]
    assert sorted(itertools.chain(*before, *after)) == list(range(100))


async def test_the_health_check_passes_only_for_a_run_that_trains(tmp_path: Path) -> None:
    async with store.serve() as server:
        path = tmp_path / "health.py"
        path.write_text(re.sub(r"tcp://[\w.]+:29400", server.url, the_one_with("--json")))

        async def checked() -> tuple[int, str]:
            async with start_python("-W", "error", str(path)) as child:
                return await child.wait(timeout=30), child.written()

        status, said = await checked()
        assert (status, "no run job-7" in said) == (1, True), said
        url = f"{server.url}/job-7?min_nodes=2"
        async with rdzv.connect(url, node_id="ada", is_host=False) as ada:
            async with rdzv.connect(url, node_id="ben", is_host=False) as ben, anyio.create_task_group() as meeting:
                for handler in (ada, ben):
                    meeting.start_soon(handler.next_rendezvous)
                with anyio.fail_after(30):
                    while (await ada.status()).phase is not rdzv.Phase.TRAINING:  # noqa: ASYNC110  no event to wait for
                        await anyio.sleep(0.05)
                status, said = await checked()
                assert (status, "trains with 2 nodes" in said) == (0, True), said
            status, said = await checked()
            assert (status, "ben" in said) == (1, True), said


async def test_the_script_for_torchrun_trains_and_continues_from_its_checkpoint(tmp_path: Path) -> None:
    require("torch")
    path, checkpoint = tmp_path / "train.py", tmp_path / "checkpoint.pt"
    path.write_text(the_one_with("init_process_group"))
    async with store.serve() as server:
        for run_id in ("first", "second"):
            words = [
                *("--rdzv-backend=rdzv", f"--rdzv-endpoint=127.0.0.1:{server.port}", f"--rdzv-id={run_id}"),
                *("--rdzv-conf=is_host=0", "--nnodes=2:2", "--max-restarts=3", str(path)),
            ]
            async with AsyncExitStack() as started:
                agents = [
                    await started.enter_async_context(
                        start_python("-m", "torch.distributed.run", *words, env={"CHECKPOINT": str(checkpoint)})
                    )
                    for _ in range(2)
                ]
                for agent in agents:
                    assert await agent.wait(timeout=120) == 0, agent.written()
                assert sum("trained 1000 steps" in agent.written() for agent in agents) == 1
            assert checkpoint.exists()
