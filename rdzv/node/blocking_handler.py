"""The handler for blocking callers, which forwards calls to the node.

Each call runs in the process's node thread (`node.link.node_loop`), while the caller waits. Ctrl-C,
or a signal handler that raises, ends the caller's wait at once; the node thread still completes or undoes the call. An
interrupted `next_rendezvous` withdraws the node's arrival; the next call waits for the withdrawal. A third-party
backend's handler is async, and runs in the node thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

import anyio

from rdzv.core.state import Change
from rdzv.errors import RendezvousStateError
from rdzv.interface import BlockingRendezvousHandler as RendezvousHandler
from rdzv.membership import BlockingRendezvousInfo as RendezvousInfo
from rdzv.membership import Membership
from rdzv.node.front import verbs
from rdzv.node.front.node_view import NodeView
from rdzv.node.handler import Handler as AsyncHandler
from rdzv.node.link.node_loop import wait_for_result
from rdzv.node.member.health import run_health_check
from rdzv.node.node import JoinHandle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

    from rdzv.core.report import RunStatus
    from rdzv.interface import RendezvousHandler as AsyncRendezvousHandler
    from rdzv.node.link.node_loop import NodeLoop
    from rdzv.node.node import Node
    from store import BlockingStore
    from store.net.threads import Call

P = ParamSpec("P")
T = TypeVar("T")


def blocking_method(
    verb: Callable[Concatenate[Node, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Handler, P], T]:
    """Make a blocking method that runs `verb`, or a third-party handler's method of that name, in the node's loop."""

    @functools.wraps(verb)
    def method(self: Handler, /, *args: P.args, **kwargs: P.kwargs) -> T:
        node = self.node
        call = self._get_backend_method(verb.__name__) if node is None else functools.partial(verb, node)
        done: T = self.call(call(*args, **kwargs), must_complete=verbs.is_shielded_verb(verb))
        return done

    return method


class Handler(NodeView, RendezvousHandler):
    """One node's part in a run's rendezvous, for blocking callers; made by `rdzv.sync.connect`."""

    def __init__(self, inner: AsyncRendezvousHandler, loop: NodeLoop) -> None:
        self._inner = self._named = inner
        self.node: Node | None = inner.node if isinstance(inner, AsyncHandler) else None
        self._loop = loop
        self._shared_client: BlockingStore | None = None  # the client of the last round's shared store
        self._pid = os.getpid()

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; see the async handler."""
        node = self.node
        if node is None:  # a third-party backend
            return cast("RendezvousInfo", self.call(self._inner.next_rendezvous()))
        ticket = JoinHandle()
        joining: Call[Membership] | None = None
        try:
            joining = self.spawn(node.next_rendezvous(ticket, self._make_health_check(node)))
            return self._make_info(wait_for_result(joining))
        except BaseException:
            # `undo_join` undoes a call that a signal handler may have interrupted. A failed call has undone its work.
            if joining is None or not joining.has_failed:
                try:
                    self._abandon_join(node, ticket)
                except BaseException:
                    self._abandon_join(node, ticket)  # a second Ctrl-C may have interrupted the first `_abandon_join`
                    raise
            raise

    def _abandon_join(self, node: Node, ticket: JoinHandle) -> None:
        with contextlib.suppress(RendezvousStateError):
            self.spawn(node.undo_join(ticket))

    def _make_health_check(self, node: Node) -> Callable[[], Awaitable[str | None]] | None:
        check = node.settings.health_check
        if check is None:
            return None
        return lambda: self._loop.run_in_new_thread(lambda: asyncio.run(run_health_check(check)))

    def _make_info(self, membership: Membership) -> RendezvousInfo:
        assert isinstance(self._inner, AsyncHandler)
        if self._shared_client is not None:
            self._shared_client.close()
        shared, self._shared_client = self._inner.open_blocking_shared_store()
        read_round_members = functools.partial(self._roster, membership)
        return RendezvousInfo.of(membership, self.run_id, store=shared, _read_roster=read_round_members)

    def usable_node(self, name: str) -> Node:
        """Return the node; raise in a forked child, after closing, or if a third-party backend has no node."""
        self.check_usable()
        if self.node is None:
            raise RendezvousStateError(f"the backend of run {self.run_id} does not offer {name}")
        return self.node

    def _get_backend_method(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name, None)
        if method is None:
            raise RendezvousStateError(f"the backend of run {self.run_id} does not offer {name}")
        return cast("Callable[..., Any]", method)

    def changes(self) -> BlockingChanges:
        """Return the round's changes as they happen; see the async handler's `changes`."""
        changes = self._inner.changes if isinstance(self._inner, AsyncHandler) else self._get_backend_method("changes")
        return BlockingChanges(changes(), self.call)

    def statuses(self) -> Iterator[RunStatus]:
        """Yield the run's status now, and after each change, until the run is closed."""
        with BlockingStream(contextlib.aclosing(self._get_backend_method("statuses")()), self.call) as statuses:
            yield from statuses

    def connect(self) -> None:
        """Connect to the store, as `with rdzv.sync.connect(...)` does."""
        node = self.node
        self.call(cast("Coroutine[Any, Any, object]", self._inner.__aenter__() if node is None else node.get_session()))

    def close(self) -> None:
        """Leave the round, stop coordinating, and disconnect for good. May be called twice."""
        if self._pid != os.getpid():
            return  # the node belongs to the parent process
        client, self._shared_client = self._shared_client, None
        if client is not None:
            client.close()
        try:
            closing = self._spawn_close()
        except RendezvousStateError:
            return  # closed before
        except BaseException:
            self._spawn_close()  # a signal handler may have raised before the closing began
            raise
        wait_for_result(closing)

    def _spawn_close(self) -> Call[None]:
        closing = self._loop.spawn((self.node or self._inner).aclose())
        closing.over.call_when_set(self._loop.stop_using)
        return closing

    def call(self, work: Awaitable[T], *, must_complete: bool = False) -> T:
        """Run work in the node's loop and wait for it. An interrupt cancels the work, unless `must_complete`."""
        call = self.spawn(cast("Coroutine[Any, Any, T]", work))
        try:
            return wait_for_result(call)
        except BaseException:
            if not must_complete:
                call.cancel()
            raise

    leave = blocking_method(verbs.leave)
    num_nodes_waiting = blocking_method(verbs.num_nodes_waiting)
    is_closed = blocking_method(verbs.is_closed)
    set_closed = blocking_method(verbs.set_closed)
    give_up = blocking_method(verbs.give_up)
    drain = blocking_method(verbs.drain)
    resize = blocking_method(verbs.resize)
    keep = blocking_method(verbs.keep)
    restore = blocking_method(verbs.restore)
    accuse = blocking_method(verbs.accuse)
    all_here = blocking_method(verbs.all_here)
    change_counts = blocking_method(verbs.change_counts)
    store_host = blocking_method(verbs.store_host)
    ban = blocking_method(verbs.ban)
    unban = blocking_method(verbs.unban)
    answer_operator = blocking_method(verbs.answer_operator)
    status = blocking_method(verbs.status)
    status_and_cost = blocking_method(verbs.status_and_cost)
    history = blocking_method(verbs.history)
    ping = blocking_method(verbs.ping)
    _roster = blocking_method(verbs.roster)


class BlockingStream(Generic[T]):
    """The items of an async iterator, read in the node's loop; for one thread at a time."""

    def __init__(
        self, opened: contextlib.AbstractAsyncContextManager[AsyncIterator[T]], call: Callable[[Awaitable[Any]], Any]
    ) -> None:
        self._opened = opened
        self._call = call
        self._stream: AsyncIterator[T] | None = None
        self._turn = asyncio.Lock()  # held during reads and closing, in the node's loop
        self._reading: anyio.CancelScope | None = None
        self._taken: list[T] = []  # items that `poll` read but has not returned

    def __enter__(self) -> Self:
        self._stream = self._call(self._opened.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._stream = None

        async def close_stream() -> None:
            if self._reading is not None:
                self._reading.cancel()  # ends the iteration of another thread
            async with self._turn:
                await self._opened.__aexit__(None, None, None)

        with contextlib.suppress(RendezvousStateError):  # the handler is closed
            self._call(close_stream())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        item = self.poll(math.inf)
        if item is None:
            raise StopIteration
        return item

    def poll(self, timeout: float) -> T | None:
        """Return the next item; None if none came within `timeout` seconds, or none will come."""
        stream = self._stream
        if stream is None:
            raise RendezvousStateError("changes are read in `with handler.changes() as changes:`")

        async def take_item() -> None:
            async with self._turn:
                with anyio.move_on_after(timeout) as self._reading, contextlib.suppress(StopAsyncIteration):
                    self._taken.append(await anext(stream))

        if not self._taken:
            self._call(take_item())
        item = self._taken[0] if self._taken else None
        del self._taken[:1]  # delete last: a signal handler that raises before must not lose the item
        return item


class BlockingChanges(BlockingStream[Change]):
    """The changes of a round as they happen; see `rdzv.Changes`."""
