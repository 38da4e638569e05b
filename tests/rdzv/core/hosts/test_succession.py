"""Every order of events among two, three and four hosts: at most one of them serves, and after the last fault one will.

At any moment a process is killed, starts again, is stopped or continues, hands its store over, listens, or asks one
other host. A stopped process gives no answer, and its kernel does not refuse. Each mistake in `MISTAKES` is planted in
the rule, and has to be found.
"""

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import pytest

from rdzv.core.hosts.succession import Answer, Candidacy

MISTAKES = (
    "it asks before it listens",
    "silence counts as a refusal",
    "it does not wait for a candidate behind it",
    "it keeps its proofs when it listens again",
    "each candidate gives way to any other",
    "a store that has ended takes arrivals for one moment more",
)
NEEDS_THREE = "it keeps its proofs when it listens again"


class Mode(Enum):
    IDLE = 0
    CANDIDATE = 1
    SERVES = 2
    ENDED = 3
    ENDED_LATE = 4  # says that it has ended, and takes arrivals still


TAKES_ARRIVALS = frozenset({Mode.SERVES, Mode.ENDED_LATE})
HAVE_ENDED = frozenset({Mode.ENDED, Mode.ENDED_LATE})


class Process(NamedTuple):
    lives: int  # that are left
    mode: Mode = Mode.IDLE
    alive: bool = True
    stopped: bool = False
    candidacy: Candidacy | None = None


State = tuple[Process, ...]


def with_one(state: State, place: int, **changes: Any) -> State:
    return (*state[:place], state[place]._replace(**changes), *state[place + 1 :])


def answer_of(there: Process) -> Answer:
    if not there.alive or there.mode is Mode.IDLE:
        return Answer.REFUSED
    if there.stopped:
        return Answer.SILENT
    answers = {Mode.CANDIDATE: Answer.CANDIDATE, Mode.SERVES: Answer.SERVES}
    return answers.get(there.mode, Answer.ENDED)


def heard(it: Candidacy, host: int, answer: Answer, mistake: str) -> Candidacy | None:
    if answer is Answer.SILENT and mistake == "silence counts as a refusal":
        answer = Answer.REFUSED
    if answer is Answer.CANDIDATE:
        if mistake == "each candidate gives way to any other":
            return None
        if host > it.place and mistake == "it does not wait for a candidate behind it":
            answer = Answer.REFUSED
    return it.after_answer(host, answer)


def steps(state: State, mistake: str) -> Iterator[State]:
    hosts = len(state)
    for place, it in enumerate(state):
        if not it.alive:
            if it.lives:
                yield with_one(state, place, lives=it.lives - 1, alive=True)
            continue
        yield with_one(state, place, alive=False, stopped=False, mode=Mode.IDLE, candidacy=None)
        yield with_one(state, place, stopped=not it.stopped)
        if it.stopped:
            continue
        if it.mode is Mode.SERVES:
            yield with_one(state, place, mode=Mode.ENDED_LATE if "one moment more" in mistake else Mode.ENDED)
        if it.mode is Mode.ENDED_LATE:
            yield with_one(state, place, mode=Mode.ENDED)
        asks_first = mistake == "it asks before it listens"
        if it.mode is Mode.IDLE:
            begins = (it.candidacy if "keeps its proofs" in mistake else None) or Candidacy(place)
            if not asks_first:
                yield with_one(state, place, mode=Mode.CANDIDATE, candidacy=begins)
            elif it.candidacy is None:
                yield with_one(state, place, candidacy=begins)
        candidacy = it.candidacy
        if candidacy is None or it.mode is not (Mode.IDLE if asks_first else Mode.CANDIDATE):
            continue
        missing = candidacy.possible_hosts(hosts)
        if not missing:
            yield with_one(state, place, mode=Mode.SERVES, candidacy=None)
        for other in missing:
            after = heard(candidacy, other, answer_of(state[other]), mistake)
            if after is None:
                kept = candidacy if "keeps its proofs" in mistake else None
                yield with_one(state, place, mode=Mode.IDLE, candidacy=kept)
            elif after != candidacy:
                yield with_one(state, place, candidacy=after)


def serving(state: State) -> int:
    return sum(it.alive and it.mode in TAKES_ARRIVALS for it in state)


def goes_on(state: State, mistake: str) -> bool:
    """Return True if a store serves soon after the last fault, if all processes act at the same moments."""
    state = tuple(
        it._replace(stopped=False, mode=Mode.IDLE if it.mode in HAVE_ENDED else it.mode) for it in state if it.alive
    )
    for _ in range(8):
        if serving(state):
            return True
        modes = [it.mode for it in state]
        after = list(state)
        for place, it in enumerate(state):
            others = [at for at, mode in enumerate(modes) if at != place and mode is Mode.CANDIDATE]
            gives_way = any(heard(Candidacy(place), at, Answer.CANDIDATE, mistake) is None for at in others)
            if it.mode is Mode.IDLE and not any(at < place for at in others):
                after[place] = it._replace(mode=Mode.CANDIDATE)
            elif it.mode is Mode.CANDIDATE:
                mode = Mode.IDLE if gives_way else Mode.CANDIDATE if others else Mode.SERVES
                after[place] = it._replace(mode=mode)
        state = tuple(after)
    return not state


def fault_of(hosts: int, lives: int, mistake: str = "") -> str:
    """Play every order; return what has gone wrong, if anything has."""
    first: State = (Process(lives=lives),) * hosts
    known, todo = {first}, deque([first])
    while todo:
        state = todo.popleft()
        if not goes_on(state, mistake):
            return "no store will serve"
        for after in steps(state, mistake):
            if after not in known:
                if serving(after) > 1:
                    return "two stores serve"
                known.add(after)
                todo.append(after)
    return ""


@pytest.mark.parametrize(
    ("hosts", "lives"),
    [(2, 2), (3, 0), *(pytest.param(*many, marks=pytest.mark.some_of(0)) for many in ((3, 1), (4, 0)))],
)
def test_at_most_one_host_serves_and_after_the_last_fault_one_will(hosts: int, lives: int) -> None:
    assert fault_of(hosts, lives) == ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_in_the_rule_is_found(mistake: str) -> None:
    assert fault_of(3 if mistake == NEEDS_THREE else 2, 1, mistake) in {"two stores serve", "no store will serve"}


def test_an_operators_word_is_a_proof() -> None:
    lost = Candidacy(1).after_answer(0, Answer.LOST)
    assert lost is not None
    assert lost.possible_hosts(3) == [2]
