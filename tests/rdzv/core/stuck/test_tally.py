"""The module `rdzv.core.stuck.tally`."""

import pytest

from rdzv.core.stuck.tally import RunCounts


def test_a_round_reported_by_several_nodes_counts_once() -> None:
    tally = RunCounts().after(0, restart=True, failed=True)
    tally = tally.after(0, failed=True).after(0, failed=True)
    assert tally == RunCounts(restarts=1, fruitless=1, round=0)
    assert tally.after(1, failed=True).after(2, restart=True, failed=True) == RunCounts(
        restarts=2, fruitless=3, round=2
    )


@pytest.mark.parametrize("first", ["the checkpoint", "the failure"])
def test_a_checkpoint_on_any_node_counts_as_progress_in_any_order_of_reports(first: str) -> None:
    tally = RunCounts().after(0, failed=True).after(1, failed=True)
    told = ({"achieved": True, "failed": True}, {"failed": True})
    for each in told if first == "the checkpoint" else reversed(told):
        tally = tally.after(2, **each)
    assert tally.fruitless == 0
    assert tally.after(3, failed=True).fruitless == 1


def test_an_announced_change_counts_neither_as_failure_nor_as_progress() -> None:
    assert RunCounts(restarts=2, fruitless=1, round=4).after(5) == RunCounts(restarts=2, fruitless=1, round=4)


@pytest.mark.parametrize("there", [b"", b"\xc1 not ours"])
def test_a_missing_or_unreadable_tally_counts_nothing(there: bytes) -> None:
    """Regression: a tally that could not be read ended every member that counts its rounds."""
    assert RunCounts.of(there) == RunCounts()
