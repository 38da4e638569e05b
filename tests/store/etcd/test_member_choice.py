"""The choice of the next member, and the pauses before it."""

import random

import pytest

from store.etcd.codec import Failure, FailureKind
from store.etcd.member_choice import PAUSE_FIRST, PAUSE_MOST, MemberSelector, max_retry_pause

GONE = Failure("nobody listens there", FailureKind.UNDONE)
SILENT = Failure("it has not answered within 1.0 s", FailureKind.DOUBT, silent=True)


def choice(members: int = 3, *, failed: tuple[int, ...] = (), seed: int = 1) -> MemberSelector:
    chosen = MemberSelector(members, random.Random(seed))
    for place in failed:
        chosen.note_failure(place, GONE, 0.0)
    return chosen


def chosen_by(chosen: MemberSelector) -> set[int]:
    return {chosen.choose_member() for _ in range(20)}


def test_a_member_that_failed_is_not_chosen_while_another_is_not_known_to_fail() -> None:
    assert chosen_by(choice(failed=(0, 2))) == {1}
    assert not choice(failed=(0, 2)).all_fail
    alone = choice(1, failed=(0,))
    assert alone.is_single
    assert chosen_by(alone) == {0}
    alone.note_answer(0)
    assert alone.problem == ""


def test_where_all_fail_any_but_the_last_is_chosen_and_one_that_answers_is_healthy_again() -> None:
    chosen = choice(failed=(0, 1, 2))
    assert chosen.all_fail
    last = chosen.choose_member()
    for _ in range(20):
        assert chosen.choose_member() != last
        last = chosen.place
    chosen.note_answer(1)
    assert chosen_by(chosen) == {1}
    assert chosen.problem == str(GONE), "the others still fail"


@pytest.mark.parametrize("failed", [(), (0,)])
def test_all_members_are_chosen_alike_at_first_and_once_their_failures_are_forgiven(failed: tuple[int, ...]) -> None:
    counts = [0, 0, 0]
    for seed in range(900):
        chosen = choice(failed=failed, seed=seed)
        chosen.forget_failures()
        counts[chosen.choose_member()] += 1
    assert all(240 <= count <= 360 for count in counts), counts


def test_a_reason_that_was_given_is_kept_though_a_silence_follows() -> None:
    chosen = choice(failed=(0,))
    chosen.note_failure(0, SILENT, 0.0)
    assert chosen.problem == str(GONE)
    chosen.note_failure(1, SILENT, 0.0)
    assert chosen.problem == str(SILENT), "of a member of which nothing was known"


@pytest.mark.parametrize(("words", "most"), [("etcdserver: no leader", 5.0), ("nobody listens there", 1.0)])
def test_pauses_grow_to_five_seconds_and_to_one_if_no_member_can_be_reached(words: str, most: float) -> None:
    chosen = choice()
    pauses = []
    for number in range(30):
        chosen.note_failure(number % 3, Failure(words, FailureKind.UNDONE), 0.0)
        pauses.append(chosen.try_at)
    assert max(pauses[:3]) <= 0.02, "the others are asked at once"
    assert all(most / 2 <= pause <= most for pause in pauses[-5:])
    assert choice().random_retry_pause(0) == 0.0
    assert (max_retry_pause(0), max_retry_pause(10**6)) == (PAUSE_FIRST, PAUSE_MOST)
