"""Every order of the messages of three nodes, as far as that is quick. `python -m tests.sim explore` covers more.

It runs in processes of its own, since it forks and the tests' process has threads.
"""

import subprocess
import sys

import pytest

from tests.sim.explorer.bugs import BUGS
from tests.support.processes import ROOT

LIMIT = 600.0  # seconds; an idle machine needs two


def explore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "tests.sim", "explore", *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.in_ci
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("scenario", ["take-over", "take-over-joined"])
def test_the_promises_hold_in_every_order_after_the_coordinators_death(scenario: str) -> None:
    done = explore(scenario)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not all of them" not in done.stdout
    assert int(done.stdout.split()[1].replace(",", "")) > 50, done.stdout
    assert "not all of them" in explore("again", "--seconds", "0").stdout, "left out states are mentioned"


@pytest.mark.in_ci
@pytest.mark.timeout(LIMIT)
def test_each_planted_bug_is_found() -> None:
    done = explore("--bugs", "")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(BUGS)
    assert done.stdout.count("python -m tests.sim explore") == len(BUGS)


def test_a_path_is_printed_step_by_step() -> None:
    done = explore("death", "--steps", "c0 t t t1")
    assert done.returncode == 0, done.stderr
    assert "crash 0" in done.stdout
    assert "record of n0 gone" in done.stdout
