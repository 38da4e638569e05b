"""Which member is asked next, and when."""

from __future__ import annotations

import random

from store.etcd.choice import PAUSE_FIRST, PAUSE_MOST, Choice, pause_after
from store.etcd.codec import Failure, FailureKind

GONE = Failure("nobody listens there", FailureKind.UNDONE)
SILENT = Failure("it has not answered within 1.0 s", FailureKind.DOUBT, silent=True)


def choice(members: int = 3, seed: int = 1) -> Choice:
    return Choice(members, random.Random(seed))


def test_a_member_that_failed_is_not_chosen_while_another_is_not_known_to_fail() -> None:
    chosen = choice()
    chosen.missed(0, GONE, 0.0)
    chosen.missed(2, GONE, 0.0)
    assert {chosen.choose() for _ in range(20)} == {1}
    assert not chosen.all_fail


def test_where_all_fail_any_but_the_last_is_chosen_and_one_that_answers_is_healthy_again() -> None:
    chosen = choice()
    for place in range(3):
        chosen.missed(place, GONE, 0.0)
    assert chosen.all_fail
    last = chosen.choose()
    for _ in range(20):
        assert chosen.choose() != last
        last = chosen.place
    chosen.answered(1)
    assert {chosen.choose() for _ in range(20)} == {1}
    assert chosen.problem == str(GONE), "the others still fail"


def test_one_that_is_alone_is_chosen_again_and_again() -> None:
    chosen = choice(1)
    assert chosen.alone
    chosen.missed(0, GONE, 0.0)
    assert chosen.choose() == 0
    chosen.answered(0)
    assert chosen.problem == ""


def test_all_members_are_chosen_alike_at_first_and_when_what_they_did_is_forgiven() -> None:
    for forgiven in (False, True):
        counts = [0, 0, 0]
        for seed in range(900):
            chosen = choice(seed=seed)
            if forgiven:
                chosen.missed(0, GONE, 0.0)
                chosen.forgive()
            counts[chosen.choose()] += 1
        assert all(240 <= count <= 360 for count in counts), counts


def test_a_reason_that_was_given_is_kept_though_a_silence_follows() -> None:
    chosen = choice()
    chosen.missed(0, GONE, 0.0)
    chosen.missed(0, SILENT, 0.0)
    assert chosen.problem == str(GONE)
    chosen.missed(1, SILENT, 0.0)
    assert chosen.problem == str(SILENT), "of a member of which nothing was known"


def test_pauses_grow_to_five_seconds_and_to_one_where_nobody_can_be_reached() -> None:
    for words, most in (("etcdserver: no leader", 5.0), ("nobody listens there", 1.0)):
        chosen = choice()
        pauses = []
        for number in range(30):
            chosen.missed(number % 3, Failure(words, FailureKind.UNDONE), 0.0)
            pauses.append(chosen.try_at)
        assert max(pauses[:3]) <= 0.02, "the others are asked at once"
        assert all(most / 2 <= pause <= most for pause in pauses[-5:])


def test_a_request_is_tried_again_at_once_and_then_after_growing_pauses() -> None:
    assert choice().pause(0) == 0.0
    assert (pause_after(0), pause_after(10**6)) == (PAUSE_FIRST, PAUSE_MOST)
    for failures in (1, 5, 30):
        assert all(0 <= choice(seed=seed).pause(failures) <= pause_after(failures) for seed in range(20))
        assert all(5 <= choice(seed=seed).jitter(10.0) <= 15 for seed in range(20))
