"""The example of users' recovery tests works outside this project, and docs/testing.md shows its code."""

import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.support.processes import ROOT, start

PROJECT = ROOT / "examples" / "testing"
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")

PLUGIN = [] if any(point.value == "rdzv_pytest" for point in entry_points(group="pytest11")) else ["-p", "rdzv_pytest"]
"""If rdzv was installed before it had a fixture, its entry point is missing."""


@pytest.mark.in_ci
async def test_a_project_of_a_user_tests_a_training_with_the_fixture() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", *PLUGIN)
    async with start(*command, cwd=PROJECT, env={"PYTHONPATH": str(ROOT)}) as pytest_run:
        assert await pytest_run.wait(timeout=90) == 0, pytest_run.written()
        assert "5 passed" in pytest_run.written()


SAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
OF_PROCESSES = [sample for sample in SAMPLES if "testing.processes(" in sample]

TRAINS = """
import os, time
print("step 3", flush=True)
while int(os.environ["RDZV_NODE_ID"][-1]) == 2:
    time.sleep(0.1)  # until it is killed
"""


async def test_the_sample_of_real_processes_runs_unchanged(tmp_path: Path) -> None:
    (sample,) = OF_PROCESSES
    (tmp_path / "train.py").write_text(TRAINS)
    async with start(sys.executable, "-c", sample, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}) as child:
        assert await child.wait(timeout=90) == 0, child.written()


@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if sample not in OF_PROCESSES])
def test_the_samples_of_the_page_are_in_the_example(sample: str) -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in PROJECT.glob("*.py"))
    for part in sample.strip().split("\n\n\n"):
        assert part in source, "copy it from the example"


async def test_pytest_without_the_fixture_imports_nothing_of_rdzv(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import sys\n\ndef test_it(): assert 'rdzv' not in sys.modules\n")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", *PLUGIN)
    async with start(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}) as pytest_run:
        assert await pytest_run.wait(timeout=60) == 0, pytest_run.written()
