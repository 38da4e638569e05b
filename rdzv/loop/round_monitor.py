"""Watches one member's round for its end, and acts on that end; runs in the node's loop.

`rdzv.core.round_life` decides whether a failure is the member's own or caused by others.

**The end of a round.** A member's loss or failure, a departure other than at the agreed step, the removal of this node,
and giving the run up end a round at once. If the run is closed, or nodes are to join or leave, the round ends at the
step that the members agree on, or at once if this member begins no steps.
"""

from __future__ import annotations

import contextlib
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio

from rdzv.core.absent import node_label
from rdzv.core.round_life import (
    ASK_WITHIN,
    Ending,
    EndKind,
    MemberPhase,
    NextAfterWork,
    find_give_up_error,
    is_genuine_failure,
    loss_known_within,
)
from rdzv.core.state import Closed, NodesLeft, NodesLost
from rdzv.core.stuck.accusing import UNKNOWN
from rdzv.errors import RendezvousError, RoundSupersededError
from rdzv.membership import unreported_changes
from rdzv.node.front import verbs
from rdzv.node.front.sharing import shared_store
from rdzv.node.link.stopwatch import STOOD_STILL
from rdzv.node.run.run import Run
from store import StoreError
from store.printable import make_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from rdzv.errors import GiveUp
    from rdzv.membership import Membership
    from rdzv.node.node import Node
    from rdzv.shared_store.store import SharedStore

log: Final = make_logger(__name__)

FINISHED: Final = "every member has finished its body"

DONE: Final = "rdzv/done"  # the key, in a round's store, of the number of finished members
BLAME: Final = "rdzv/ended_by"  # the key of the name (and error) of the member that ended the round first

LISTENS_FOR: Final = 1e9  # seconds; in effect no limit, as the round's end ends the wait
LISTENS_AGAIN: Final = 1.0  # seconds until `wait_for_end` asks the store again after an error
ETCD_LATE: Final = 1.0  # seconds by which etcd may report a lease's end late
LOOKS_FOR_NEWS_EVERY: Final = 0.1  # seconds between the checks of `_wait_for_possible_loss`


@dataclass(eq=False)
class RoundMonitor:
    """Watches one member's round for its end."""

    node: Node
    membership: Membership
    # Called with the round's ending, in the node's thread or in the thread that noticed the end first. Called again if
    # the members had agreed to leave, but the round ends otherwise before this member has left.
    on_end: Callable[[Ending], object]
    _: KW_ONLY
    lets_newcomers_wait: bool = False  # True if waiting nodes must not interrupt work that begins no steps
    finished: str = FINISHED  # the reason for closing the run once all members have finished
    phase: MemberPhase = MemberPhase.AT_WORK
    blames_others: bool = False  # True if others caused a failure that seemed this member's own
    all_have_finished: bool = False  # as far as this member has read
    stopped: bool = False
    # The agreement to leave is under False, any other ending under True. Any thread may set either, once.
    _endings: dict[bool, Ending] = field(default_factory=dict)
    _awaits: anyio.CancelScope | None = None  # ends a wait: cancelled at the round's end, or once all others rejoin

    @property
    def ending(self) -> Ending | None:
        """The round's ending for this member; None while the round continues."""
        return self._endings.get(True) or self._endings.get(False)

    @property
    def is_over(self) -> bool:
        """True if the round or this member's work has ended, so that this member needs no agreement on a stop."""
        return self.stopped or self.ending is not None

    @property
    def has_ended_abruptly(self) -> bool:
        """True if the round has ended, but not by the members' agreement to leave."""
        return True in self._endings

    @property
    def has_failed(self) -> bool:
        """True if the round has ended by a failure, loss, removal, or departure in mid-step."""
        gone = (EndKind.LOST, EndKind.LEFT, EndKind.FAILED, EndKind.DROPPED)
        return self.blames_others or (self.ending is not None and self.ending.kind in gone)

    def start(self) -> None:
        """Begin to watch for the round's end."""
        self.membership.listeners.add(self)
        self.notify()

    def stop(self) -> None:
        """Stop watching for the round's end."""
        self.stopped = True
        self.membership.listeners.remove(self)

    def notify(self) -> None:
        """Check whether the round has ended; thread-safe."""
        ending = None if self.has_ended_abruptly else self._find_ending()
        if ending is not None:
            self.note_ending(ending)
        if self.phase is MemberPhase.FAILED and self._have_others_rejoined():
            self._cancel_wait()

    def note_ending(self, ending: Ending) -> None:
        """Record the first ending, or a later one that replaces an agreement to leave. Thread-safe."""
        if self._record_ending(ending):
            self.on_end(ending)
            if (
                self.phase is not MemberPhase.AT_WORK
            ):  # after the work, this runs in the node's thread, where the wait is
                self._cancel_wait()

    def _record_ending(self, ending: Ending) -> bool:
        is_first = self._endings.setdefault(ending.is_abrupt, ending) is ending
        return is_first and self.ending is ending

    def _cancel_wait(self) -> None:
        if self._awaits is not None:
            self._awaits.cancel()

    def _find_ending(self) -> Ending | None:
        membership, gate = self.membership, self.membership.gate
        if membership.over is not None:
            why = f"this node was dropped: {membership.over}" if membership.dropped else membership.over
            return Ending(kind=EndKind.DROPPED, reason=why)
        head, progress, round = membership.head, membership.coordinator_report, membership.round
        at_end = self.phase is MemberPhase.AT_END
        stops_nowhere = at_end or (gate.begun is None and gate.stop is None)  # this member begins no (more) steps
        for change in unreported_changes([], head, round=round, dropped=None, node_id=membership.node_id):
            match change:
                case NodesLost(node_ids=ids) as lost:
                    return Ending(kind=EndKind.LOST, reason=f"lost: {describe_gone_nodes(lost)}", node_ids=ids)
                case NodesLeft(node_ids=ids) as left if not gate.decided or self._has_any_left_early:
                    return Ending(kind=EndKind.LEFT, reason=f"left: {describe_gone_nodes(left)}", node_ids=ids)
                case Closed(reason=reason, given_up=given_up) if given_up or stops_nowhere:
                    return Ending(kind=EndKind.CLOSED, reason=f"the run is closed: {reason}")
        if gate.decided and gate.stop is None and not self._ignores_stop:
            # No step was agreed on, so all leave at once. Either no member has begun a step, or the run is closed, and
            # a member has finished or gone, for which others may wait in their step.
            return Ending(kind=EndKind.AGREED if stops_nowhere else EndKind.CLOSED, reason=gate.why)
        if progress is None:
            return None
        if at_end and progress.live < round.size:
            # This member has finished, so it reaches no agreed step. If other members stop unfinished, all meet again.
            return Ending(kind=EndKind.AGREED, reason=gate.why or "others, who were not done, meet again")
        if self.phase is MemberPhase.AT_WORK and progress.live < round.size and round.in_steps and not gate.decided:
            # A member has rejoined without an agreed stop: its step failed, and others may wait for it in that step.
            return Ending(kind=EndKind.LEFT, reason="left: a member meets again, and all had not agreed to")
        if gate.decided and gate.begun is None and progress.live < round.size and not self._ignores_stop:
            return Ending(kind=EndKind.AGREED, reason=gate.why)  # this member calls no `check`, and others have left
        return None

    @property
    def _ignores_stop(self) -> bool:
        return self.membership.gate.for_newcomers and self.lets_newcomers_wait

    def _have_others_rejoined(self) -> bool:
        """Return True if all other members have arrived for the next round: then none of them has died."""
        progress = self.membership.coordinator_report
        return progress is not None and progress.live <= 1 and not (progress.lost or progress.departed)

    @property
    def _has_any_left_early(self) -> bool:
        """True if a member has left before the agreed step: other members may wait for it in a step.

        If all leave at once for newcomers, a departure counts, too: members that call no `check` may wait for it.
        """
        progress = self.membership.coordinator_report
        return progress is not None and progress.left_early

    async def on_work_end(
        self,
        failure: BaseException | str | None,
        *,
        in_node: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]],
        release: Callable[[], Awaitable[None]],
    ) -> NextAfterWork:
        """Act on the end of the member's work.

        `failure` is the work's error, or its description; None: success. `in_node` runs a coroutine in the node's loop.
        `release` ends other members' waits for this member. It is called after this member's report of its failure:
        members that fail because of this one must not report first.
        """
        verdict = find_give_up_error(failure)
        if verdict is not None:
            await in_node(self._give_up_run(verdict))
            return NextAfterWork.GIVE_UP
        if failure is None:
            if self.ending is None:
                await in_node(self._wait_until_all_finish())
            return NextAfterWork.MEET_AGAIN
        is_own = is_genuine_failure(failure, self.node.run_id)
        if is_own is None:
            return NextAfterWork.RAISE
        if not is_own or self.has_ended_abruptly:
            self.notify()  # look again: the node may read of a loss only after the work has failed
            if self.ending is None:  # the node has not read of the end yet, or the error is of another round
                self._record_ending(Ending(kind=EndKind.DROPPED, reason=str(failure)))
                if self.membership.gate.is_waited_for:
                    # Others wait for this member in a step. Report a departure: an arrival alone means an agreed stop.
                    await in_node(self._leave())
            return NextAfterWork.MEET_AGAIN
        self.phase = MemberPhase.FAILED
        if await in_node(self._claim_failure(failure)):
            await release()
            await in_node(self._wait_for_possible_loss())
        self.blames_others = True in self._endings  # others may have ended the round, perhaps before the claim
        if self.blames_others:
            return NextAfterWork.MEET_AGAIN
        await in_node(self._leave())
        return NextAfterWork.RAISE

    async def _leave(self) -> None:
        with contextlib.suppress(RendezvousError):  # if the store cannot be reached, this member's lease expires
            await self.node.loop.spawn(verbs.leave(self.node))

    async def _give_up_run(self, verdict: GiveUp) -> None:
        try:
            await self.node.loop.spawn(verbs.give_up(self.node, verdict.reason, status=verdict.status))
        except RendezvousError as error:  # this member gives up even if the others cannot be told
            self._log_warning(f"the others could not be told that the run is given up: {error}")

    async def _wait_until_all_finish(self) -> None:
        """Wait until all members have finished and the last one closes the run, or until the round ends otherwise.

        If this member cannot report that it has finished, return, so that it meets again with the others.
        """
        self.phase = MemberPhase.AT_END
        self.membership.beats.finish_all_steps()  # no member expects more steps of this member
        self.membership.gate.note_body_end()
        self.notify()
        try:
            with anyio.CancelScope() as self._awaits:
                if self.ending is None:
                    await self._add_to_finished_count(1)
                    await anyio.sleep_forever()
            if self.ending is not None and self.ending.kind in (EndKind.LOST, EndKind.LEFT):
                await self._add_to_finished_count(0)  # the member to close the run may have died first
        except (RendezvousError, StoreError) as error:
            self._log_warning(f"this member has finished, and cannot report it: {error}")

    async def _add_to_finished_count(self, more: int) -> None:
        with contextlib.suppress(RoundSupersededError):
            count = await (await self._open_shared_store()).add(DONE, more)
            self.all_have_finished = count == self.membership.round.size
        if self.all_have_finished:
            # The node's loop completes the closing even if this caller is cancelled.
            await self.node.loop.spawn(verbs.set_closed(self.node, self.finished))

    async def _claim_failure(self, failure: BaseException | str) -> bool:
        """Report that this member has failed; return True if it has failed first, and is not the only member."""
        how = failure if isinstance(failure, str) else ""
        if not await self.claim_end(how):
            reason = f"others failed before this member did: {failure!r}"
            self._record_ending(Ending(kind=EndKind.FAILED, reason=reason))
            return False
        if self.membership.round.size == 1:
            return False
        with contextlib.suppress(RendezvousError):  # the accusation only makes losses known sooner
            await accuse_unknown_member(self.node, self.membership, how or repr(failure))
        return True

    async def _wait_for_possible_loss(self) -> None:
        """Wait until a member's loss is known, or until any loss so far would be known."""
        settings = self.node.settings
        on_etcd = settings.endpoint.scheme_info.family == "etcd"  # on etcd, only `ttl` ends a dead member's lease
        died_within = settings.ttl + ETCD_LATE if on_etcd else settings.disconnect_ttl
        left = loss_known_within(disconnect_ttl=died_within, ttl=settings.ttl, connected_for=self.node.connected_for)
        with anyio.CancelScope() as self._awaits:
            self.notify()
            while left > 0 and not self.has_ended_abruptly:
                began = anyio.current_time()
                await anyio.sleep(LOOKS_FOR_NEWS_EVERY)
                took = anyio.current_time() - began
                # Do not count time in which this process was stopped: it has yet to read the events of that time.
                left -= took if took < LOOKS_FOR_NEWS_EVERY + STOOD_STILL else 0.0

    def _log_warning(self, what: str) -> None:
        log.warning("run %s, round %d: %s", self.node.run_id, self.membership.round.number, what)

    async def _open_shared_store(self) -> SharedStore:
        link, round = await self.node.get_session(), self.membership.round
        store = shared_store(self.node, self.membership, link.store)
        store.prefix = self.node.keys.round_prefix(round.number, round.term)  # even a full store accepts such keys
        return store

    async def is_in_round(self) -> bool:
        """Return False if the store answers that this member is out of the round."""
        try:
            with contextlib.suppress(StoreError):  # if the store is lost, this member's next request fails, too
                await (await self._open_shared_store()).check([DONE])
        except RoundSupersededError:
            return False
        return True

    async def claim_end(self, how: str = "") -> bool:
        """Report that this member ends the round, and `how` its work failed, if it did; return True if it is the first.

        If this node is cut off from the store, or out of the round, return False: its failure has another cause.
        """
        said = f"{self.node.node_id}\n{how}".encode(errors="backslashreplace")
        with anyio.move_on_after(ASK_WITHIN), contextlib.suppress(RendezvousError, StoreError):
            return await (await self._open_shared_store()).compare_set(BLAME, b"", said) == said
        return False

    async def wait_for_end(self) -> None:
        """Wait until a member ends the round. If another's work failed, end the round here: a collective might hang."""
        try:
            listening = (await self._open_shared_store()).without_wait_reports()
        except RendezvousError:
            return  # without the store the round is lost
        self.membership.call_when_over(listening.end_calls)
        while True:
            try:
                await listening.wait([BLAME], LISTENS_FOR)
                name, _, how = (await listening.get(BLAME)).decode(errors="replace").partition("\n")
            except RoundSupersededError:
                return  # the round is over; this member's node learns that, too
            except (RendezvousError, StoreError):
                await anyio.sleep(LISTENS_AGAIN)
            else:
                if how and name != self.node.node_id:
                    self.note_ending(Ending(kind=EndKind.FAILED, reason=f"{name}: {how}", node_ids=(name,)))
                return


def describe_gone_nodes(gone: NodesLost | NodesLeft) -> str:
    """Return the names, addresses and reasons of the nodes that have gone, and the number of unnamed ones."""
    why = {node_id: f": {reason}" for node_id, reason in gone.reasons.items()}
    names = ", ".join(node_label(one, gone.addresses.get(one)) + why.get(one, "") for one in gone.node_ids)
    more = gone.count - len(gone.node_ids)
    return f"{names} and {more} more" if more > 0 else names


async def accuse_unknown_member(node: Node, membership: Membership, why: str) -> None:
    """Report a death without knowing whose: the coordinator counts a disconnected member as lost before `gone_ttl`."""
    link = await node.get_session()
    with contextlib.suppress(StoreError):
        await Run(link.store, node.keys, by=node.node_id).accuse(membership, UNKNOWN, why)
