"""Stories in which the store in memory is lost, and bugs that they must find (`python -m tests.sim hosts`)."""

import pytest

from tests.sim.__main__ import hunt
from tests.sim.hosts_bugs import HOSTS_BUGS
from tests.sim.hosts_story import HostsStory
from tests.support.seeds import FRESH

pytestmark = [pytest.mark.some_of(0), pytest.mark.timeout(480)]  # minutes beside other workers

FIXED, COUNT_FRESH, WITHIN = 24, 10, 300
FOUND = (1185, 1980, 2422, 700_002, 721_076, 740_072)  # seeds that found a fault


def test_no_promise_is_broken() -> None:
    outcomes = [HostsStory.play(seed) for seed in (*range(FIXED), *FOUND, *range(FRESH, FRESH + COUNT_FRESH))]
    assert sum(outcome.starts for outcome in outcomes) > 1.5 * len(outcomes), "most lose a store, or they show little"


@pytest.mark.parametrize("bug", HOSTS_BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    assert "python -m tests.sim hosts --seed" in hunt(HOSTS_BUGS[bug], HostsStory, range(WITHIN))
