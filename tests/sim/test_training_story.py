"""Stories of nodes that train by `rounds()`, and bugs that they must find (`python -m tests.sim training`)."""

import pytest

from tests.sim.__main__ import hunt, main
from tests.sim.training_bugs import TRAINING_BUGS
from tests.sim.training_story import TrainingStory
from tests.support.seeds import FRESH

pytestmark = pytest.mark.some_of(0)  # it takes minutes

FIXED = 24
COUNT_FRESH = 10

SEEDS = {
    "no coordinator once the run is closed": 60,
    "a departure before the agreed step is not noticed": 130,
    "no reason replaces newcomers that have to wait": 20,
    "the steps of a finished member are forgotten": 110,
    "the first nodes to return stay": 0,
    "an expelled member is told of its own loss": 15,
    "a report of an earlier picture follows an expel": 0,
    "two members are expelled by one picture": 0,
    "another task sets what was decided": 20,
    "every drain is told of": 50,
    "a decision is written over": 0,
}
"""The first seeds to try for each bug. Any change of the product changes the stories."""

WITHIN = 300
"""The number of seeds within which a bug must be found."""


def test_no_promise_is_broken_in_fixed_stories() -> None:
    outcomes = [TrainingStory.play(seed) for seed in range(FIXED)]
    assert sum(outcome.rounds for outcome in outcomes) > FIXED, "most have more than one round, or they show little"
    assert sum(outcome.faults for outcome in outcomes) > FIXED


def test_no_promise_is_broken_in_fresh_stories() -> None:
    for seed in range(FRESH, FRESH + COUNT_FRESH):
        TrainingStory.play(seed)


@pytest.mark.parametrize("bug", TRAINING_BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    said = hunt(TRAINING_BUGS[bug], TrainingStory, range(SEEDS[bug], SEEDS[bug] + WITHIN))
    assert "python -m tests.sim training --seed" in said


def test_one_story_is_printed_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["training", "--seed", "3"]) == 0
    assert "coordinates, term" in capsys.readouterr().out
