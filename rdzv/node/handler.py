"""Shell: the handler that an async caller holds: a front of its node, which forwards, and never decides.

The node itself lives in a loop of its own (`node.loops`), so that a caller may be as busy as it likes. Each call here
begins a coroutine there, and waits for it. A caller may be cancelled while it waits, natively or by anyio, once or
twice; what it has begun is seen to its end all the same:

- `next_rendezvous` is undone: the node's arrival is taken back. The first cancel waits for that, which takes two
  seconds at most; a second one does not.
- `leave`, `set_closed`, `drain`, `resize`, `ban`, `unban` and `aclose` go on. The first cancel of `aclose` waits for
  its end, too.
- What only asks ends.

Two things are not the node's. The round's shared store has a client of its own, in the caller's loop, made at first
use: a large value does not delay the node's keep-alives. And the user's health check runs where its user lives, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import anyio

from rdzv.core.asking import ANSWER_TTL, pack_answer
from rdzv.core.round import BUCKET_SIZE, unpack_roster
from rdzv.core.state import Ban
from rdzv.core.stuck.accusing import SOMEBODY
from rdzv.errors import RendezvousStateError, RoundSupersededError
from rdzv.interface import RendezvousHandler
from rdzv.membership import Membership, RendezvousInfo
from rdzv.node.accusing import put_accusation
from rdzv.node.admission import ban_where, examine, note_failures, unban_where
from rdzv.node.node import Node, Ticket
from rdzv.node.queries import Changes, WakeupHere
from rdzv.node.status import read_run
from rdzv.shared_store.company import Company
from rdzv.shared_store.fencing import nobody
from rdzv.shared_store.store import ClientAtFirstUse, SharedStore
from store import ConnectionLost, StoreError, when
from store.net.threads import Call

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
    from types import TracebackType

    from rdzv.config.settings import Settings
    from rdzv.core.asking import Question
    from rdzv.core.history import Chapter, History
    from rdzv.core.report import RunStatus
    from rdzv.core.round import Participant
    from rdzv.core.stopping import Resized
    from rdzv.shared_store.store import BlockingSharedStore
    from store import BlockingStore, Store

__all__ = ["Handler", "RendezvousInfo", "absence_of"]

T = TypeVar("T")

WHY_LETTERS_MOST = 200


class Handler(RendezvousHandler):
    """One node's part in the rendezvous of a run; made by `rdzv.connect`.

    Args:
        node: What it is a front of.
        open_store: Makes a client of the same store in the caller's loop, for the shared store.
        open_blocking_store: Makes a blocking client of it, for the shared store of blocking callers.
    """

    def __init__(
        self,
        node: Node,
        *,
        open_store: Callable[[], contextlib.AbstractAsyncContextManager[Store]],
        open_blocking_store: Callable[[], BlockingStore] | None = None,
    ) -> None:
        self.node = node
        self.shared_client: ClientAtFirstUse = ClientAtFirstUse(open_store)
        self._open_blocking_store = open_blocking_store
        self._pid = os.getpid()

    # ------------------------------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        try:
            await self._call(self.node.connect())
        except BaseException:
            await self.aclose()  # nobody else will, and a store that was started for us would be served for ever
            raise
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave for good: the round, the run's coordination, and the store. May be called twice."""
        if self._pid != os.getpid():
            return  # a forked child has nothing here to let go of
        try:
            closing = self.node.loop.start(self.node.aclose())
            withdrawn = self.node.loop.start(self.node.withdrawn.wait())
        except RendezvousStateError:
            return  # it was closed before, and its thread has ended
        closing.over.call(self.node.loop.leave)  # not before: what is begun there is to end there
        try:
            await self._end_with(withdrawn, closing)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await self._end_with(withdrawn, closing)  # a second cancel leaves the node to itself
            raise
        finally:
            await self.shared_client.aclose()
        _result_of(closing)

    async def _end_with(self, withdrawn: Call[Literal[True]], closing: Call[None]) -> None:
        """Hang up once the node has left its round, and then wait until it is closed.

        Not before: whoever waits in the shared store is told that the round is over. And not after: a store that this
        process hosts is served until all others have hung up.
        """
        await withdrawn.end()
        await self.shared_client.aclose()
        await closing.end()

    async def _call(self, work: Coroutine[Any, Any, T], *, see_to_its_end: bool = False) -> T:
        """Have the node do something, and wait for it."""
        call = self._begin(work)
        try:
            await call.end()
        except BaseException:
            if not see_to_its_end:
                call.cancel()
            raise
        return _result_of(call)

    def _begin(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        try:
            self.check_usable()
        except BaseException:
            work.close()
            raise
        return self.node.loop.start(work)

    def check_usable(self) -> None:
        """Refuse to go on in a forked child, where the node is not, or once it is closed."""
        if self._pid != os.getpid():
            raise RendezvousStateError(
                f"this handler of run {self.run_id} was made before fork(); make a new one in the child"
            )
        self.node.check_usable()

    @property
    def run_id(self) -> str:
        """Which run this is."""
        return self.node.run_id

    @property
    def node_id(self) -> str:
        """What this node is called in the run."""
        return self.node.node_id

    @property
    def settings(self) -> Settings:
        """What was chosen."""
        return self.node.settings

    @property
    def reason(self) -> str:
        """What this node waits for, in words."""
        return self.node.part.reason

    def open_blocking_store(self) -> BlockingStore:
        """A new blocking client of the same store; the caller's to close."""
        if self._open_blocking_store is None:
            raise RendezvousStateError(f"run {self.run_id}: this handler was made without a way to block")
        return self._open_blocking_store()

    # ------------------------------------------------------------------------------------------ joining and leaving

    async def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if in one, and return once this node is a member of the next.

        Raises:
            RendezvousClosedError: The run is closed; the message has the reason.
            RendezvousTimeoutError: It did not happen within `join_timeout`; the message says what was missing.
            RendezvousSettingsError: The run was started with other settings, or this handler with too few to join.
            RendezvousGracefulExitError: This node was a spare, and the run is closed; or it waits, and is to leave.
            RendezvousConnectionError: The store cannot be reached.
            RendezvousRefusedError: This node is banned, or failed its health check; the message has the reason.
            RendezvousStateError: Another call of this handler is joining already.
        """
        ticket = Ticket()
        joining = self._begin(self.node.next_rendezvous(ticket, self._health_check()))
        try:
            await joining.end()
            return self._info(_result_of(joining))
        except asyncio.CancelledError:
            undoing = self.node.loop.start(self.node.abandon(ticket))
            with anyio.CancelScope(shield=True):
                await undoing.end()
            raise

    def _health_check(self) -> Callable[[], Awaitable[str | None]] | None:
        """The user's health check, to be carried out in this loop by whoever calls this in another."""
        check, here = self.settings.health_check, asyncio.get_running_loop()
        if check is None:
            return None
        return lambda: Call(examine(check), here)

    def _info(self, membership: Membership) -> RendezvousInfo:
        """What the caller gets of a round."""
        shared = shared_store(self.node, membership, self.shared_client)
        here = asyncio.get_running_loop()

        def end_waits(_: tuple[str, ...]) -> None:
            with contextlib.suppress(RuntimeError):  # as below
                here.call_soon_threadsafe(shared.end_waits)

        def supersede(reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop has closed: nothing is under way there
                here.call_soon_threadsafe(shared.supersede, reason)

        info = RendezvousInfo(
            run_id=self.run_id,
            round=membership.round.number,
            node_id=self.node_id,
            rank=membership.rank,
            world_size=membership.round.size,
            store=shared,
            bootstrap_address=(membership.round.host, membership.round.port),
            _membership=membership,
            _read_roster=lambda: self._read_roster(membership),
        )
        info.on_superseded(supersede)
        if self.settings.waits_end_on_loss:
            membership.on_loss.append(end_waits)
        return info

    async def _read_roster(self, membership: Membership) -> list[Participant]:
        return await self._call(self.node.roster(membership))

    async def leave(self) -> None:
        """Leave this round; the node may come again. Without a round it does nothing.

        Raises:
            RendezvousStateError: A call of `next_rendezvous` is under way; cancel that instead.
        """
        await self._call(self.node.leave(), see_to_its_end=True)

    # ------------------------------------------------------------------------------------------ what is known

    async def num_nodes_waiting(self) -> int:
        """How many arrivals a regroup now would admit, as far as the coordinator has told; no round trip."""
        return await self._call(self.node.num_nodes_waiting())

    def num_nodes_changed(self, *, on_loss: bool = True) -> int:
        """How many nodes wait to come in, or have gone: above 0, this member should meet the others again.

        Answered from what was pushed, at once and from any thread: for a loop that asks many times a second.

        Args:
            on_loss: Whether to count members that have died or left since the round completed, and this node itself
                if it was dropped; else only arrivals that a regroup now would admit.

        Returns:
            0 if this node is in no round, and once the run is closed: then there is nothing to meet again for.
        """
        return self.node.num_nodes_changed(on_loss=on_loss)

    async def is_closed(self) -> bool:
        """Whether the run is closed.

        Raises:
            RendezvousConnectionError: The store is out of reach, so nobody knows.
        """
        return await self._call(self.node.is_closed())

    async def set_closed(self, reason: str = "", *, given_up: bool = False, status: int = 0) -> None:
        """Close the run for every node, for good; the first reason given is the one that is shown.

        Args:
            reason: Shown to whoever asks, for as long as the run is remembered.
            given_up: It is a verdict not to go on, rather than the end of the work.
            status: The exit status that every launcher then ends with.
        """
        await self._call(self.node.set_closed(reason, given_up=given_up, status=status), see_to_its_end=True)

    async def drain(self, within: float = 120.0, reason: str = "") -> None:
        """Announce that this node is to leave: the members of its round hear of it, and stop together before it does.

        Whoever goes by `rounds()` leaves at a `check`, the same for all; else `changes()` says `Draining`. After
        `within` seconds the node leaves its round in any case, which then is a departure like any other.
        """
        await self.drain_node(self.node_id, within=within, reason=reason)

    async def drain_node(self, node_id: str, *, within: float = 120.0, reason: str = "") -> None:
        """Announce that some node is to leave; see `drain`.

        Raises:
            RendezvousStateError: No such node is in the run.
        """
        await self._call(self.node.drain(node_id, within=within, reason=reason), see_to_its_end=True)

    async def resize(self, min_nodes: int | None = None, max_nodes: int | None = None, *, reason: str = "") -> Resized:
        """Give the run another minimum or maximum of nodes while it lives; None leaves a number as it is.

        It is in force from the next round on. A round with more members than that ends at a `check`, the same for all,
        and those with the highest ranks become spares; where there is room for nodes that wait, they come in likewise.
        A round with fewer members than the new minimum goes on until there are enough nodes for the next. Nodes that
        come with the numbers that the run had before take the new ones.

        Raises:
            RendezvousSettingsError: The numbers contradict each other, or the run's `node_unit`.
            RendezvousStateError: No node has come to the run yet.
            RendezvousClosedError: The run is closed.
        """
        work = self.node.resize(min_nodes=min_nodes, max_nodes=max_nodes, reason=reason)
        return await self._call(work, see_to_its_end=True)

    async def keep(self, key: str, data: bytes) -> None:
        """Keep a little state of the run from round to round.

        Raises:
            RoundSupersededError: This node is in no round.
        """
        await self._call(self.node.keep(key, data), see_to_its_end=True)

    async def accuse(self, rank: int, why: str) -> None:
        """Say of a member of the round that it does not answer, as a collective that has failed does.

        One accuser is shown in `rdzv status`. If two accuse the same member, it is lost to the round, with their
        reasons, though its lease stands.

        Raises:
            RoundSupersededError: This node is in no round, or no longer in it.
            RendezvousStateError: The round has no such rank, or it is this node's own.
        """
        await self._call(accuse(self.node, rank, why), see_to_its_end=True)

    async def suspect(self, why: str) -> None:
        """Say that something in the round has failed as it does when a member has died, by whomever it was.

        If the store sees that a member's process has hung up, that member is lost at once, without `gone_ttl`.
        """
        await self._call(suspect(self.node, why), see_to_its_end=True)

    async def change_tally(self, change: Callable[[bytes], bytes]) -> bytes:
        """Change what the nodes of the run count together, and return it; `change` gets what it was, or nothing.

        It runs in the node's thread, and again if another node has changed it meanwhile.
        """
        return await self._call(change_tally(self.node, change), see_to_its_end=True)

    async def restore(self, key: str) -> bytes | None:
        """Return what any member has kept last under a name; None if nobody has."""
        return await self._call(self.node.restore(key))

    def changes(self) -> Changes:
        """What happens to the round, as it happens, beginning with what already holds.

        Enter it, and iterate over it: `async with handler.changes() as changes: async for change in changes`. Counts
        are since the round completed. It goes on over rounds: after `next_rendezvous` it tells of the new one. It ends
        after `Closed`. `await changes.poll(seconds)` gives one change, or None; no change is lost by any time limit.
        """
        return Changes(self.node, lambda: self._call(self.node.connect()))

    async def statuses(self) -> AsyncGenerator[RunStatus, None]:
        """How the run stands now, and again whenever that has changed; the last one is that of the closed run."""
        wakeup = WakeupHere()
        with self.node.listeners.listening(wakeup):
            while True:
                status = await self.status()
                yield status
                if status.closed is not None:
                    return
                await wakeup.sleep()

    async def questions(self) -> AsyncGenerator[tuple[str, Question], None]:
        """What operators ask of this node, as they do, each with its name; answer it by `answer`."""
        wakeup, heard = WakeupHere(), set[str]()
        with self.node.listeners.listening(wakeup):
            while True:
                questions = self.node.head.questions
                heard &= questions.keys()
                for name, question in questions.items():
                    if name not in heard and question.is_for(self.node_id):
                        yield name, question
                heard.update(questions)
                await wakeup.sleep()

    async def answer(self, question: str, text: str) -> None:
        """Answer what an operator asks."""
        key, value = self.node.keys.answers(question) + self.node_id, pack_answer(text)
        put = self.node.ask_the_store(lambda store: store.put(key, value, ttl=ANSWER_TTL))
        await self._call(put, see_to_its_end=True)

    async def ban(self, node_id: str, reason: str = "", *, now: bool = False, lasts: float | None = None) -> None:
        """Keep a node out of the next rounds, and with `now` put it out of this one; it is told why.

        Args:
            node_id: Which node.
            reason: Shown to it, and to whoever asks.
            now: Out of this round, too; one that waits is put out at once in either case.
            lasts: Seconds, after which the ban ends by itself; None: it is kept with the run until it is lifted.
        """
        await self._call(self.node.ban(node_id, reason, now=now, lasts=lasts), see_to_its_end=True)

    async def ban_where(
        self, attribute: str, value: str, reason: str = "", *, now: bool = False, lasts: float | None = None
    ) -> tuple[str, ...]:
        """Keep all nodes out that have this attribute, also those that come later; return which of them are here."""
        ban = Ban(reason=reason, by=self.node_id, now=now, lasts=lasts)
        return await self._call(ban_where(self.node, attribute, value, ban), see_to_its_end=True)

    async def unban_where(self, attribute: str, value: str) -> None:
        """Let the nodes with this attribute come again, as far as they are not banned by their names."""
        await self._call(unban_where(self.node, attribute, value), see_to_its_end=True)

    async def unban(self, node_id: str) -> None:
        """Let a banned node come again."""
        await self._call(self.node.unban(node_id), see_to_its_end=True)

    async def status(self) -> RunStatus:
        """How the run stands in the store, with the reason in words."""
        return await self._call(self.node.status())

    async def status_and_history(self) -> tuple[RunStatus, History]:
        """How the run stands, and what is remembered of it, by one reading."""
        node = self.node
        return await self._call(node.ask_the_store(lambda store: read_run(store, node.keys, node.head)))

    async def ping(self) -> float:
        """Measure how long the store takes to answer, in seconds."""
        return await self._call(self.node.ask_the_store(lambda store: store.ping()))

    async def store_health(self) -> dict[str, Any]:
        """Return how the store is: `answers_in` seconds, and its figures."""
        figures = await self._call(self.node.ask_the_store(lambda store: store.stats()))
        return {"answers_in": await self.ping(), "figures": figures}

    async def history(self) -> list[Chapter]:
        """Return what is remembered of the run: its rounds, the oldest first; see `rdzv.core.history`."""
        return list((await self.whole_history()).chapters)

    async def whole_history(self) -> History:
        """Return the same, and the sums of what was before."""
        return await self._call(self.node.history())

    async def note_failure(self, why: str) -> None:
        """Say that a process of this node has failed by itself in this round; `ban_after` counts it."""
        await self._call(_note_failure(self.node, why[:WHY_LETTERS_MOST]), see_to_its_end=True)

    def leaves_because(self, why: str) -> None:
        """Say why this node leaves, before it does: the others read it in `rdzv status` and in the history."""
        self.node.part.leaves_because = why[:WHY_LETTERS_MOST]


async def accuse(node: Node, rank: int, why: str) -> None:
    """In the node's loop: say of a member of its round that it does not answer; see `Handler.accuse`."""
    link, membership = await node.connect(), node.membership
    over = f"node {node.node_id} is in no round of run {node.run_id} any more, and accuses nobody"
    if membership is None or membership.over is not None:
        raise RoundSupersededError(over)
    if not 0 <= rank < membership.round.size or rank == membership.rank:
        raise RendezvousStateError(
            f"rank {rank} cannot be accused by rank {membership.rank}: name another one from 0 to "
            f"{membership.round.size - 1}"
        )
    accused = (await node.roster(membership))[rank].node_id
    try:
        done = await put_accusation(link.store, node.keys, membership, by=node.node_id, accused=accused, why=why)
    except StoreError as error:
        raise node.connection_error(error) from error
    if not done:
        raise RoundSupersededError(over)


async def suspect(node: Node, why: str) -> None:
    """In the node's loop: see `Handler.suspect`. Where it cannot be said, the end of a lease says the same."""
    link, membership = await node.connect(), node.membership
    if membership is not None and membership.over is None:
        with contextlib.suppress(StoreError):
            await put_accusation(link.store, node.keys, membership, by=node.node_id, accused=SOMEBODY, why=why)


async def _note_failure(node: Node, why: str) -> None:
    rule, membership = node.part.agreed.rules.ban_after, node.membership
    if rule is not None and membership is not None:
        failed = {node.node_id: why}
        await node.ask_the_store(
            lambda store: note_failures(store, node.keys, rule, failed, round=membership.round.number)
        )


async def change_tally(node: Node, change: Callable[[bytes], bytes]) -> bytes:
    """In the node's loop: see `Handler.change_tally`."""
    link, membership = await node.connect(), node.membership
    if membership is None:
        raise RendezvousStateError(f"node {node.node_id} has been in no round of run {node.run_id}")
    try:
        return await link.change_tally(membership, change)
    except StoreError as error:
        raise node.connection_error(error) from error


def shared_store(node: Node, membership: Membership, client: ClientAtFirstUse | Store) -> SharedStore:
    """What the members of a round share, for one of them: fenced by the round, and by its own record."""
    round, keys = membership.round, node.keys
    return SharedStore(
        client,
        prefix=keys.shared(round.number, round.term),
        fence=(
            when.mod_revision(keys.round) == round.revision,
            when.mod_revision(keys.node(node.node_id)) == membership.arrival,
        ),
        lease=round.lease,
        superseded=lambda: membership.over,
        waiting=membership.beats.waiting,
        lost=(lambda: membership.lost_ids) if node.settings.waits_end_on_loss else nobody,
        company=Company(
            rank=membership.rank,
            roster_key=lambda rank: keys.roster(round.number, round.term, rank // BUCKET_SIZE),
            read_roster=_names_by_rank,
            absence=partial(absence_of, node),
        ),
    )


def _names_by_rank(roster: bytes) -> dict[int, str]:
    return {one.rank: one.node_id for one in unpack_roster(roster)}


def blocking_share(handler: Handler, membership: Membership) -> tuple[BlockingSharedStore, BlockingStore]:
    """What the members of a round share, for those who block, and the client that it is on; the caller's to close.

    Its waits end when a member is lost, and when the round is over for this node.
    """
    client = handler.open_blocking_store()

    def supersede(reason: str) -> None:
        # Who waits in the shared store waits on that socket: only breaking it gets them out.
        client.interrupt(ConnectionLost(reason, maybe_applied=False))

    membership.call_when_over(supersede)
    if handler.settings.waits_end_on_loss:
        membership.on_loss.append(lambda _: client.end_waits())
    return shared_store(handler.node, membership, handler.shared_client).blocking(client), client


def absence_of(node: Node, node_id: str) -> str:
    """What is known here of a node that is gone, in words; empty if nothing is. From any thread."""
    head = node.head
    try:
        now = asyncio.get_running_loop().time()
    except RuntimeError:
        now = time.monotonic()  # as event loops do
    missing = head.progress.absent.missing if head.progress is not None else ()
    return next((one.describe(elapsed=now - head.progress_at) for one in missing if one.node_id == node_id), "")


def _result_of(over: Call[T]) -> T:
    """What came of something in the node's loop.

    Raises:
        RendezvousStateError: That loop has ended, and cancelled it.
    """
    try:
        return over.result()
    except asyncio.CancelledError:
        raise RendezvousStateError("the thread in which nodes live has ended, with the process") from None
