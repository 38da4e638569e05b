"""The handler for async callers, which forwards calls to the node.

The node lives in its own event loop (`node.link.node_loop`), so a busy caller does not delay the node. If the caller of
a method is cancelled, natively or by anyio, the call still ends cleanly:

- `next_rendezvous` withdraws the node's arrival, and waits for that: at most two seconds, and not if cancelled again.
- Calls that write (`leave`, `drain`, ...) and `aclose` complete. A cancelled `aclose` waits until the node is closed.

The user's health check and the round's shared store run in the caller's loop. The shared store has its own client, so
that large values do not delay the node's keep-alives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import anyio

from rdzv.errors import RendezvousStateError
from rdzv.interface import RendezvousHandler
from rdzv.membership import Membership, RendezvousInfo
from rdzv.node.front import verbs
from rdzv.node.front.node_view import NodeView
from rdzv.node.front.queries import Changes
from rdzv.node.front.sharing import shared_store
from rdzv.node.link.node_loop import wait_for_result
from rdzv.node.link.wakeup import ThreadSafeWakeup
from rdzv.node.member.health import run_health_check_in_loop
from rdzv.node.node import JoinHandle, Node
from rdzv.shared_store.store import LazyClient
from store import ConnectionLost, StoreUsageError
from store.keeping import RELEASE_WITHIN
from store.net.tasks import require_loop

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from rdzv.core.questions import OperatorQuestion
    from rdzv.core.report import RunStatus
    from rdzv.shared_store.store import BlockingSharedStore
    from store import BlockingStore, Store
    from store.net.threads import Call

P = ParamSpec("P")
T = TypeVar("T")


def awaited_method(
    verb: Callable[Concatenate[Node, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Handler, P], Coroutine[Any, Any, T]]:
    """Make the async method of a verb (a call of a node): the method runs the verb in the node's loop."""

    @functools.wraps(verb)
    async def method(self: Handler, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.call(verb(self.node, *args, **kwargs), must_complete=verbs.is_shielded_verb(verb))

    return method


class Handler(NodeView, RendezvousHandler):
    """One node's part in a run's rendezvous; made by `rdzv.connect`."""

    def __init__(
        self,
        node: Node,
        *,
        # Both make clients of the round's shared store; `open_store` is called in the caller's loop.
        open_store: Callable[[], contextlib.AbstractAsyncContextManager[Store]],
        open_blocking_store: Callable[[], BlockingStore] | None = None,
    ) -> None:
        self.node: Node = node
        self._named = node
        self._loop = node.loop
        self.shared_client: LazyClient = LazyClient(open_store)
        self._open_blocking_store = open_blocking_store
        self._pid = os.getpid()

    async def __aenter__(self) -> Self:
        try:
            require_loop("rdzv")
        except StoreUsageError as error:
            raise RendezvousStateError(str(error)) from None
        try:
            await self.call(self.node.get_session())
        except BaseException:
            await self.aclose()  # the caller gets no handler to close
            raise
        return self

    async def aclose(self) -> None:
        """Leave the round, stop coordinating, and disconnect for good. May be called twice."""
        if self._pid != os.getpid():
            return  # the node belongs to the parent process
        try:
            closing = self.node.loop.spawn(self.node.aclose())
            withdrawn = self.node.loop.spawn(self.node.withdrawn.wait())
        except RendezvousStateError:
            return  # the handler is closed, and its node thread has ended
        closing.over.call_when_set(self.node.loop.stop_using)  # then leave the loop
        try:
            await self._close_shared_store(withdrawn, closing)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await self._close_shared_store(withdrawn, closing)  # a second cancel ends this wait, not the closing
            raise
        finally:
            await self.shared_client.aclose()
        wait_for_result(closing)

    async def _close_shared_store(self, withdrawn: Call[Literal[True]], closing: Call[None]) -> None:
        """Disconnect the shared store once the node has left its round, then wait until the node is closed.

        If the shared store disconnected before the node has left, its waiting callers would not learn that the round is
        over. If the shared store stayed connected, the closing of a hosted store would wait for it.
        """
        await withdrawn.until_over()
        await self.shared_client.aclose()
        await closing.until_over()

    async def call(self, work: Coroutine[Any, Any, T], *, must_complete: bool = False) -> T:
        """Run work in the node's loop and wait for it. A cancelled caller cancels the work, unless `must_complete`."""
        call = self.spawn(work)
        try:
            await call.until_over()
        except BaseException:
            if not must_complete:
                call.cancel()
            raise
        return wait_for_result(call)

    def open_blocking_store(self) -> BlockingStore:
        """Return a new blocking client of the same store; the caller closes it."""
        if self._open_blocking_store is None:
            raise RendezvousStateError(f"run {self.run_id}: this handler was made without a blocking client")
        return self._open_blocking_store()

    def open_blocking_shared_store(self) -> tuple[BlockingSharedStore, BlockingStore]:
        """Return the round's shared store for blocking callers, and its client, which the caller closes."""
        membership, client = self.membership, self.open_blocking_store()
        assert membership is not None, "the node is in a round"

        # A wait in the shared store blocks on the client's socket: interrupt the client when the round is over.
        membership.call_when_over(lambda reason: client.interrupt(ConnectionLost(reason, maybe_applied=False)))
        if self.settings.waits_end_on_loss:
            membership.call_on_member_loss(lambda _: client.end_waits())
        return shared_store(self.node, membership, self.shared_client).blocking(client), client

    async def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if any, and return once this node is a member of the next.

        Raises:
            RendezvousClosedError: The run is closed.
            RendezvousTimeoutError: No round within `join_timeout`.
            RendezvousSettingsError: The run was started with other settings, or this handler without `min_nodes`.
            RendezvousGracefulExitError: This node was a spare, and the run is closed; or this node is drained.
            RendezvousConnectionError: The store cannot be reached.
            RendezvousRefusedError: This node is banned, or failed its health check.
            RendezvousStateError: Another call of this handler is joining already.
        """
        ticket = JoinHandle()
        self.node.close_when_loop_closes(asyncio.get_running_loop())
        joining = self.spawn(self.node.next_rendezvous(ticket, self._make_health_check()))
        try:
            await joining.until_over()
            return self._make_info(wait_for_result(joining))
        except asyncio.CancelledError:
            undoing = self.node.loop.spawn(self.node.undo_join(ticket))
            with anyio.move_on_after(RELEASE_WITHIN, shield=True):  # after that, undoing goes on in the node's loop
                await undoing.until_over()
            raise

    def _make_health_check(self) -> Callable[[], Awaitable[str | None]] | None:
        check, here = self.settings.health_check, asyncio.get_running_loop()
        return None if check is None else functools.partial(run_health_check_in_loop, here, check)

    def _make_info(self, membership: Membership) -> RendezvousInfo:
        self.shared_client.expect_store(membership.store_id)
        shared = shared_store(self.node, membership, self.shared_client)
        here = asyncio.get_running_loop()

        def call_in_callers_loop(call: Callable[..., None], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed, and has no call to end
                here.call_soon_threadsafe(call, *arguments)

        read_round_members = functools.partial(self._roster, membership)
        info = RendezvousInfo.of(membership, self.run_id, store=shared, _read_roster=read_round_members)
        membership.call_when_over(functools.partial(call_in_callers_loop, shared.end_calls))
        if self.settings.waits_end_on_loss:  # end the present waits; later waits check for losses
            membership.call_on_member_loss(lambda _: call_in_callers_loop(shared.end_waits))
        return info

    def changes(self) -> Changes:
        """Return the round's changes as they happen: `async with handler.changes() as changes`; see `Changes`."""
        return Changes(self.node, lambda: self.call(self.node.get_session()))

    async def statuses(self) -> AsyncGenerator[RunStatus, None]:
        """Yield the run's status now, and after each change, until the run is closed."""
        wakeup = ThreadSafeWakeup()
        with self.node.listeners.subscribed(wakeup):
            while True:
                status = await self.status()
                yield status
                if status.closed is not None:
                    return
                await wakeup.sleep_until(None)

    async def questions(self) -> AsyncGenerator[tuple[str, OperatorQuestion], None]:
        """Yield each question of an operator to this node, with its name, which `answer_operator` takes."""
        wakeup, heard = ThreadSafeWakeup(), set[str]()
        with self.node.listeners.subscribed(wakeup):
            while True:
                self.check_usable()
                questions = self.node.head.questions
                heard &= questions.keys()
                for name, question in questions.items():
                    if name not in heard and question.node_id == self.node_id:
                        yield name, question
                heard.update(questions)
                await wakeup.sleep_until(None)

    leave = awaited_method(verbs.leave)
    num_nodes_waiting = awaited_method(verbs.num_nodes_waiting)
    is_closed = awaited_method(verbs.is_closed)
    set_closed = awaited_method(verbs.set_closed)
    give_up = awaited_method(verbs.give_up)
    drain = awaited_method(verbs.drain)
    resize = awaited_method(verbs.resize)
    keep = awaited_method(verbs.keep)
    restore = awaited_method(verbs.restore)
    accuse = awaited_method(verbs.accuse)
    all_here = awaited_method(verbs.all_here)
    change_counts = awaited_method(verbs.change_counts)
    store_host = awaited_method(verbs.store_host)
    ban = awaited_method(verbs.ban)
    unban = awaited_method(verbs.unban)
    answer_operator = awaited_method(verbs.answer_operator)
    status = awaited_method(verbs.status)
    status_and_cost = awaited_method(verbs.status_and_cost)
    history = awaited_method(verbs.history)
    ping = awaited_method(verbs.ping)
    _roster = awaited_method(verbs.roster)
