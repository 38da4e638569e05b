"""Bugs for stories of several hosts. The simulation must find each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rdzv.core import decision
from rdzv.core.decision import CommitRound, Idle, Rules, decide_round
from rdzv.core.hosts.lost_store import known_lost_store
from rdzv.core.state import Head, LostStore
from rdzv.core.view import TermView
from rdzv.node.member import joining, lost_store
from tests.sim.machines import Seams

__all__ = ["HOSTS_BUGS"]


@contextmanager
def _the_first_round_does_not_wait() -> Iterator[None]:
    def at_once(view: TermView, rules: Rules, head: Head, *, now: float) -> Idle | CommitRound:
        return decide_round(view, replace(rules, ttl=0.0), head, now=now)

    with patch.object(decision, "decide_round", at_once):
        yield


@contextmanager
def _nothing_is_told() -> Iterator[None]:
    async def silent(*_: Any) -> None:
        pass

    with patch.object(joining, "carry_over_run", silent):
        yield


@contextmanager
def _a_resize_is_not_carried() -> Iterator[None]:
    def unchanged(agreed: Any, **_: Any) -> Any:
        return agreed

    with patch.object(lost_store, "with_resize", unchanged):
        yield


@contextmanager
def _a_tally_is_not_carried() -> Iterator[None]:
    def without_tally(*given: Any, **more: Any) -> LostStore:
        return known_lost_store(*given, **more).replace(tally=b"")

    with patch.object(lost_store, "known_lost_store", without_tally):
        yield


HOSTS_BUGS = {
    "the first round of a new store does not wait": Seams(plant=_the_first_round_does_not_wait),
    "nothing of a lost store is told": Seams(plant=_nothing_is_told),
    "a tally is not carried": Seams(plant=_a_tally_is_not_carried),
    "a resize that was only heard is not carried": Seams(plant=_a_resize_is_not_carried),
}
"""Each bug by name, as it is planted."""
