"""What becomes of a round in which not all reach rank 0; how that is seen, on real hosts, is in `tests/hosts`."""

from __future__ import annotations

import pytest

from rdzv.bootstrap_check import Verdict, judge


@pytest.mark.parametrize(
    ("missing", "size", "needed", "left_out"),
    [
        ([3], 4, 2, (3,)),
        ([3], 4, 3, (3,)),
        ([3], 4, 4, ()),  # too few go on: another node is rank 0
        ([2, 3], 4, 2, (2, 3)),
        ([1, 2, 3], 4, 1, ()),  # it is rank 0 that is not reached
        ([2, 3, 4], 5, 2, ()),
        ([], 4, 2, ()),  # nobody could listen
        ([1], 2, 1, ()),  # of two, either may be to blame
    ],
)
def test_who_has_not_come_is_left_out_if_enough_and_most_have(
    missing: list[int], size: int, needed: int, left_out: tuple[int, ...]
) -> None:
    assert judge("why", missing, size=size, needed=needed, again=False).left_out == left_out


def test_of_two_the_second_is_left_out_once_each_has_been_rank_0() -> None:
    assert judge("why", [1], size=2, needed=1, again=True).left_out == (1,)
    assert judge("why", [1], size=2, needed=2, again=True).left_out == ()


def test_a_verdict_travels() -> None:
    verdict = judge("n3 did not come", [3], size=4, needed=2, again=False)
    assert Verdict.unpack(verdict.pack()) == verdict
