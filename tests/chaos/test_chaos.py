"""A few seconds of chaos, and tests of its checker.

`python -m tests.chaos` plays five minutes. RDZV_CHAOS_SECONDS, RDZV_CHAOS_SEED and RDZV_CHAOS_STORE change the run
here. RDZV_CHAOS_STORE=etcd starts an etcd for it.
"""

import contextlib
import os
from typing import Any

import pytest

from tests.chaos.announced import announced_chaos
from tests.chaos.checker import (
    HOST,
    Fault,
    Look,
    Stay,
    Violation,
    check,
    check_numbers,
    check_stops,
    check_stores,
    false_alarms,
    stays_of,
)
from tests.chaos.hosts import hosts_chaos
from tests.chaos.runner import chaos
from tests.support.etcd import serve_etcd
from tests.support.seeds import FRESH

SECONDS = float(os.environ.get("RDZV_CHAOS_SECONDS", "4"))
SEED = int(os.environ.get("RDZV_CHAOS_SEED", FRESH))


@pytest.mark.in_ci
async def test_the_promises_hold_with_faults_of_processes_and_the_store() -> None:
    """R2, R3, R5, R6 and R9, with kills, pauses, cuts and restarts of the store."""
    try:
        with contextlib.ExitStack() as stack:
            url = os.environ.get("RDZV_CHAOS_STORE")
            if url == "etcd":
                url = stack.enter_context(serve_etcd()).url
            outcome = await chaos(seconds=SECONDS, seed=SEED, url=url)
    except BaseException as error:
        error.add_note(f"python -m tests.chaos --seconds {SECONDS:g} --seed {SEED}")
        raise
    assert outcome.rounds >= 3, f"{outcome} is not what chaos looks like"
    assert sum(outcome.faults.values()) >= 3


@pytest.mark.in_ci
async def test_announced_changes_interrupt_no_step_of_processes() -> None:
    """R21 and R23, with drains, several at a time, resizes, kills and reset connections."""
    seconds = SECONDS / 1.5
    try:
        outcome = await announced_chaos(seconds=seconds, seed=SEED, unannounced=("kill", "cut"))
    except BaseException as error:
        error.add_note(f"python -m tests.chaos --announced --nodes 4 --seconds {seconds:g} --seed {SEED}")
        raise
    assert outcome.rounds >= 2, f"{outcome} is not what chaos looks like"
    assert sum(outcome.announced.values()) >= 2


@pytest.mark.in_ci
async def test_one_store_serves_and_its_run_goes_on_while_its_hosts_are_struck() -> None:
    """S13, R2, R4 and R6, with kills, stops and drains of the process that hosts the store."""
    try:
        outcome = await hosts_chaos(seconds=2 * SECONDS, seed=SEED)
    except BaseException as error:
        error.add_note(f"python -m tests.chaos --hosts --seconds {2 * SECONDS:g} --seed {SEED}")
        raise
    assert outcome.stores >= 1, f"{outcome} is not what chaos looks like"
    assert sum(outcome.announced.values()) >= 1


@pytest.mark.some_of(0)
@pytest.mark.parametrize("module", ["tests.chaos.node", "tests.chaos.looping"])
async def test_a_run_goes_on_after_the_kill_of_its_host_and_after_its_drain(module: str) -> None:
    """One turn each, of handlers and of loops."""
    for fault in ("kill", "drain"):
        outcome = await hosts_chaos(seconds=0, seed=SEED, faults=(fault,), module=module)
        assert outcome.stores == 2


def stay(node: str = "a", **changed: Any) -> Stay:
    rank = "abc".index(node)
    given = {"round": 0, "rank": rank, "size": 3, "address": ("host", 1), "members": ("a", "b", "c"), "began": 10.0}
    return Stay(node=node, **{**given, **changed})


def next_round(began: float = 20.0) -> list[Stay]:
    return [stay(node, round=1, began=began, rank=rank, size=2, members=("b", "c")) for rank, node in enumerate("bc")]


def judge(*stays: Stay, writes: Any = (), faults: Any = ()) -> None:
    check(list(stays), list(writes), list(faults), ttl=2.0, told_within=5.0, over_at=100.0)


def left(node: str, at: float = 15.0) -> Stay:
    return stay(node, ended=at, end="leaving")


def test_a_correct_run_passes() -> None:
    judge(stay("a"), stay("b"), stay("c"))
    dead = stay("a", ended=14.0, end="killed")
    judge(dead, left("b"), left("c"), *next_round(), writes=[("b", {"round": 0, "began": 14.9})])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size": 4}, "do not agree"),
        ({"address": ("host", 2)}, "do not agree"),
        ({"rank": 0}, "had twice"),
        ({"members": ("b", "a", "c")}, "who they are"),
    ],
)
def test_members_that_do_not_agree_are_found_out(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(Violation, match=f"R3: .*{said}"):
        judge(stay("a"), stay("b", **changed))


def test_a_roster_with_a_wrong_rank_or_a_missing_member_is_found_out() -> None:
    with pytest.raises(Violation, match="R3: rank 1 of round 0 is c's"):
        judge(stay("b", members=("a", "c", "b")))
    with pytest.raises(Violation, match="R3: round 0 of 3 has the members"):
        judge(stay("b", members=("a", "b")))


def test_a_write_to_a_round_that_was_over_is_found_out() -> None:
    with pytest.raises(Violation, match="R2, R9: a wrote to round 0, which was over"):
        judge(left("a"), left("b"), *next_round(), writes=[("a", {"round": 0, "began": 20.1})])


def test_a_round_beside_a_live_one_is_found_out_unless_there_was_a_fault() -> None:
    with pytest.raises(Violation, match="R2: a was in round 0 when a later one completed"):
        judge(left("a", 23.0), left("b"), *next_round())
    judge(left("a", 23.0), left("b"), *next_round(), faults=[Fault("pause", "a", 12.0, 19.0)])
    woken = stay("a", began=21.0, ended=21.1, end="leaving")
    judge(woken, left("b"), *next_round(), faults=[Fault("pause", "a", 8.0, 20.9)])
    with pytest.raises(Violation, match="R2: a was in round 0 when a later one completed"):
        judge(woken, left("b"), *next_round(), faults=[Fault("cut", "a", 8.0, 20.9)])
    with pytest.raises(Violation, match="R2: round 1 was there before round 0"):
        judge(left("a"), *next_round(began=5.0))


def test_a_survivor_that_is_not_told_is_found_out() -> None:
    dead, told = stay("a", ended=14.0, end="killed"), [(15.0, "NodesLost", ("a",))]
    with pytest.raises(Violation, match="R5: b was not told that a is lost"):
        judge(dead, stay("b", told=[(15.0, "NodesLost", ("c",))]))
    judge(dead, stay("b", told=told))
    judge(dead, stay("b", ended=18.0, end="dropped"))
    late = stay("b", ended=23.0, end="leaving")
    with pytest.raises(Violation, match="R5"):
        judge(dead, late)
    judge(dead, late, faults=[Fault("store", None, 14.5, 18.5)])
    judge(dead, late, faults=[Fault("hole", "b", 13.0, 18.5)])


def test_a_zombie_that_stays_is_found_out() -> None:
    with pytest.raises(Violation, match="R9: a stood still for longer than its TTL, and stayed"):
        judge(stay("a"), faults=[Fault("pause", "a", 12.0, 16.0)])
    judge(stay("a"), faults=[Fault("pause", "a", 12.0, 14.0)])
    judge(stay("a", ended=16.5, end="dropped"), faults=[Fault("pause", "a", 12.0, 16.0)])


def test_the_death_of_a_host_excuses_no_overlap_of_two_rounds() -> None:
    late = (left("a", 23.0), left("b"), *next_round())
    judge(*late, faults=[Fault("store", None, 14.0, 19.0)])
    with pytest.raises(Violation, match="R2: a was in round 0 when a later one completed"):
        judge(*late, faults=[Fault(HOST, None, 14.0, 19.0)])


def test_two_stores_that_serve_at_one_moment_are_found_out() -> None:
    first = [Look("first", 1.0, 1.1), Look("first", 5.0, 5.1)]
    assert check_stores([*first, Look("next", 5.05, 5.2), Look("next", 9.0, 9.1)]) == 2
    assert check_stores([first[0], Look("next", 1.05, 1.2)]) == 2, "it may have begun within the first look"
    with pytest.raises(Violation, match=r"S13: the store first served from 1\.1 to 5\.0, and meanwhile: "):
        check_stores([*first, Look("next", 4.0, 4.1)])


def test_a_process_whose_rounds_do_not_rise_is_found_out() -> None:
    check_numbers([left("a"), stay("a", round=1, began=20.0)])
    with pytest.raises(Violation, match="R4: a was in round 0 after round 0"):
        check_numbers([left("a"), stay("a", began=20.0)])


def leaving(
    node: str, end: str = "agreed", step: int = 7, begun: int | None = None
) -> list[tuple[str, dict[str, Any]]]:
    return [
        (node, {"what": "in", "at": 10.0, "round": 0}),
        (node, {"what": "leaving", "at": 15.0, "round": 0, "end": end, "step": step, "begun": begun}),
    ]


def test_two_steps_to_stop_at_or_an_interrupted_step_are_found_out() -> None:
    check_stops([*leaving("a"), *leaving("b"), *leaving("c", "closed", step=3)], [])
    with pytest.raises(Violation, match="R21: round 0 has 2 steps to stop at: "):
        check_stops([*leaving("a"), *leaving("b", step=8)], [])
    with pytest.raises(Violation, match="R23: b had begun a step when all left round 0"):
        check_stops([*leaving("a"), *leaving("b", begun=7)], [])


def test_a_round_that_ends_without_a_cause_is_found_out() -> None:
    lost = leaving("a", "lost", begun=7)
    with pytest.raises(Violation, match="R23: nothing was done that could have ended round 0 so: a"):
        check_stops(lost, [Fault("kill", "b", 16.0, 17.0)])
    check_stops(lost, [Fault("kill", "b", 9.0, 9.5)])
    check_stops(lost, [Fault("store", None, 14.0, 17.0)])


def test_a_live_member_that_is_lost_counts_as_one_false_alarm() -> None:
    told = [(15.0, "NodesLost", ("a",))]
    stays = [stay("b", told=told), stay("c", told=told)]
    assert false_alarms(stays, []) == 1
    assert false_alarms(stays, [Fault("cut", "a", 14.0, 14.0)]) == 1
    assert false_alarms(stays, [Fault("kill", "a", 14.0, 14.0)]) == 0
    assert false_alarms(stays, [Fault("store", None, 9.0, 9.5)]) == 0


def test_stays_are_read_from_the_lines_of_a_node() -> None:
    where = {"round": 3, "rank": 0, "size": 1, "address": ["host", 1], "members": ["a"]}
    lines = [
        {"what": "in", "at": 1.0, **where},
        {"what": "told", "at": 2.0, "kind": "NodesLost", "round": 2, "ids": ["old news"]},
        {"what": "told", "at": 3.0, "kind": "Dropped", "round": 3, "ids": []},
        {"what": "leaving", "at": 4.0},
        {"what": "told", "at": 4.1, "kind": "NodesLost", "round": 3, "ids": ["b"]},
        {"what": "in", "at": 5.0, **where},
    ]
    first, second = stays_of("a", lines, killed_at=9.0)
    assert (first.began, first.ended, first.end) == (1.0, 3.0, "dropped")
    assert [kind for _, kind, _ in first.told] == ["Dropped", "NodesLost"], "by another thread"
    assert (second.began, second.ended, second.end) == (5.0, 9.0, "killed")
    with pytest.raises(Violation, match="has not left 3"):
        stays_of("a", [lines[0], lines[5]])
