"""Tasks that queue facts for the deciding task (`term`): members' begun steps, stuck and accused members."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.core.stopping import LastBegun
from rdzv.core.stuck.accusing import UNKNOWN
from rdzv.core.stuck.judging import StallDetector, StallRules
from rdzv.core.view import StandstillReport, StopAnswer, StuckMember
from rdzv.errors import RendezvousStateError
from rdzv.node.run.status import read_step_notes
from store import LeaseNotFound, StoreError
from store.keeping import RENEWALS_PER_TTL
from store.messages import TimeToLive
from store.net.tasks import run_to_completion

if TYPE_CHECKING:
    from rdzv.config.settings import Settings
    from rdzv.node.coordinator.term_context import TermContext

LOOKS_EVERY = 0.5  # seconds, at least, between checks for stuck members
LOOKS_EVERY_PER_NODE = 0.0005  # seconds per member, at least: more members make the store's answer longer
# A lease with a smaller share of its TTL left is not being renewed: renewed leases have at least twice this left.
DOUBTED_BELOW: Final = 1 / RENEWALS_PER_TTL
ASKED_ABOUT_MOST: Final = 256  # live members; with more, ignore accusations that do not say which member is lost
LOOKS_AFTER: Final = (0.0, 0.01, 0.03)  # seconds before each lease check: the store may notice a closed connection late


async def gather_stop_answers(context: TermContext, asking: asyncio.Event) -> None:
    """Once `asking` is set, queue members' answers to the question which step they have begun (`core.stopping`)."""
    await asking.wait()
    begun = context.keys.begun
    async with context.store.watch(begun, snapshot=True) as watch:
        async for event in watch:
            if event.kind == "synced":
                context.queue_for_decision(StopAnswer())
            elif event.kind == "put":
                with contextlib.suppress(RendezvousStateError):  # another program wrote the key
                    context.queue_for_decision(StopAnswer(event.key.removeprefix(begun), LastBegun.unpack(event.value)))


async def report_stalls(context: TermContext, settings: Settings) -> None:
    """Report stuck members, and standstills of the whole round, to the deciding task, until cancelled."""
    rules = StallRules(
        stall_timeout=settings.stall_timeout,
        first_step_timeout=settings.first_step_timeout,
        notes_every=settings.ttl / RENEWALS_PER_TTL,
    )
    stalls, view = StallDetector(rules), context.view
    while rules.enabled:
        every = max(LOOKS_EVERY, LOOKS_EVERY_PER_NODE * len(view.members))
        await anyio.sleep(every)
        number, members = view.last_number, view.members
        if not view.synced or not view.live:
            continue
        try:
            beats = await read_step_notes(context.store, context.keys)
        except StoreError:
            continue
        heard = {node_id: one for node_id, one in beats.items() if node_id in view.live}
        awaited = not view.waiting.keys().isdisjoint(members)
        verdict = stalls.judge(heard, round=number, now=context.store.time(), every=every, awaited=awaited)
        if verdict.standstill != view.standstill:
            context.queue_for_decision(StandstillReport(number, verdict.standstill))
        if verdict.stuck:
            found = verdict.stuck.items()
            context.queue_for_decision(*(StuckMember(number, members[id].arrival, id, why) for id, why in found))


@dataclass(eq=False)
class AccusationCheck:
    """During a coordinator's term, asks the store about the leases of members with one accuser.

    One accuser is enough to expel a member if the member's lease is not being renewed: it is disconnected or silent.
    """

    context: TermContext
    gone_ttl: float
    _asked: set[tuple[int, str, str]] = field(default_factory=set)  # accusations already investigated
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def wake_if_accused(self) -> None:
        """Schedule requests to the store about new accusations."""
        if self._new_accusations():
            self._news.set()

    def _new_accusations(self) -> list[tuple[int, str, str]]:
        view, number = self.context.view, self.context.view.last_number
        said = view.accusations.by_live_members(round=number, live=view.live)
        if len(view.live) <= ASKED_ABOUT_MOST:
            said += view.accusations.against_unnamed_member(round=number, live=view.live)
        return [one for one in ((number, one.accused, one.by) for one in said) if one not in self._asked]

    async def run(self) -> None:
        """Ask the store about the accused members of each new accusation, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            new = self._new_accusations()
            self._asked = {one for one in self._asked if one[0] == self.context.view.last_number} | set(new)
            for pause in LOOKS_AFTER:
                await anyio.sleep(pause)
                for number, accused, by in new:
                    with contextlib.suppress(StoreError):  # if the store does not answer, make no decision
                        self.context.queue_for_decision(*await self._find_unrenewed_members(number, accused, by))

    def _accusation_text(self, accused: str, by: str) -> str:
        said = self.context.view.accusations.get(self.context.keys.accusation(accused, by))
        if accused == UNKNOWN:
            return f"its process ended, as {by} noticed first"
        return f"accused by {by}{f': {said.why}' if said and said.why else ''}; and the store does not hear from it"

    async def _find_unrenewed_members(self, number: int, accused: str, by: str) -> list[StuckMember]:
        """Return the accused members whose leases are not being renewed.

        If the accuser could not name the lost member (`UNKNOWN`), return only members whose leases end within
        `gone_ttl`, as after the end of a process. A longer lease may be of a live member whose connection broke.
        """
        view, why = self.context.view, self._accusation_text(accused, by)
        named, at_most = (view.live & {accused}, math.inf) if accused != UNKNOWN else (view.live - {by}, self.gone_ttl)
        meant = [StuckMember(number, view.records[one].arrival, one, why) for one in sorted(named)]
        found = await run_to_completion(*(self._none_if_renewed(one, at_most=at_most) for one in meant))
        return [one for one in found if one is not None]

    async def _none_if_renewed(self, member: StuckMember, *, at_most: float) -> StuckMember | None:
        """Return the member if its lease is not being renewed, and at most `at_most` seconds of it remain."""
        record = await self.context.store.get(self.context.keys.node(member.node_id))
        if record is None or record.lease is None:
            return None
        try:
            lease = await self.context.store.call(TimeToLive(lease=record.lease))
        except LeaseNotFound:
            return None  # the lease has ended, which the watch will report
        return member if lease.remaining <= at_most and lease.remaining / lease.ttl < DOUBTED_BELOW else None
