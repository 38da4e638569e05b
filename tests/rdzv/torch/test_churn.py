"""Members join, are drained, leave in the middle of a step, or are killed as groups are made: a short run of each."""

import pytest

from tests.support.processes import require, start_python

require("torch")  # the imports below need it

from rdzv.torch.pytorch import RELEASE  # noqa: E402


@pytest.mark.timeout(300)  # it forks a process for each member, which is slow on a busy machine
async def test_groups_outlive_drains_arrivals_and_kills() -> None:
    """`python -m benchmarks.torch_churn` plays 50 arrivals, 50 drains, 200 rounds and 80 kills."""
    # Before 2.9, making a group with a member that is killed meanwhile may take five times the group's timeout.
    played = ["drains", "rounds", *(["kills"] if RELEASE >= (2, 9) else [])]
    counts = ("--changes=2", "--rounds=4", "--kills=4", "--only", *played)
    async with start_python("-m", "benchmarks.torch_churn", *counts) as churn:
        assert await churn.wait(timeout=240) == 0, churn.written()
        assert "drains: 2 arrivals and 2 drains, no collective aborted" in churn.output
        said = [line.partition(":")[0] for line in churn.output]  # gloo may print other lines about a killed peer
        assert [word for word in said if word in ("drains", "rounds", "kills")] == played


@pytest.mark.timeout(300)
async def test_a_job_outlives_its_members_and_the_restart_of_its_host() -> None:
    """`python -m benchmarks.torch_faults` plays twelve kinds of faults for 20 minutes."""
    only = ("--only", "a member killed", "the host killed", "resized")
    async with start_python("-m", "benchmarks.torch_faults", "--seconds=1", "--busy=0", *only) as churn:
        assert await churn.wait(timeout=240) == 0, churn.written()
