"""Cells: one call in one state of each kind; and a small set of cells that covers every pair of states."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.tables.calls import CALLS, Call

__all__ = ["MANNERS", "OF_A_ROUND", "STORES", "TEXTS", "WHENS", "Cell", "by_name", "cells_of", "covering", "pairs"]

WHENS = "before", "during", "round over", "member lost", "run over", "object over"
STORES = "well", "away", "silent", "replaced", "back"
MANNERS = "once", "cancelled before", "twice", "second task", "nested group", "left elsewhere"
TEXTS: dict[str, str | bytes] = {
    "word": "word",
    "empty": "",
    "four bytes": "\N{CRAB}" * 40,
    "surrogate": "a\udc80b",
    "bytes": b"a\x80b",
    "long": "x" * 2**20,
}

OF_A_ROUND = {"handler", "round", "shared", "changes", "info"}
# these objects do not exist before a round or a connection
NOT_BEFORE = {"shared", "info", "lease", "kept", "client", "recipes"}


@dataclass(frozen=True)
class Cell:
    """One call in one state of each kind."""

    call: Call
    when: str
    store: str
    manner: str
    text: str

    def __str__(self) -> str:
        return f"{self.call}/{self.when}/{self.store}/{self.manner}/{self.text}"


def _states(call: Call, manners: Sequence[str]) -> tuple[Sequence[str], ...]:
    # a blocking handler is connected when it is made
    has_before = call.of not in NOT_BEFORE and (call.of != "handler" or manners is MANNERS)
    whens = [
        when
        for when in WHENS
        if (call.of in OF_A_ROUND or when in {"before", "during", "object over"}) and (has_before or when != "before")
    ]
    return whens, STORES, manners, tuple(TEXTS) if call.takes_text else ("word",)


def cells_of(call: Call, manners: Sequence[str] = MANNERS) -> Iterator[Cell]:
    """Yield all cells of a call."""
    for states in itertools.product(*_states(call, manners)):
        yield Cell(call, *states)


def covering(call: Call, manners: Sequence[str] = MANNERS, *, seed: int = 0) -> list[Cell]:
    """Return few cells of a call that cover each of its states. Over all calls, every pair of states is covered."""
    rng = random.Random(f"{seed} {call}")
    states = [rng.sample(each, len(each)) for each in _states(call, manners)]
    most = max(map(len, states))
    return [Cell(call, *(each[number % len(each)] for each in states)) for number in range(most)]


def pairs(cell: Cell) -> set[tuple[tuple[str, str], ...]]:
    """Return each pair of states in a cell."""
    states = {"call": str(cell.call), "when": cell.when, "store": cell.store, "manner": cell.manner, "text": cell.text}
    return set(itertools.combinations(states.items(), 2))


def by_name(name: str) -> Cell:
    """Return the cell with a name, as it was printed."""
    call, *states = name.split("/")
    return Cell(next(row for row in CALLS if str(row) == call), *states)
