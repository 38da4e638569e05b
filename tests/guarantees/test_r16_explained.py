"""R16 **Explained.** Whatever waits says for what, in words and numbers.

First what the pure rooms alone can show, on a run fed by hand.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.decision import Parked, explain, follow
from rdzv.core.state import NodesLost
from tests.support.hand_fed import HandFed
from tests.support.runs import VirtualRun, listen


def reason(run: HandFed, name: str) -> str:
    """What a waiting node says."""
    answer = run.follow(name, passed_over=run.round.revision if run.round else 0)
    assert isinstance(answer, Parked)
    return answer.reason


# What is said.


def test_r16_too_few_nodes_say_how_many_they_are_and_must_be() -> None:
    """Promise: "3 of at least 4 nodes"."""
    run = HandFed(needed=4, capacity=4)
    run.arrive("a", "b", "c")
    assert reason(run, "a") == "3 of at least 4 nodes"


def test_r16_a_last_call_says_what_is_left_of_it() -> None:
    """Promise: "last call, 4.2 s left"."""
    run = HandFed(needed=2, capacity=4, last_call=30)
    run.arrive("a", "b")
    run.now += 25.8
    assert reason(run, "a").startswith("last call, 4.2 s left")


def test_r16_who_waits_for_members_to_leave_says_of_which_round_and_how_many() -> None:
    """Promise: "waiting for round 7's 2 live members to leave"."""
    run = HandFed(needed=2, capacity=3, last_call=0)
    run.arrive("a", arrived_after=6)
    run.arrive("b")
    run.commit()
    run.arrive("c")
    assert reason(run, "c") == "1 node waiting for round 7's 2 live members to leave: a and b"


def test_r16_a_round_that_was_given_up_is_named_with_the_reason_of_its_rank_0_until_the_next_completes() -> None:
    """Nodes that did not reach rank 0 waited "for a coordinator", and status did not say why they met again."""
    run = HandFed(needed=3, last_call=0)
    run.arrive("a", "b", "c")
    run.commit()
    run.arrive("b", gave_up="round 0 was given up: node b (rank 1): rank 0 at a:1: it does not answer")
    run.arrive("a", unreached=True, gave_up="round 0 was given up: node a (rank 0): b, rank 1, did not come to a:1")
    reasons = [reason(run, name) for name in ("a", "b")]
    assert reasons[0] == reasons[1]
    assert reasons[0].endswith("; round 0 was given up: node a (rank 0): b, rank 1, did not come to a:1")
    run.die("c")
    assert reason(run, "a").startswith("2 of at least 3 nodes")
    assert "; round 0 was given up: node a (rank 0)" in reason(run, "a")
    run.arrive("c")
    assert run.commit()[0] != "a"
    assert run.progress.given_up == ""


def test_r16_a_spare_says_that_it_is_one_and_why() -> None:
    """Promise: "Whatever waits says for what, in words and numbers": spares, too."""
    run = HandFed(needed=2, capacity=2)
    run.arrive("a", "b", "c")
    run.commit()
    assert reason(run, "c") == "a spare: all 2 nodes that a round takes are there"
    units = HandFed(needed=2, capacity=4, unit=2, last_call=0)
    units.arrive("a", "b", "c")
    units.commit()
    assert reason(units, "c") == "a spare: a round would take 2 of the 3 nodes that are there"


def test_r16_without_a_coordinator_that_is_said_and_what_the_last_one_knew() -> None:
    """Promise: "Whatever waits says for what", also between two coordinators."""
    run = HandFed(needed=2)
    run.arrive("a")
    answer = follow(run.me("a"), run.head(coordinator=False), now=run.now)
    assert answer == Parked(reason="waiting for a new coordinator; at last, 1 of at least 2 nodes")


@given(st.lists(st.tuples(st.sampled_from(["arrive", "arrive", "die", "wait", "commit", "close"]), st.integers(0, 5))))
def test_r16_there_is_a_reason_at_every_moment(happenings: list[tuple[str, int]]) -> None:
    """Promise: "Whatever waits says for what": no state of a run is without words of its own."""
    run = HandFed(needed=2, capacity=3, last_call=2)
    for what, which in happenings:
        name = f"n{which}"
        match what:
            case "arrive":
                run.arrive(name)
            case "die" if name in run.stored:
                run.die(name)
            case "wait":
                run.now += which
            case "commit" if run.completes():
                run.commit()
            case "close":
                run.closed = True
        words = explain(run.progress)
        assert words
        assert "None" not in words
        assert "-1" not in words
        if not run.closed and "waiting for" in words:
            assert run.view.live


@pytest.mark.virtual_time
async def test_r16_why_the_coordinator_itself_was_lost_is_said_too() -> None:
    """R16: "whatever waits says for what": its successor had seen nothing of its death, and gave no reason."""
    async with VirtualRun(min_nodes=3, max_nodes=3) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        await run.meet(*handlers.values())
        coordinator = (await handlers["a"].status()).coordinator
        assert coordinator is not None
        rest = [handler for name, handler in handlers.items() if name != coordinator]
        run.crash(coordinator)
        heard = await listen(run, rest[0])
        await heard.until(NodesLost(1, (coordinator,)))
        status = await rest[0].status()
        assert {one.node_id: one.why for one in status.absent} == {coordinator: "its process ended"}
        (chapter,) = await rest[0].history()
        assert [(one.kind, one.node_ids, one.reason) for one in chapter.incidents] == [
            ("lost", (coordinator,), "its process ended")
        ]
