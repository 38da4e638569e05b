"""Bugs for the full simulation, each of which once existed in a real system. The simulation must find each of them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from rdzv.core.round import Member, Round
from rdzv.core.state import Ban, NodeRecord
from rdzv.core.view import TermView
from rdzv.node.coordinator import term as coordinator
from rdzv.shared_store.fencing import FencedCall
from rdzv.shared_store.store import SharedStore
from store.messages import Event, Guarded, Put, Request, Transact
from store.server.deliverer import Deliverer
from tests.sim.full_node import commits
from tests.sim.machines import Seams
from tests.sim.store_bugs import say_at_once
from tests.sim.truth import HeardClient

__all__ = ["FULL_BUGS"]


class RestartingView(TermView):
    """Restarts the last call at each arrival, as DLRover did (#903)."""

    def _add_record(self, record: NodeRecord) -> None:
        self.enough_since = None
        super()._add_record(record)


class StaleView(TermView):
    """Keeps the records of nodes that are gone."""

    def _apply_node(self, node_id: str, event: Event, now: float, bans: Mapping[str, Ban]) -> None:
        if event.kind == "put":
            super()._apply_node(node_id, event, now, bans)
        elif node_id in self.members:
            self._note_gone(node_id, left=False, at=now, why="")


class ForgetfulView(TermView):
    """Takes over without the members of the last round, and so counts none of them as live."""

    def take_over(self, round: Round | None, members: Iterable[Member], *more: Any, **others: Any) -> None:  # noqa: ARG002
        super().take_over(round, (), *more, **others)


class CredulousView(TermView):
    """Counts a live member as a waiting node."""

    def _add_record(self, record: NodeRecord) -> None:
        self.records[record.node_id] = record
        self.waiting[record.node_id] = record


class SilentView(TermView):
    """Does not report lost nodes."""

    def _note_gone(self, node_id: str, *, left: bool, **more: Any) -> None:
        if left:
            super()._note_gone(node_id, left=left, **more)


class UnfencedCommits(HeardClient):
    """Commits a round although another node may be the coordinator by now."""

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:
        if isinstance(request, Transact) and commits(request):
            left = tuple(one for one in request.when if not one.key.endswith("/head/coordinator"))
            request = request.replace(when=left)
        return await super().call(request, timeout=timeout)


class CommitsOfClosedRuns(HeardClient):
    """Commits a round although the run may have been closed meanwhile."""

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:
        if isinstance(request, Transact) and commits(request):
            request = request.replace(when=tuple(one for one in request.when if not one.key.endswith("/head/closed")))
        return await super().call(request, timeout=timeout)


class CarelessCommits(HeardClient):
    """Commits a round although its members may have gone or arrived again."""

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:
        if isinstance(request, Transact) and commits(request):
            request = request.replace(when=tuple(one for one in request.when if "/nodes/" not in one.key))
        return await super().call(request, timeout=timeout)


class LateRanks(HeardClient):
    """Writes the ranks only after the commit of the round."""

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:
        if not (isinstance(request, Transact) and commits(request)):
            return await super().call(request, timeout=timeout)
        late = tuple(one for one in request.then if "/ranks/" in one.key)
        rest = tuple(one for one in request.then if one not in late)
        response = await super().call(request.replace(then=rest), timeout=timeout)
        await super().call(Transact(when=(), then=late), timeout=timeout)
        return response


class UnfencedWrites(HeardClient):
    """Writes to a round's store although the node may no longer be in the round."""

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:
        if isinstance(request, Guarded) and isinstance(request.request, Put) and "/store/" in request.request.key:
            request = request.request
        return await super().call(request, timeout=timeout)


def _planted(owner: Any, name: str, bug: Any, **others: Any) -> Seams:
    return Seams(plant=partial(patch.object, owner, name, bug), **others)


def _not_superseded(*_: object) -> None:
    """Do not end calls that are under way."""


@contextmanager
def _as_if_members_still() -> Iterator[None]:
    """Keep nodes from checking their own membership, so that only the fence is left."""
    with (
        patch.object(SharedStore, "end_calls", _not_superseded),
        patch.object(FencedCall, "check_membership", _not_superseded),
    ):
        yield


FULL_BUGS = {
    "a commit without the coordinator's condition": Seams(client=UnfencedCommits),
    "a commit without its members' conditions": Seams(client=CarelessCommits),
    "a commit that ignores a closing": Seams(client=CommitsOfClosedRuns),
    "ranks that are published after the flag": Seams(client=LateRanks),
    "a last call that each join begins anew": _planted(coordinator, "TermView", RestartingView),
    "a stale record that is kept as alive": _planted(coordinator, "TermView", StaleView),
    "a coordinator that forgets the last round": _planted(coordinator, "TermView", ForgetfulView),
    "a live member that is taken for a waiting node": _planted(coordinator, "TermView", CredulousView),
    "a loss that is not reported": _planted(coordinator, "TermView", SilentView),
    "a zombie's write that is not fenced": Seams(plant=_as_if_members_still, client=UnfencedWrites),
    "an acknowledgement before the commit": _planted(Deliverer, "_queue_frame", say_at_once),
}
"""Each bug by name, as it is planted."""
