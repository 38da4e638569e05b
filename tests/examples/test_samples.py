"""Every Python sample in README.md and docs/ runs as it stands, and passes `mypy --strict`."""

from __future__ import annotations

import re
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
import pytest

import rdzv
import store
from tests.support.processes import ROOT, require, start, start_python

if TYPE_CHECKING:
    from pathlib import Path

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


def test_the_readme_has_samples() -> None:
    assert sum(str(sample.id).startswith("README") for sample in SAMPLES) >= 2


async def test_all_samples_pass_mypy_strict(tmp_path: Path) -> None:
    require("mypy.api")  # a command of that name may be of another Python
    files = []
    for sample in SAMPLES:
        (code,) = sample.values
        files.append(tmp_path / f"{str(sample.id).replace('-', '_')}.py")
        files[-1].write_text(str(code))
    command = (sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"))
    async with start(*command, *map(str, files), cwd=ROOT) as mypy:
        assert await mypy.wait(timeout=120) == 0, mypy.written()


@pytest.mark.parametrize("code", SAMPLES)
async def test_a_sample_runs_with_a_second_node_and_until_the_run_is_closed(code: str, tmp_path: Path) -> None:
    """On the store of the test instead of the machine `head`; nothing else of it is changed."""
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
        if "store.connect(" not in code and "set_closed" not in code:  # who uses the store alone meets nobody
            async with rdzv.connect(f"{server.url}/job-7", is_host=False) as observer:
                while (status := await observer.status()).world_size != 2:
                    assert status.closed is None, f"it was over before two nodes had met: {status.reason}"
                    await anyio.sleep(0.05)  # nothing tells an observer
                await observer.set_closed("the test has seen enough")
        for sample in samples:
            assert await sample.wait(timeout=30) == 0, sample.written()
