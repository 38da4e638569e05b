"""Shell: the same handler for blocking callers: a front of its node, which forwards, and never decides.

The node lives in the process's node thread (`node.loops`), as that of an async caller does, and each call here waits
for the answer of the same call there. A call is safe from any thread. Ctrl-C, or a signal handler that raises, gets out
of it at once; what it has begun is seen to its end in the node's thread: a call of `next_rendezvous` is undone, which
takes the node's arrival back, and the next call waits for that. Between calls the caller may compute for as long as it
likes.

The shared store alone does not go through that thread: its calls have a socket of their own, one round trip each.

A backend of somebody else's, which is an async handler, runs in a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, cast

import anyio

from rdzv.errors import RendezvousStateError
from rdzv.interface import BlockingRendezvousHandler as RendezvousHandler
from rdzv.membership import BlockingRendezvousInfo as RendezvousInfo
from rdzv.membership import Membership
from rdzv.node.front import verbs
from rdzv.node.front.known import Known
from rdzv.node.handler import Handler as AsyncHandler
from rdzv.node.link.loops import check_process, result_of
from rdzv.node.member.health import examine
from rdzv.node.node import Ticket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from rdzv.core.state import Change
    from rdzv.interface import RendezvousHandler as AsyncRendezvousHandler
    from rdzv.node.link.loops import NodeLoop
    from rdzv.node.node import Node
    from store import BlockingStore
    from store.net.threads import Call

__all__ = ["BlockingChanges", "Handler"]

P = ParamSpec("P")
T = TypeVar("T")


def blocking(verb: Callable[Concatenate[Node, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Handler, P], T]:
    """Make of a verb the method of the blocking handler: it begins it in the node's loop, and waits for it.

    What somebody else's backend has under the same name is called likewise.
    """

    @functools.wraps(verb)
    def method(self: Handler, /, *args: P.args, **kwargs: P.kwargs) -> T:
        node = self.node
        call = self._elsewhere(verb.__name__) if node is None else functools.partial(verb, node)
        done: T = self.call(call(*args, **kwargs), see_to_its_end=verbs.must_end(verb))
        return done

    return method


def at_once(verb: Callable[Concatenate[Node, P], T]) -> Callable[Concatenate[Handler, P], T]:
    """Make a method of a verb that is answered from any thread."""

    @functools.wraps(verb)
    def method(self: Handler, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return verb(self.node_here(verb.__name__), *args, **kwargs)

    return method


class Handler(Known, RendezvousHandler):
    """One node's part in the rendezvous of a run, for blocking callers; made by `rdzv.sync.connect`.

    Args:
        inner: The async handler of the same node. If it is ours, its node is called directly; else it is called in
            `loop`.
        loop: Where it lives.
    """

    def __init__(self, inner: AsyncRendezvousHandler, loop: NodeLoop) -> None:
        self._inner = inner
        self._loop = loop
        self._shared_client: BlockingStore | None = None  # of the current round
        self._pid = os.getpid()

    @property
    def node(self) -> Node | None:
        """Our own node; None if the backend is somebody else's."""
        return self._inner.node if isinstance(self._inner, AsyncHandler) else None

    @property
    def own_node(self) -> Node:
        """The node; of one that is closed, too."""
        if self.node is None:
            raise RendezvousStateError(f"the backend of run {self.run_id} is not one of ours")
        return self.node

    @property
    def run_id(self) -> str:
        """Which run this is."""
        return self._inner.run_id

    @property
    def node_id(self) -> str:
        """What this node is called in the run."""
        return self._inner.node_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if in one, and return once this node is a member of the next; see the async twin."""
        node = self.node
        if node is None:  # what somebody else's backend gives is what its user gets
            return cast("RendezvousInfo", self.call(self._inner.next_rendezvous()))
        ticket = Ticket()
        joining: Call[Membership] | None = None
        try:
            joining = self.start(node.next_rendezvous(ticket, self._health_check(node)))
            return self._info(_wait_for(joining))
        except BaseException:
            # A signal handler may raise anything, anywhere in here: before the call has come to the node, while it is
            # under way, and when its answer has just come. The node knows which. What failed has undone itself.
            if joining is None or not joining.has_failed:
                try:
                    self._abandon(node, ticket)
                except BaseException:
                    self._abandon(node, ticket)  # a second Ctrl-C came just then; to be undone twice does no harm
                    raise
            raise

    def _abandon(self, node: Node, ticket: Ticket) -> None:
        with contextlib.suppress(RendezvousStateError):
            self.start(node.abandon(ticket))

    def _health_check(self, node: Node) -> Callable[[], Awaitable[str | None]] | None:
        """The user's health check, apart from the node's loop; this thread waits for it."""
        check = node.settings.health_check
        if check is None:
            return None
        return lambda: self._loop.apart(lambda: asyncio.run(examine(check)))

    def _info(self, membership: Membership) -> RendezvousInfo:
        """What the caller gets of a round, with a shared store on a socket of its own."""
        assert isinstance(self._inner, AsyncHandler)
        if self._shared_client is not None:
            self._shared_client.close()
        shared, self._shared_client = self._inner.share()
        round = membership.round
        return RendezvousInfo(
            run_id=self.run_id,
            round=round.number,
            node_id=self.node_id,
            rank=membership.rank,
            world_size=round.size,
            store=shared,
            bootstrap_address=(round.host, round.port),
            _read_roster=lambda: self._roster(membership),
        )

    def node_here(self, name: str) -> Node:
        """Our own node, which has this; it is of this process, and not closed."""
        self.check_usable()
        if self.node is None:
            raise RendezvousStateError(f"the backend of run {self.run_id} does not offer {name}")
        return self.node

    def _elsewhere(self, name: str) -> Callable[..., Any]:
        """A verb of somebody else's backend, which need not have it."""
        method = getattr(self._inner, name, None)
        if method is None:
            raise RendezvousStateError(f"the backend of run {self.run_id} does not offer {name}")
        found: Callable[..., Any] = method
        return found

    def changes(self) -> BlockingChanges:
        """What happens to the round, as it happens, beginning with what already holds; see the async twin.

        `with handler.changes() as changes: for change in changes`; or `changes.poll(seconds)`, which gives one or None.
        """
        changes = self._inner.changes if isinstance(self._inner, AsyncHandler) else self._elsewhere("changes")
        return BlockingChanges(changes(), self.call)

    def connect(self) -> None:
        """Connect, as entering the context does."""
        node = self.node
        self.call(cast("Coroutine[Any, Any, object]", self._inner.__aenter__() if node is None else node.connect()))

    def close(self) -> None:
        """Leave for good: the round, the run's coordination, and the store. May be called twice."""
        if self._pid != os.getpid():
            return  # a forked child has nothing here to let go of
        client, self._shared_client = self._shared_client, None
        if client is not None:
            client.close()
        try:
            closing = self._begin_to_close()
        except RendezvousStateError:
            return  # it was closed before, and its thread has ended
        except BaseException:
            self._begin_to_close()  # a signal's handler has raised just then; to be closed twice does no harm
            raise
        _wait_for(closing)

    def _begin_to_close(self) -> Call[None]:
        closing = self._loop.start((self.node or self._inner).aclose())
        closing.over.call(self._loop.leave)  # not before: what is begun there is to end there
        return closing

    def call(self, work: Awaitable[T], *, see_to_its_end: bool = False) -> T:
        """Have the node do something, and wait for it; who gets out of here by force does not wait for its end."""
        call = self.start(cast("Coroutine[Any, Any, T]", work))
        try:
            return _wait_for(call)
        except BaseException:
            if not see_to_its_end:
                call.cancel()  # which does nothing to what is over
            raise

    def check_usable(self) -> None:
        """Refuse to go on; see the async twin."""
        check_process(self._pid, self.run_id)
        if isinstance(self._inner, AsyncHandler):
            self._inner.check_usable()

    leave = blocking(verbs.leave)
    num_nodes_waiting = blocking(verbs.num_nodes_waiting)
    num_nodes_changed = at_once(verbs.num_nodes_changed)
    leaves_because = at_once(verbs.leaves_because)
    is_closed = blocking(verbs.is_closed)
    set_closed = blocking(verbs.set_closed)
    give_up = blocking(verbs.give_up)
    drain = blocking(verbs.drain)
    resize = blocking(verbs.resize)
    keep = blocking(verbs.keep)
    restore = blocking(verbs.restore)
    accuse = blocking(verbs.accuse)
    all_here = blocking(verbs.all_here)
    change_tally = blocking(verbs.change_tally)
    ban = blocking(verbs.ban)
    ban_where = blocking(verbs.ban_where)
    unban = blocking(verbs.unban)
    unban_where = blocking(verbs.unban_where)
    answer = blocking(verbs.answer)
    status = blocking(verbs.status)
    account = blocking(verbs.account)
    history = blocking(verbs.history)
    ping = blocking(verbs.ping)
    _roster = blocking(verbs.roster)


class BlockingChanges:
    """The changes of an async handler, which are asked for in its loop; for one thread at a time."""

    def __init__(
        self,
        changes: contextlib.AbstractAsyncContextManager[AsyncIterator[Change]],
        call: Callable[[Awaitable[Any]], Any],
    ) -> None:
        self._changes = changes
        self._call = call
        self._stream: AsyncIterator[Change] | None = None

    def __enter__(self) -> Self:
        self._stream = self._call(self._changes.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RendezvousStateError):  # the handler is closed: nobody listens any more
            self._call(self._changes.__aexit__(None, None, None))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        change = self.poll(math.inf)
        if change is None:
            raise StopIteration
        return change

    def poll(self, timeout: float) -> Change | None:
        """The next change, or None if none has come within so many seconds, or none will."""
        stream = self._stream
        assert stream is not None, "changes are entered first: with handler.changes() as changes"

        async def next_one() -> Change | None:
            with anyio.move_on_after(timeout):
                return await anext(stream, None)
            return None

        change: Change | None = self._call(next_one())
        return change


def _wait_for(call: Call[T]) -> T:
    call.over.wait(None)
    return result_of(call)
