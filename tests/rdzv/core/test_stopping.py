"""The step at which all members stop: no step passes the gate after its answer, and the step is the same for all."""

import random
import threading

import pytest

from rdzv.core.stopping import LastBegun, RoundStop, StepGate, StopNegotiation, agreed_stop_step


@pytest.mark.parametrize(
    ("answers", "stop"),
    [
        ({"a": 7, "b": 7}, 8),
        ({"a": 7, "b": 9, "c": None}, 10),
        ({"a": None, "b": None}, None),
        ({}, None),
        ({"a": 0}, 1),
    ],
)
def test_all_stop_right_after_the_largest_step_that_was_begun(answers: dict[str, int | None], stop: int | None) -> None:
    assert agreed_stop_step(answers) == stop


def test_after_its_answer_the_gate_is_closed_until_the_decision() -> None:
    gate = StepGate()
    state = gate.begun, gate.at_end, gate.decided, gate.for_newcomers, gate.is_at_stop
    fresh = (*state, gate.is_waited_for, gate.last_finished_step)
    assert fresh == (None, False, False, False, False, False, None)
    assert gate.close_gate() is None
    gate.note_decision(None)
    assert gate.must_leave(0), "with no step begun anywhere all leave at once"
    gate = StepGate()
    assert all(gate.try_begin_step(step) for step in range(7))
    assert gate.close_gate() == 6
    assert not gate.try_begin_step(7)
    gate.note_decision(9)  # another member was further
    assert not gate.must_leave(7)
    assert not gate.must_leave(8)
    assert gate.must_leave(9)


@pytest.mark.parametrize(
    ("begun", "stop", "at_end", "is_at_stop"),
    [
        (8, 9, False, False),  # the member may leave in the middle of this step, and the others wait for it there
        (9, 9, False, True),
        (None, 9, False, False),
        (7, None, False, False),
        (None, None, False, True),
        (8, 9, True, True),
    ],
)
def test_a_member_has_stopped_once_it_has_reached_the_agreed_step(
    begun: int | None, stop: int | None, at_end: bool, is_at_stop: bool
) -> None:
    gate = StepGate()
    if begun is not None:
        gate.try_begin_step(begun)
    if at_end:
        gate.note_body_end()
    gate.note_decision(stop)
    assert gate.is_at_stop is is_at_stop


@pytest.mark.parametrize(("for_newcomers", "stop"), [(True, 5), (False, None)])
def test_a_decision_is_replaced_only_if_it_was_for_newcomers(for_newcomers: bool, stop: int | None) -> None:
    gate = StepGate()
    gate.note_decision(None, why="1 waiting", for_newcomers=for_newcomers)
    gate.note_decision(5, why="c to leave")
    gate.note_decision(6, why="d to leave")
    assert (gate.stop, gate.for_newcomers) == (stop, False)


@pytest.mark.parametrize("seed", range(200))
def test_in_every_order_of_steps_and_answers_all_members_stop_at_the_same_step(seed: int) -> None:
    """Reading a decision and writing an answer are separate moves. The members act as `Round.check` does."""
    rng = random.Random(seed)
    gates = {name: StepGate() for name in "abc"}
    next_step = dict.fromkeys(gates, 0)
    done: dict[str, int] = {}
    answers: dict[str, int | None] = {}
    decided = False
    while len(done) < len(gates):
        name = rng.choice(sorted(gates))
        gate, what = gates[name], rng.choice(["step", "step", "ask", "decide"])
        if what == "step" and name not in done:
            step = next_step[name]
            if step > min(next_step.values()):
                continue  # a collective: no member is a whole step ahead of another
            if gate.try_begin_step(step) or (gate.decided and not gate.must_leave(step)):
                next_step[name] += 1
            elif gate.decided:
                done[name] = step
        elif what == "ask" and name not in answers and not decided:
            answers[name] = gate.close_gate()
        elif what == "decide" and len(answers) == len(gates):
            decided = True
            gate.note_decision(agreed_stop_step(answers))
    assert len(set(done.values())) == 1


def test_no_step_passes_the_gate_after_its_answer_with_two_threads() -> None:
    for _ in range(200):
        gate, passed, ready = StepGate(), list[int](), threading.Barrier(2)

        def walk(gate: StepGate = gate, passed: list[int] = passed, ready: threading.Barrier = ready) -> None:
            ready.wait()
            step = 0
            while gate.try_begin_step(step):
                passed.append(step)
                step += 1

        member = threading.Thread(target=walk)
        member.start()
        ready.wait()
        answer = gate.close_gate()
        member.join()
        assert max(passed, default=-1) <= (-1 if answer is None else answer)


def asked(agreement: StopNegotiation, old: RoundStop | None = None, **more: object) -> tuple[RoundStop, int] | None:
    """Return the next write of the agreement in round 3, whose members are a and b."""
    usual: dict[str, object] = {"why": "b to leave", "for_newcomers": False, "closing": False, "some_have_gone": False}
    return agreement.next_stop_record(3, old, members=("a", "b"), **(usual | more))  # type: ignore[arg-type]


def agreement_that_has_asked() -> StopNegotiation:
    agreement = StopNegotiation()
    listened = agreement.has_written
    question, over = asked(agreement) or (None, -1)
    assert question == RoundStop(round=3, why="b to leave")
    assert over == 0
    agreement.note_written(question.replace(revision=7))
    assert (listened, agreement.has_written) == (False, True), (
        "before a question, no term reads the answers of all members"
    )
    agreement.has_read_all = True
    return agreement


def test_the_coordinator_asks_and_decides_once_all_members_have_answered() -> None:
    agreement = agreement_that_has_asked()
    agreement.note_answer("a", LastBegun(round=3, step=5))
    agreement.note_answer("b", LastBegun(round=2, step=9))  # an answer of the previous round
    assert asked(agreement) is None
    agreement.note_answer("b", LastBegun(round=3, step=4))
    assert asked(agreement) == (RoundStop(round=3, decided=True, step=6, why="b to leave"), 7)


def test_a_decision_is_rewritten_only_for_a_better_reason_and_if_no_member_has_begun_a_step() -> None:
    agreement, decided = agreement_that_has_asked(), RoundStop(round=3, decided=True, step=6, revision=8)
    assert asked(agreement, decided) is None
    waiting = decided.replace(step=None, for_newcomers=True)
    assert asked(agreement, waiting) == (RoundStop(round=3, decided=True, why="b to leave"), 8)
    assert asked(agreement, waiting, for_newcomers=True) is None


def test_a_successor_continues_from_the_question_in_the_store() -> None:
    agreement, found = StopNegotiation(), RoundStop(round=3, why="b to leave", revision=7)
    for node_id in "ab":
        agreement.note_answer(node_id, LastBegun(round=3, step=None))
    assert asked(agreement, found, why="") is None, "the answer of one that has left may not be read yet"
    agreement.note_answer("", None)
    assert asked(agreement, found, why="") == (RoundStop(round=3, decided=True, step=None, why="b to leave"), 7)


def test_in_a_closed_run_all_leave_at_once_if_a_member_has_begun_no_step() -> None:
    agreement = agreement_that_has_asked()
    agreement.note_answer("a", LastBegun(round=3, step=5))
    agreement.note_answer("b", LastBegun(round=3, step=None))
    decision, _ = asked(agreement, closing=True) or (None, 0)
    assert decision is not None
    assert decision.step is None
