"""Bugs for the explorer. Each must be found, in a scenario that is small enough to be explored completely."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from rdzv.core.state import LostStore
from rdzv.node.coordinator import term as coordinator
from store.messages import Guarded, Put, Request, Transact
from tests.sim.explorer.scenarios import AGAIN, COMMIT_AND_CUT, COMMIT_AND_DEATH, DEATH, LOSS, WRITE_AND_CUT
from tests.sim.explorer.world import KEYS, Scenario, as_it_is
from tests.sim.full_bugs import CredulousView, ForgetfulView, SilentView, StaleView
from tests.sim.full_node import commits

__all__ = ["BUGS", "Bug"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A planted bug.

    Attributes:
        scenario: The scenario in which it shows.
        says: A part of the message that finds it.
        mend: Changes the requests of nodes.
        plant: A context in which the bug is present.
    """

    scenario: Scenario
    says: str
    mend: Callable[[Request[Any]], Request[Any]] = as_it_is
    plant: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def _commits_without(part: str) -> Callable[[Request[Any]], Request[Any]]:
    def mend(request: Request[Any]) -> Request[Any]:
        if isinstance(request, Transact) and commits(request):
            return request.replace(when=tuple(one for one in request.when if part not in one.key))
        return request

    return mend


def _unfenced(request: Request[Any]) -> Request[Any]:
    if isinstance(request, Guarded) and "/store/" in getattr(request.request, "key", ""):
        inner: Request[Any] = request.request
        return inner
    return request


def _none_is_awaited(request: Request[Any]) -> Request[Any]:
    if isinstance(request, Transact):
        return request.replace(then=tuple(_unawaited(one) if _tells_of_loss(one) else one for one in request.then))
    return request


def _tells_of_loss(operation: object) -> bool:
    return isinstance(operation, Put) and operation.key == KEYS.lost_store


def _unawaited(told: Any) -> Any:
    return told.replace(value=LostStore.unpack(told.value).replace(awaited=0).pack())


def _view(bug: type) -> Callable[[], AbstractContextManager[Any]]:
    return partial(patch.object, coordinator, "TermView", bug)


BUGS = {
    "a commit without its members' conditions": Bug(
        scenario=COMMIT_AND_DEATH, says="took in arrival", mend=_commits_without("/nodes/")
    ),
    "a commit without the coordinator's condition": Bug(
        scenario=COMMIT_AND_CUT, says="was committed in term", mend=_commits_without("/head/coordinator")
    ),
    "the members of a lost store's round are not waited for": Bug(scenario=LOSS, says="(R2)", mend=_none_is_awaited),
    "a zombie's write that is not fenced": Bug(scenario=WRITE_AND_CUT, says="wrote", mend=_unfenced),
    "a stale record that is kept as alive": Bug(scenario=DEATH, says="(R7)", plant=_view(StaleView)),
    "a loss that is not reported": Bug(scenario=DEATH, says="(R7)", plant=_view(SilentView)),
    "a coordinator that forgets the last round's members": Bug(
        scenario=DEATH, says="remained in round", plant=_view(ForgetfulView)
    ),
    "a live member that is taken for a waiting node": Bug(
        scenario=AGAIN, says="remained in round", plant=_view(CredulousView)
    ),
}
"""Each bug by name."""
