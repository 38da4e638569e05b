"""Some stories of the store, and bugs that they must find. `python -m tests.sim store --hours 8` plays more."""

import pytest

from tests.sim.__main__ import hunt, main
from tests.sim.store_bugs import STORE_BUGS
from tests.sim.store_story import StoreStory
from tests.sim.story import Outcome
from tests.support.seeds import FRESH

pytestmark = pytest.mark.some_of(0)  # it takes minutes

FIXED = range(6)
COUNT_FRESH = 2


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [StoreStory.play(seed) for seed in FIXED]


def test_no_promise_of_the_store_is_broken_in_fixed_stories(outcomes: list[Outcome]) -> None:
    assert all(outcome.answers_checked > 300 for outcome in outcomes)


def test_the_stories_have_many_faults(outcomes: list[Outcome]) -> None:
    assert sum(outcome.faults for outcome in outcomes) > 100
    assert sum(outcome.starts for outcome in outcomes) > len(outcomes) + 4, "the store was hardly ever killed"
    assert sum(outcome.lapses for outcome in outcomes) > 50
    assert sum(outcome.unanswered for outcome in outcomes) > 10, "no request was left without an answer"


def test_no_promise_of_the_store_is_broken_in_fresh_stories() -> None:
    for seed in range(FRESH, FRESH + COUNT_FRESH):
        StoreStory.play(seed)


def test_a_seed_always_gives_the_same_trace() -> None:
    first: list[str] = []
    second: list[str] = []
    once = StoreStory.play(7, trace=first.append, trouble=60.0)
    again = StoreStory.play(7, trace=second.append, trouble=60.0)
    assert first == second
    assert once == again
    assert len(first) > 20


SEEDS = {
    "a read that does not wait for the disk": 0,
    "a reply that is kept too short": 1,
    "a reply that does not survive the store": 3,
    "a row of the journal that is passed over": 0,
    "a turn that is forgotten": 1,
    "an acknowledgement before the commit": 0,
    "an event lost on reconnecting": 0,
    "a lease that is resurrected": 0,
}
"""The first seeds to try for each bug. Any change of the store changes the stories, so more seeds may be needed."""

WITHIN = 100


@pytest.mark.parametrize("bug", STORE_BUGS)
def test_a_bug_planted_in_the_store_is_found(bug: str) -> None:
    said = hunt(STORE_BUGS[bug], StoreStory, range(SEEDS[bug], SEEDS[bug] + WITHIN))
    assert "python -m tests.sim store --seed" in said


def test_hours_of_the_store_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--hours", "0.01", "--first", "3", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "no promise was broken" in told
    assert "--first 3" in told, "the printed command plays the same stories again"


def test_one_story_of_the_store_is_printed_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--seed", "1"]) == 0
    assert "quiet from here on" in capsys.readouterr().out
