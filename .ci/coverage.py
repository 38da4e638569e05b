"""Measure which lines and branches of each room its own tests reach, and print it folder by folder.

    python .ci/coverage.py                 all folders
    python .ci/coverage.py store/engine    some of them

Only the tests in the same place under tests/ count for a room: what the guarantees and the simulations reach besides
is not evidence that a room is tested. Processes that the tests start are measured, too, unless they are killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WANTED = 95.0  # percent of each file, of lines and branches together


def main(chosen: list[str]) -> int:
    """Measure each folder by itself, and print what there is to see. It judges nothing.

    The suite has judged the tests before. Under coverage they run two to three times slower, and one that runs into a
    limit of time then says nothing of the product; that its figures are not whole is printed.
    """
    for folder in chosen or folders():
        began = time.monotonic()
        passed, files = measure(folder)
        reached, there = (sum(each) for each in zip(*files.values(), strict=True)) if files else (0, 0)
        print(f"{folder:20} {percent(reached, there):5.1f} %  ({time.monotonic() - began:.0f} s)", flush=True)
        for file, (reached, there) in sorted(files.items()):
            if percent(reached, there) < WANTED:
                print(f"    {file:36} {percent(reached, there):5.1f} %", flush=True)
        if not passed:
            print("    some of its tests failed, so that these figures are not whole", flush=True)
    return 0


def folders() -> list[str]:
    """Each package, for the rooms in its own folder, and each of its sub-packages."""
    packages = [ROOT / "store", ROOT / "rdzv"]
    below = [path.parent for package in packages for path in sorted(package.glob("*/__init__.py"))]
    return [path.relative_to(ROOT).as_posix() for path in (*packages, *below)]


def measure(folder: str) -> tuple[bool, dict[str, tuple[int, int]]]:
    """Run the folder's own tests: whether they passed, and how much of each file they reached, and there is."""
    tests = ROOT / "tests" / folder
    # Of a package, what stands in its own folder: its sub-packages have figures of their own.
    which = [str(tests)] if "/" in folder else [str(path) for path in sorted(tests.glob("test_*.py"))]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "4", "--dist", "loadfile"]
        run = subprocess.run(  # noqa: S603  a command of our own
            [*pytest, f"--cov={folder}", "--cov-branch", f"--cov-report=json:{report}", *which],
            cwd=ROOT,
            env={**os.environ, "COVERAGE_FILE": str(Path(directory) / "data")},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        measured = json.loads(report.read_text(encoding="utf-8"))["files"] if report.exists() else {}
    return run.returncode == 0, {
        file: (
            figures["summary"]["covered_lines"] + figures["summary"]["covered_branches"],
            figures["summary"]["num_statements"] + figures["summary"]["num_branches"],
        )
        for file, figures in measured.items()
        if Path(file).parent.as_posix() == folder
    }


def percent(reached: int, there: int) -> float:
    """What share it is; of nothing, all."""
    return 100 * reached / there if there else 100.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
