"""Members that are shown as slow or stuck, and the words for the state of a run: one table for every display."""

from typing import Any

import pytest

from rdzv.core.absent import Missing
from rdzv.core.report import RunStatus, count_states, node_states, run_state, run_steps_overview
from rdzv.core.round import Participant
from rdzv.core.state import Closed, Phase
from rdzv.core.stuck.pace import StepOf, steps_overview


def steps(*of: tuple[int, float] | StepOf) -> dict[str, StepOf]:
    made = [one if isinstance(one, StepOf) else StepOf(step=one[0], age=one[1], rate=1.0) for one in of]
    return {f"n{number}": one for number, one in enumerate(made)}


QUIET = StepOf(step=9, age=31.0, rate=1.0)


@pytest.mark.parametrize(
    ("told", "timeout", "stuck", "stands"),
    [
        pytest.param(steps((9, 29), (10, 1)), None, [], False, id="not for long enough"),
        pytest.param(steps((9, 31), (10, 31)), None, ["n0"], False, id="another is at a later step"),
        pytest.param(steps((10, 31), (10, 1)), None, ["n0"], False, id="another has just begun one"),
        pytest.param(steps((10, 31), (10, 16)), None, [], False, id="another is about to be as quiet"),
        pytest.param(steps((10, 31), (10, 31)), None, [], True, id="none gets on"),
        pytest.param(steps((9, 6), (10, 1)), 10.0, ["n0"], False, id="half of stall_timeout"),
        pytest.param(steps((9, 31), StepOf(step=10, age=31, rate=1, busy="a checkpoint")), None, [], False, id="busy"),
        pytest.param(steps((9, 31), StepOf(step=10, age=31, rate=1, away=True)), None, [], False, id="out of reach"),
        pytest.param(steps(StepOf(step=0, age=99, rate=0, first=True), (1, 1)), None, [], False, id="it compiles"),
        pytest.param(steps((9, 31), StepOf(step=9, age=31, rate=1, waits=True)), None, ["n0"], False, id="it waits"),
        pytest.param(steps(StepOf(step=None, age=99, rate=0)), None, [], False, id="no step yet"),
        pytest.param(steps(StepOf(step=9, age=150, rate=0.05), StepOf(step=10, age=1, rate=0.05)), None, [], False,
                     id="ten long steps"),
    ],
)  # fmt: skip
def test_stuck_members(told: dict[str, StepOf], timeout: float | None, stuck: list[str], stands: bool) -> None:
    found = steps_overview(told, stall_timeout=timeout)
    assert (list(found.stuck), found.stands) == (stuck, stands)


def test_slow_members() -> None:
    even = [StepOf(step=100, age=0.5, rate=2.0)] * 4
    told = steps(*even, StepOf(step=100, age=0.5, rate=1.5), StepOf(step=79, age=0.5, rate=2.0), (98, 0.5))
    told["n6"] = StepOf(step=98, age=0.5, rate=1.9)
    assert steps_overview(told).slow == {"n4": "1.5 steps/s, the median is 2", "n5": "21 steps behind"}
    told["n4"] = StepOf(step=100, age=0.5, rate=1.5, busy="a checkpoint")
    assert [*steps_overview(told).slow] == ["n5"], "a busy member is not slow"
    told["n4"], told["n5"] = StepOf(step=9, age=31.0, rate=1.0), even[0]
    assert [[*steps_overview(told).stuck], [*steps_overview(told).slow]] == [["n4"], []], (
        "a stuck member is not slow, too"
    )
    assert steps_overview(steps(*[StepOf(step=9, age=31.0, rate=2.0)] * 2, (9, 31.0))).slow == {}, "all stand still"


def test_ten_thousand_quiet_members_take_one_pass() -> None:
    found = steps_overview({f"n{number}": StepOf(step=7, age=40.0, rate=1.0) for number in range(10_000)})
    assert (found.stands, len(found.stuck)) == (True, 0)


LOST = {"missing": (Missing(node_id="x", how="lost"),), "missing_count": 1}


MEMBERS = tuple(Participant(node_id=f"n{rank}", rank=rank, address="") for rank in range(2))


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({}, ("ok", "Training")),
        (LOST, ("warn", "Training: 1 missing")),
        ({"steps": {"n0": QUIET, "n1": StepOf(step=10, age=31.0, rate=1.0)}}, ("bad", "Training: 1 stuck")),
        ({"steps": {"n0": QUIET, "n1": QUIET}}, ("bad", "Training: all stand still")),
        ({"standstill": "no member has begun a step for 60 s"}, ("bad", "Training: all stand still")),
        ({"draining": {"n0": (9.0, "")}}, ("drain", "Training: 1 draining")),
        ({"accused": (("n0", "n1", "it does not answer"),)}, ("warn", "Training: 1 accused")),
        ({"phase": Phase.LAST_CALL, "waiting": ("w",)}, ("wait", "Last call: 1 of up to 4")),
        ({"phase": Phase.GATHERING, "waiting": ("w",), "members": ()}, ("wait", "Waiting: 1 of 2 here")),
        ({"phase": Phase.GATHERING, "members": ()}, ("bad", "No node is here")),
        ({"phase": Phase.CLOSED, "closing": Closed(reason="done", by="an operator")}, ("over", "Closed")),
        (
            {"phase": Phase.CLOSED, "closing": Closed(reason="done", by="n1"), "last_members": MEMBERS},
            ("over", "Closed: done"),
        ),
        ({"phase": Phase.CLOSED, "closing": Closed(reason="NaN", given_up=True, status=93)}, ("bad", "Given up")),
    ],
)
def test_the_state_of_a_run_in_words(given: dict[str, Any], state: tuple[str, str]) -> None:
    plain: dict[str, Any] = {
        "phase": Phase.TRAINING,
        "members": MEMBERS,
        "waiting": (),
        "settings": {"min_nodes": 2, "max_nodes": 4},
    }
    status = RunStatus(run_id="job", round=1, reason="", spares=(), coordinator=None, **{**plain, **given})
    pace = run_steps_overview(status)
    states = node_states(status, pace)
    assert run_state(status, pace, count_states(status, states)) == state


def test_a_missing_node_is_shown_as_lost_or_left_not_as_its_last_state() -> None:
    absent = tuple(Missing(node_id=name, how=how) for name, how in (("n1", "lost"), ("n7", "left")))
    plain: dict[str, Any] = {"waiting": (), "spares": (), "coordinator": None, "settings": {}}
    status = RunStatus(run_id="job", phase=Phase.TRAINING, round=1, reason="", members=MEMBERS, missing=absent, **plain)
    states = node_states(status, run_steps_overview(status))
    assert (states["n0"], states["n1"], states["n7"]) == ("in the round", "lost", "left")
