"""Bugs for training stories, each of which this project once had. The simulation must find each of them."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rdzv.core import decision
from rdzv.core.decision import Act, Expel, Rules, WriteRoundProgress, decide
from rdzv.core.state import Change, Head, NodeRecord
from rdzv.core.stopping import RoundStop, StepGate, StopNegotiation
from rdzv.core.view import Picture
from rdzv.loop.round_monitor import RoundMonitor
from rdzv.membership import Membership, unreported_changes
from rdzv.node.coordinator import term as coordinator
from rdzv.node.coordinator.election import Election
from rdzv.node.coordinator.term import CoordinatorTerm
from rdzv.node.front import queries
from store import ConditionFailed
from store.messages import Request, Transact
from tests.sim.full_node import KEYS
from tests.sim.machines import Seams
from tests.sim.truth import HeardClient

__all__ = ["TRAINING_BUGS"]


class Overwriting(HeardClient):
    """Overwrites decisions about the step to stop at. Only the store's condition prevents that otherwise."""

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> Any:
        if isinstance(request, Transact):
            request = request.replace(when=tuple(one for one in request.when if one.key != KEYS.stop))
        return await super().call(request, timeout=timeout)


@contextmanager
def _a_closed_run_has_no_coordinator() -> Iterator[None]:
    def resigning(picture: Picture, rules: Rules, *, now: float) -> Act:
        if picture.head.closed is not None:
            raise ConditionFailed("planted: the run is closed, and so is its office")
        return decide(picture, rules, now=now)

    is_free = Election._is_role_free.fget  # type: ignore[attr-defined]  # it is a property

    def open_and_free(self: Election) -> bool:
        return self.link.follower.head.closed is None and is_free(self)

    with (
        patch.object(coordinator, "decide", resigning),
        patch.object(Election, "_is_role_free", property(open_and_free)),
    ):
        yield


@contextmanager
def _an_early_departure_is_not_noticed() -> Iterator[None]:
    with patch.object(RoundMonitor, "_has_any_left_early", False):
        yield


@contextmanager
def _nothing_is_heard_after_newcomers() -> Iterator[None]:
    then = StopNegotiation.next_stop_record

    def next_once(self: StopNegotiation, round: int, old: RoundStop | None, **kw: Any) -> tuple[RoundStop, int] | None:
        if old is not None and old.decided and old.round == round:
            return None
        return then(self, round, old, **kw)

    with patch.object(StopNegotiation, "next_stop_record", next_once):
        yield


@contextmanager
def _a_finished_member_forgets_its_steps() -> Iterator[None]:
    def forget(self: StepGate) -> None:
        self.begun, self.at_end = None, True

    with patch.object(StepGate, "note_body_end", forget):
        yield


@contextmanager
def _the_first_to_return_stay() -> Iterator[None]:
    def choose(_: object, candidates: Sequence[NodeRecord], __: object, count: int) -> Sequence[NodeRecord]:
        return sorted(candidates, key=lambda record: record.arrival)[: max(count, 0)]

    with patch.object(decision, "_choose_members", choose):
        yield


@contextmanager
def _every_drain_is_told() -> Iterator[None]:
    def told(seen: Sequence[Change], head: Head, **more: Any) -> list[Change]:
        progress = head.progress and head.progress.replace(draining=tuple(head.drains))
        return unreported_changes(seen, replace(head, progress=progress), **more)

    with patch.object(queries, "unreported_changes", told):
        yield


@contextmanager
def _ones_own_loss_is_anothers() -> Iterator[None]:
    def told(seen: Sequence[Change], head: Head, *, node_id: str, **more: Any) -> list[Change]:  # noqa: ARG001
        return unreported_changes(seen, head, node_id="", **more)

    take = Membership.update

    def nameless(self: Membership, head: Head, **more: Any) -> None:
        self.node_id, node_id = "", self.node_id
        take(self, head, **more)
        self.node_id = node_id

    with patch.object(Membership, "update", nameless), patch.object(queries, "unreported_changes", told):
        yield


@contextmanager
def _a_report_of_an_earlier_picture() -> Iterator[None]:
    expel = CoordinatorTerm._expel

    async def expel_and_report(self: CoordinatorTerm, act: Expel) -> int | None:
        earlier = self._picture.told
        revision = await expel(self, act)
        if revision is not None and earlier is not None and earlier.round == act.progress.round:
            await self._write_progress(WriteRoundProgress(progress=earlier))
        return revision

    with patch.object(CoordinatorTerm, "_expel", expel_and_report):
        yield


@contextmanager
def _two_expels_of_one_picture() -> Iterator[None]:
    expel = CoordinatorTerm._expel

    async def expel_all(self: CoordinatorTerm, act: Expel) -> int | None:
        view, revision = self._view, await expel(self, act)
        before = act.progress.replace(lost=act.progress.lost - 1, lost_ids=act.progress.lost_ids[:-1])
        for node_id in view._stuck.keys() & view.live - {act.node_id}:
            record = view.records[node_id]
            progress = before.after_expulsion(node_id, address=record.address, why=act.why)
            more = replace(act, node_id=node_id, arrival=record.arrival, progress=progress)
            revision = await expel(self, more) or revision
        return revision

    with patch.object(CoordinatorTerm, "_expel", expel_all):
        yield


@contextmanager
def _its_own_decision_is_forgotten() -> Iterator[None]:
    wrote = StopNegotiation.note_written

    def forget(self: StopNegotiation, stop: RoundStop) -> None:
        if not stop.decided:
            wrote(self, stop)

    with patch.object(StopNegotiation, "note_written", forget):
        yield


@contextmanager
def _another_task_sets_the_decision() -> Iterator[None]:
    take, decide_now = Membership.update, StepGate.note_decision
    taking: list[Membership] = []
    tasks = set[asyncio.Task[None]]()

    def take_late(self: Membership, head: Head, **more: Any) -> None:
        taking.append(self)
        take(self, head, **more)
        taking.pop()

    def decide_later(self: StepGate, stop: int | None, **why: Any) -> None:
        membership = taking[-1]

        async def later() -> None:
            decide_now(self, stop, **why)
            membership.listeners.notify()

        if (self.decided, self.stop, self.for_newcomers) != (True, stop, why["for_newcomers"]):
            task = asyncio.get_running_loop().create_task(later())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    with patch.object(Membership, "update", take_late), patch.object(StepGate, "note_decision", decide_later):
        yield


TRAINING_BUGS = {
    "no coordinator once the run is closed": Seams(plant=_a_closed_run_has_no_coordinator),
    "a departure before the agreed step is not noticed": Seams(plant=_an_early_departure_is_not_noticed),
    "no reason replaces newcomers that have to wait": Seams(plant=_nothing_is_heard_after_newcomers),
    "the steps of a finished member are forgotten": Seams(plant=_a_finished_member_forgets_its_steps),
    "the first nodes to return stay": Seams(plant=_the_first_to_return_stay),
    "an expelled member is told of its own loss": Seams(plant=_ones_own_loss_is_anothers),
    "a report of an earlier picture follows an expel": Seams(plant=_a_report_of_an_earlier_picture),
    "two members are expelled by one picture": Seams(plant=_two_expels_of_one_picture),
    "another task sets what was decided": Seams(plant=_another_task_sets_the_decision),
    "every drain is told of": Seams(plant=_every_drain_is_told),
    "a decision is written over": Seams(client=Overwriting, plant=_its_own_decision_is_forgotten),
}
"""Each bug by name, as it is planted."""
