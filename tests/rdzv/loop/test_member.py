"""The parts that both twins of the loop share."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import rdzv
import rdzv.sync
import store.sync
from rdzv.errors import RendezvousGracefulExitError, RendezvousSettingsError, RendezvousStateError
from rdzv.loop.member import LoopOptions, RoundLoop
from rdzv.node.node import Node
from store.calls import run_synchronously

NOWHERE = "tcp://127.0.0.1:1/job?min_nodes=1"


@pytest.mark.parametrize("rounds", [rdzv.rounds, rdzv.sync.rounds])
@pytest.mark.parametrize(
    "wrong", [{"on_waiting": "later"}, {"no_progress": -1}, {"no_progress": 2.5}, {"no_progress": "often"}]
)
def test_both_twins_refuse_invalid_options_when_they_are_called(
    rounds: Callable[..., object], wrong: dict[str, object]
) -> None:
    with pytest.raises(RendezvousSettingsError, match=f"{next(iter(wrong))}=.* must be"):
        rounds(NOWHERE, **wrong)


class Quiet:
    """The parts of a node, and of a blocking handler, that need no store."""

    def __init__(self, *, error: Exception) -> None:
        self.is_draining = False
        self.part = self
        self.finished_step = 5
        self._error = error

    def is_closed(self) -> bool:
        return False

    def next_rendezvous(self) -> None:
        raise self._error


def loop_over(node: Quiet, **options: Any) -> RoundLoop[Any]:
    return RoundLoop(cast("Any", None), node, cast("Node", node), LoopOptions(**options))


@pytest.mark.parametrize(("options", "told"), [({}, -1), ({"progress": lambda: 480}, 480)])
def test_a_nodes_first_arrival_carries_its_progress(options: dict[str, Any], told: int) -> None:
    """Regression: `progress` was called after a round only, so the newer checkpoint was taken only by chance."""
    node = Quiet(error=RendezvousGracefulExitError("a spare that is not needed ends its loop without an error"))
    assert run_synchronously(loop_over(node, **options).next()) is None
    assert node.finished_step == told


@pytest.mark.parametrize("nonsense", ["x", None, 1.5, 10**5000], ids=["text", "None", "fraction", "long"])
def test_a_progress_that_is_no_step_is_refused_by_its_name(nonsense: Any) -> None:
    node = Quiet(error=AssertionError("it meets others"))
    with pytest.raises(RendezvousSettingsError, match=r"^progress\(\)=.* must be a whole number"):
        run_synchronously(loop_over(node, progress=lambda: nonsense).next())


def test_a_draining_node_does_not_join_again() -> None:
    node = Quiet(error=AssertionError("it meets others"))
    node.is_draining = True
    assert run_synchronously(loop_over(node).next()) is None


@pytest.fixture
def url() -> Iterator[str]:
    with store.sync.serve() as server:
        yield f"{server.url}/job?min_nodes=1&is_host=false"


async def test_the_next_round_cannot_be_fetched_inside_the_block_of_a_round(url: str) -> None:
    """Regression: the loop ended without an error, as if the run were over."""
    rounds = rdzv.rounds(url)
    with pytest.raises(RendezvousStateError, match="leave the block of <round 0 of run job"):
        async for round in rounds:
            async with round:
                await anext(rounds)


def test_the_next_round_cannot_be_fetched_inside_the_block_of_a_blocking_round(url: str) -> None:
    rounds = rdzv.sync.rounds(url)
    met = []
    with pytest.raises(RendezvousStateError, match="leave the block of <round 0 of run job"):
        for round in rounds:
            met.append(round.number)
            with round:
                next(rounds)
    assert met == [0]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_uses_this_process_is_neither_copied_nor_pickled(url: str, duplicate: Callable[[object], object]) -> None:
    """Regression: a handler, an info or a client named a lock inside it, or a copy shared its connection."""
    for round in rdzv.sync.rounds(url):
        with round, round._handler.changes() as changes:
            inner = () if duplicate is copy.copy else (changes, round.store)
            for one in (round, round._handler, round._info, *inner):
                with pytest.raises(TypeError, match="give other processes the URL"):
                    duplicate(one)
