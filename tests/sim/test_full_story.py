"""Hundreds of full stories, and bugs that they must find. `python -m tests.sim full` plays more."""

import os

import pytest

from tests.sim.__main__ import hunt, main
from tests.sim.full_bugs import FULL_BUGS
from tests.sim.full_story import FullStory
from tests.sim.machines import Seams
from tests.sim.store_story import StoreStory
from tests.sim.story import Outcome
from tests.support.seeds import FRESH

FIXED = int(os.environ.get("RDZV_FULL_STORIES", "40"))  # `.ci/run` says 240
CHUNK = 40
COUNT_FRESH = 40
FRESH_CHUNK = 20


@pytest.mark.in_ci
@pytest.mark.parametrize("first", range(0, FIXED, CHUNK))
def test_no_promise_is_broken_in_fixed_stories(first: int) -> None:
    outcomes = [FullStory.play(seed) for seed in range(first, first + CHUNK)]
    assert sum(outcome.rounds for outcome in outcomes) > CHUNK, "most have more than one round, or they show little"
    assert sum(outcome.faults for outcome in outcomes) > CHUNK
    assert sum(outcome.starts for outcome in outcomes) > CHUNK + 5, "the store was hardly ever killed"
    assert sum(outcome.fenced_writes for outcome in outcomes) > 5 * CHUNK


@pytest.mark.some_of(1)
@pytest.mark.parametrize("after", range(0, COUNT_FRESH, FRESH_CHUNK))
@pytest.mark.in_ci
def test_no_promise_is_broken_in_fresh_stories(after: int) -> None:
    for seed in range(FRESH + after, FRESH + after + FRESH_CHUNK):
        FullStory.play(seed)


def test_a_seed_always_gives_the_same_story() -> None:
    told: list[list[str]] = []
    outcomes: set[Outcome] = set()
    for _ in range(2):
        told.append([])
        outcomes.add(FullStory.play(3, trace=told[-1].append))
    assert told[0] == told[1] != []
    assert len(outcomes) == 1


SEEDS = {
    "a commit without the coordinator's condition": 125,
    "a commit without its members' conditions": 10,
    "a commit that ignores a closing": 70,
    "ranks that are published after the flag": 0,
    "a last call that each join begins anew": 88,
    "a stale record that is kept as alive": 350,
    "a coordinator that forgets the last round": 0,
    "a live member that is taken for a waiting node": 0,
    "a loss that is not reported": 0,
    "a zombie's write that is not fenced": 50,
    "an acknowledgement before the commit": 0,
}
"""The first seeds to try for each bug. Any change of the product changes the stories."""

WITHIN = 300
"""The number of seeds within which a bug must be found. `python -m tests.sim bugs` searches for better first seeds."""


@pytest.mark.some_of(0)
@pytest.mark.parametrize("bug", FULL_BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    said = hunt(FULL_BUGS[bug], FullStory, range(SEEDS[bug], SEEDS[bug] + WITHIN))
    assert "python -m tests.sim full --seed" in said


def test_many_stories_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["full", "--seeds", "3:6", "--jobs", "1"]) == 0
    assert "no promise was broken" in capsys.readouterr().out


def test_an_unknown_command_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["rounds"]) == 2
    assert "python -m tests.sim full --seed 17" in capsys.readouterr().err


def test_one_story_is_printed_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["full", "--seed", "3"]) == 0
    told = capsys.readouterr().out
    assert "coordinates, term" in told
    assert "quiet from here on" in told


def test_the_command_finds_a_planted_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bugs", "--only", "ranks that", "--within", "1"]) == 0
    assert "was committed before its ranks" in capsys.readouterr().out


def test_a_bug_that_is_not_found_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.sim.__main__.BUGS", {"store": {"none": Seams()}})
    monkeypatch.setattr(StoreStory, "play", lambda *_, **__: None)
    assert main(["bugs", "--within", "2"]) == 1
    assert "not found within 2 seeds" in capsys.readouterr().err
