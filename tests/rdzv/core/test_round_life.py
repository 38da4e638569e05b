"""The end of a round for one member: whether a failure is its own error, and how long it waits for news of a loss."""

import asyncio

import pytest

from rdzv.core.round_life import find_give_up_error, is_genuine_failure, loss_known_within
from rdzv.errors import GiveUp, MembersLostError, RoundChanged, RoundSupersededError, mark_run

HUNG_UP = OSError("peer has hung up")
FIRST, SECOND = GiveUp("loss is NaN"), GiveUp("no disk")


def group(*errors: BaseException) -> BaseExceptionGroup[BaseException]:
    return BaseExceptionGroup("tasks", errors)


@pytest.mark.parametrize(
    ("failure", "is_own", "verdict"),
    [
        ("rank 1 exited with status 1", True, None),
        (HUNG_UP, True, None),
        (RoundChanged("over"), False, None),
        (MembersLostError("b"), False, None),
        (RoundSupersededError("dropped"), False, None),
        (mark_run("job", RoundChanged("over")), False, None),
        (group(mark_run("outer", MembersLostError("b")), HUNG_UP), None, None),
        (KeyboardInterrupt(), None, None),
        (asyncio.CancelledError(), None, None),
        (FIRST, True, FIRST),
        (group(HUNG_UP), True, None),
        (group(MembersLostError("b"), group(RoundChanged("over"), RoundSupersededError("dropped"))), False, None),
        (group(MembersLostError("b"), HUNG_UP), True, None),
        (group(MembersLostError("b"), KeyboardInterrupt()), None, None),
        (group(HUNG_UP, group(group(FIRST), SECOND)), True, FIRST),
        (group(KeyboardInterrupt(), FIRST), None, FIRST),
    ],
)
def test_an_error_group_is_judged_by_its_leaves(
    failure: BaseException | str, is_own: bool | None, verdict: GiveUp | None
) -> None:
    assert is_genuine_failure(failure, "job") is is_own
    assert find_give_up_error(failure) is verdict


def test_the_first_to_fail_waits_for_news_as_long_as_a_death_may_go_unnoticed() -> None:
    """Regression: if the store had just come back, a survivor ended with the error that a dead peer had caused."""
    assert loss_known_within(disconnect_ttl=1, ttl=10) == 2
    assert loss_known_within(disconnect_ttl=1, ttl=10, connected_for=3) == 8
    assert loss_known_within(disconnect_ttl=1, ttl=10, connected_for=60) == 2
