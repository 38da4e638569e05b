"""Messages to a page: the whole state first, then changes, or beats if there are none; what a page makes of them."""

import copy
import json
from typing import Any

import pytest

from rdzv.core.live.changes import AGES, server_sent_event, web_page_changes, without_jitter
from tools.page_states import STATES, Played

HOUR = 1.8e9


def report_of(**fields: Any) -> dict[str, Any]:
    member = {"node_id": "a", "rank": 0, "state": "in the round", "step": 7, "step_at": HOUR}
    plain = {"phase": "training", "phase_since": HOUR, "members": [member], "cost": {"seconds": 1.0}, "missing": []}
    return {**copy.deepcopy(plain), **fields}


def state_of(run: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    return {"now": HOUR, "store": "s", "chosen": "job", "runs": [{"run_id": "job", "members": 1}], "run": run, **fields}


def applied(state: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Return a page's state after a message, computed as in rdzv/display/page/data.js."""
    state = copy.deepcopy(state)
    runs = {one["run_id"]: one for one in (*state["runs"], *told.get("runs", ()))}
    state["runs"] = [one for name, one in runs.items() if name not in told.get("gone", ())]
    state |= {name: told[name] for name in ("chosen", "run") if name in told}
    for name, value in told.get("changed", {}).items():
        if name != "members":
            state["run"][name] = value
            continue
        members = {one["node_id"]: one for one in state["run"]["members"] if one["node_id"] not in value["gone"]}
        for node_id, fields in value["changed"].items():
            members[node_id].update(fields)
        members |= {one["node_id"]: one for one in value["come"]}
        state["run"]["members"] = sorted(members.values(), key=lambda one: int(one["rank"]))
    return state


OTHER = {"node_id": "b", "rank": 1, "state": "in the round", "step": None, "step_at": None}


@pytest.mark.parametrize(
    "now",
    [
        state_of(report_of(phase="gathering")),
        state_of(report_of(members=[])),
        state_of(report_of(members=[*report_of()["members"], OTHER])),
        state_of(report_of(members=[{**report_of()["members"][0], "step": 8, "step_at": HOUR + 1}])),
        state_of(None),
        state_of(report_of(phase="closed"), chosen="other"),
        state_of(report_of(), runs=[]),
        state_of(report_of(), runs=[{"run_id": "job", "members": 2}, {"run_id": "other", "members": 1}]),
    ],
)
def test_a_page_that_applies_the_changes_knows_the_state(now: dict[str, Any]) -> None:
    before = state_of(report_of())
    told = json.loads(json.dumps(web_page_changes(before, now)))
    assert told
    assert applied(before, told) == now


def test_values_that_follow_from_the_time_are_no_change_and_jitter_in_times_is_ignored() -> None:
    before = state_of(report_of())
    run = report_of(phase_since=HOUR + 0.4, cost={"seconds": 2.0})
    run["members"][0]["step_at"] = HOUR + 3  # computed again for the same step
    now = state_of(without_jitter(before["run"], run), runs=[{"run_id": "job", "members": 1, "spent": {}}])
    now["runs"][0]["waited"] = 3.0
    assert web_page_changes(state_of(before["run"], runs=[{"run_id": "job", "members": 1, "waited": 1.0}]), now) == {}
    assert server_sent_event(before, state_of(before["run"], now=HOUR + 1)) == b"event: beat\ndata: 1800000001.0\n\n"
    assert now["run"]["members"][0] is before["run"]["members"][0], "so that the next comparison is cheap"


@pytest.mark.parametrize("name", STATES)
def test_no_age_is_streamed_of_any_state(name: str) -> None:
    def fields(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(fields, value.values()))
        return set().union(*map(fields, value)) if isinstance(value, list) else set()

    run = Played().state(f"{name}-12")["run"]
    assert run is not None
    assert fields(run) & AGES == set()
