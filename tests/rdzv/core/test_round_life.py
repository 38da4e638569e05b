"""A round's life for one of its members: what follows from what, also after more than one of these has happened."""

from __future__ import annotations

import pytest

from rdzv.core.round_life import TRANSITIONS, Act, Ending, EndKind, Fact, RoundLife, State, news_within
from rdzv.errors import GiveUp, MembersLostError, RoundChanged

LOST = Ending(kind=EndKind.LOST, reason="lost: b", node_ids=("b",))
AGREED = Ending(kind=EndKind.AGREED, reason="1 waits to come in")


def life_of(*facts: Fact, ending: Ending | None = None) -> tuple[RoundLife, Act]:
    life = RoundLife()
    if ending is not None:
        life.ends(ending)
    (act,) = [life.happens(fact, failure="it has failed") for fact in facts][-1:]
    return life, act


@pytest.mark.parametrize(
    ("error", "ending", "act"),
    [
        (None, None, Act.COUNT_IN),
        (None, LOST, Act.MEET_AGAIN),
        (GiveUp("no"), LOST, Act.GIVE_UP),
        (RoundChanged("over"), AGREED, Act.MEET_AGAIN),
        (MembersLostError("b"), None, Act.MEET_AGAIN),
        (OSError("peer has hung up"), LOST, Act.MEET_AGAIN),
        (OSError("peer has hung up"), AGREED, Act.ASK_WHO_WAS_FIRST),
        (OSError("peer has hung up"), None, Act.ASK_WHO_WAS_FIRST),
        (KeyboardInterrupt(), LOST, Act.RAISE),
    ],
)
def test_what_follows_from_the_end_of_the_work(error: BaseException | None, ending: Ending | None, act: Act) -> None:
    life = RoundLife()
    if ending is not None:
        life.ends(ending)
    assert life.comes_out(error) is act


@pytest.mark.parametrize(
    ("facts", "act", "has_failed"),
    [
        ((Fact.FAILED, Fact.WAS_NOT_FIRST), Act.MEET_AGAIN, True),
        ((Fact.FAILED, Fact.WAS_ALONE), Act.RAISE, False),
        ((Fact.FAILED, Fact.WAS_FIRST, Fact.NO_NEWS), Act.RAISE, False),
        ((Fact.FAILED, Fact.WAS_FIRST, Fact.ENDED), Act.MEET_AGAIN, True),
        ((Fact.FINISHED, Fact.WAS_LAST, Fact.CLOSED, Fact.ENDED), Act.MEET_AGAIN, False),
        ((Fact.FINISHED, Fact.WAS_NOT_LAST, Fact.ENDED), Act.MEET_AGAIN, False),
        ((Fact.FINISHED, Fact.ENDED), Act.MEET_AGAIN, False),
    ],
)
def test_a_way_through_a_round(facts: tuple[Fact, ...], act: Act, has_failed: bool) -> None:
    life, last = life_of(*facts)
    assert (last, life.state, life.has_failed) == (act, State.OVER, has_failed)


def test_the_first_ending_counts_but_after_an_agreement_that_somebody_goes_counts_more() -> None:
    life = RoundLife()
    assert not life.others_have_gone
    assert life.ends(AGREED)
    assert not life.ends(Ending(kind=EndKind.AGREED, reason="b to leave"))
    assert (life.ending, life.others_have_gone, life.news) == (AGREED, False, Fact.NO_NEWS)
    assert life.ends(LOST)
    assert not life.ends(Ending(kind=EndKind.CLOSED, reason="enough"))
    assert (life.ending, life.others_have_gone, life.news) == (LOST, True, Fact.ENDED)


def test_every_state_is_come_to_and_every_act_is_told() -> None:
    after = [one for ways in TRANSITIONS.values() for one in ways.values()]
    assert {state for state, _ in after} | {State.AT_WORK} == set(State) == set(TRANSITIONS)
    assert {act for _, act in after} == set(Act)


def test_who_failed_first_waits_for_as_long_as_a_death_may_be_unknown() -> None:
    """A survivor ended with a dead peer's error, where the store had come back a moment before."""
    assert news_within(disconnect_ttl=1, ttl=10) == 2
    assert news_within(disconnect_ttl=1, ttl=10, back_for=3) == 8
    assert news_within(disconnect_ttl=1, ttl=10, back_for=60) == 2
