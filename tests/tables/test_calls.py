"""Every public call has its row, and every row is played in each of its states."""

import itertools
from collections.abc import Iterator

import pytest

from store import recipes
from tests.tables import awaited, blocking
from tests.tables.blocking import Machine
from tests.tables.calls import AWAITED, BLOCKING, CALLS, NO_ACTS, Call, acts_of
from tests.tables.cells import MANNERS, STORES, by_name, covering, pairs

PLAYED = [call for call in CALLS if not call.blocking_only]
SEED = 1  # decides the cells that the test suite plays; nightly runs use other seeds, or play all cells

FOUND = [
    "recipes.lock/during/away/left elsewhere/long",
    "round.check/member lost/replaced/cancelled before/word",
    "round.restore/during/replaced/left elsewhere/long",
    "changes.poll/before/well/cancelled before/word",
    "handler.answer_operator/during/away/twice/bytes",
    "handler.next_rendezvous/round over/silent/left elsewhere/word",
    "handler.status/before/away/nested group/word",
    "handler.next_rendezvous/member lost/away/cancelled before/word",
    "handler.leave/during/silent/left elsewhere/word",
    "handler.next_rendezvous/member lost/silent/nested group/word",
    "handler.aclose/member lost/silent/cancelled before/word",
]
"""Cells that have failed before, one of each kind."""


@pytest.mark.parametrize("twin", [AWAITED, BLOCKING], ids=["awaited", "blocking"])
def test_each_public_call_has_a_row(twin: dict[str, type]) -> None:
    for of, kind in twin.items():
        others = "blocking_only" if twin is AWAITED else "awaited_only"
        rows = {call.name for call in CALLS if call.of == of and not getattr(call, others)}
        no_acts = set(NO_ACTS[of].split())
        assert rows == acts_of(kind) - no_acts, f"rows in calls.py, and calls of {kind.__qualname__}"


def test_each_recipe_has_a_row() -> None:
    assert {call.name for call in CALLS if call.of == "recipes"} == set(recipes.__all__) - {"Held"}


def test_each_pair_of_states_is_in_some_cell() -> None:
    met = set(itertools.chain.from_iterable(pairs(cell) for call in PLAYED for cell in covering(call, seed=SEED)))
    for store, manner in itertools.product(STORES, MANNERS):
        assert (("store", store), ("manner", manner)) in met
    for call in PLAYED:
        assert {(("call", str(call)), ("manner", manner)) for manner in MANNERS} <= met


@pytest.mark.virtual_time
@pytest.mark.parametrize("name", FOUND)
async def test_cells_that_have_failed_before(name: str) -> None:
    assert await awaited.play(by_name(name)) == []


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    """A durable store, one in memory, and one for the jobs beside."""
    made = [Machine(durable=durable) for durable in (True, False, False)]
    yield made
    for machine in made:
        machine.end()


BLOCKING_FOUND = [
    "round.check/round over/away/held GIL/word",
    "handler.next_rendezvous/round over/away/once/word",
    "handler.next_rendezvous/round over/away/interrupted before/word",
    "shared.compare_set/run over/back/forked child/long",
    "shared.wait/during/well/forked child/word",
]


@pytest.mark.in_ci
@pytest.mark.parametrize("name", BLOCKING_FOUND)
def test_blocking_cells_that_have_failed_before(name: str, machines: list[Machine]) -> None:
    assert blocking.played_alone(by_name(name), machines) == []


@pytest.mark.some_of(2)
@pytest.mark.parametrize("call", [call for call in CALLS if not call.awaited_only], ids=str)
def test_blocking(call: Call, machines: list[Machine]) -> None:
    cell = covering(call, blocking.MANNERS, seed=SEED)[0]
    assert blocking.played_alone(cell, machines) == [], f"python -m tests.tables {str(cell)!r} plays it again"


@pytest.mark.virtual_time
@pytest.mark.some_of(3)
@pytest.mark.parametrize("call", PLAYED, ids=str)
async def test_awaited(call: Call) -> None:
    faults = {str(cell): faults for cell in covering(call, seed=SEED) if (faults := await awaited.play(cell))}
    assert faults == {}, "python -m tests.tables CELL plays one of them"
