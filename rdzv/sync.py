"""Shell: the same handler for blocking callers: forwards, never decides.

    with rdzv.sync.connect("tcp://head:29400/job-7?min_nodes=2") as handler:
        store, rank, world_size = handler.next_rendezvous()

The async handler runs in a thread with an event loop of its own (an anyio portal), and each call here waits for the
answer of the same call there. A call is safe from any thread. Ctrl-C, or a signal handler that raises, gets out of it
at once; the call there is cancelled, which takes the node's arrival back. Between calls the caller may compute for as
long as it likes: the keeper thread keeps its lease, and the portal's loop goes on following the run.

The shared store alone does not go through the portal: its calls have a socket of their own, one round trip each.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from rdzv.backends import builtin
from rdzv.errors import RendezvousStateError
from rdzv.interface import BlockingRendezvousHandler as RendezvousHandler
from rdzv.membership import BlockingRendezvousInfo as RendezvousInfo
from rdzv.node.handler import Handler as AsyncHandler
from rdzv.node.round_barrier import all_here
from rdzv.shared_store.store import BlockingSharedStore as SharedStore
from store import ConnectionLost
from store.net.threads import PortalThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import TracebackType

    from anyio.from_thread import BlockingPortal

    from rdzv import membership
    from rdzv.config.overrides import Overrides
    from rdzv.core.history import Chapter
    from rdzv.core.state import Change, RunStatus
    from rdzv.interface import RendezvousHandler as AsyncRendezvousHandler
    from store import BlockingStore

__all__ = ["Handler", "RendezvousHandler", "RendezvousInfo", "SharedStore", "connect"]

T = TypeVar("T")

TAKEN_BACK_WITHIN = 10.0  # seconds for which a call waits for an interrupted one to be undone; that is itself bounded


class Handler(RendezvousHandler):
    """One node's part in the rendezvous of a run, for blocking callers; made by `rdzv.sync.connect`."""

    def __init__(self, inner: AsyncRendezvousHandler, portal: BlockingPortal) -> None:
        self._inner = inner
        self._portal = portal
        self._info: membership.RendezvousInfo | None = None  # of the current round
        self._shared_client: BlockingStore | None = None  # of the same
        self._undone = threading.Event()  # clear while an interrupted call is being taken back, in the portal's loop
        self._undone.set()
        self._pid = os.getpid()

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
        self._undone.wait(TAKEN_BACK_WITHIN)
        self._info = None
        info = self._call(self._inner.next_rendezvous)
        if not isinstance(self._inner, AsyncHandler):
            return cast("RendezvousInfo", info)  # somebody else's backend: what it gives is what its user gets
        return self._blocking(info, self._inner)

    def _blocking(self, info: membership.RendezvousInfo, inner: AsyncHandler) -> RendezvousInfo:
        """The same information, with a shared store on a socket of this caller's own."""
        if self._shared_client is not None:
            self._shared_client.close()
        self._info = info
        client = self._shared_client = inner.open_blocking_store()
        # Who waits in the shared store waits on that socket: only breaking it gets them out.
        info.on_superseded(lambda reason: client.interrupt(ConnectionLost(reason, maybe_applied=False)))
        return RendezvousInfo(
            run_id=info.run_id,
            round=info.round,
            node_id=info.node_id,
            rank=info.rank,
            world_size=info.world_size,
            store=info.store.blocking(client),
            bootstrap_address=info.bootstrap_address,
            _read_roster=lambda: self._call(info.participants),
        )

    def all_here(self, *, timeout: float) -> bool:
        """Wait until every member of this round has called this; False if one has gone first (`node.round_barrier`)."""
        inner, info = self._inner, self._info
        if info is None or not isinstance(inner, AsyncHandler):
            return True
        return self._call(lambda: all_here(inner, info, timeout=timeout))

    def num_nodes_waiting(self) -> int:
        """How many arrivals a regroup now would admit."""
        return self._call(self._inner.num_nodes_waiting)

    def num_nodes_changed(self, *, on_loss: bool = True) -> int:
        """How many nodes wait to come in, or have gone, as far as was pushed; at once. See the async twin."""
        if not isinstance(self._inner, AsyncHandler):
            return self.num_nodes_waiting()
        self._check_usable()
        return self._inner.num_nodes_changed(on_loss=on_loss)

    def is_closed(self) -> bool:
        """Whether the run is closed; `RendezvousConnectionError` if nobody knows."""
        return self._call(self._inner.is_closed)

    def set_closed(self, reason: str = "") -> None:
        """Close the run for every node, for good; the first reason given is the one that is shown."""
        self._call(self._inner.set_closed, reason)

    def status(self) -> RunStatus:
        """How the run stands in the store, with the reason in words."""
        return self._call(self._inner.status)

    def history(self) -> list[Chapter]:
        """What happened in the run, as far as it is remembered; see the async twin."""
        if not isinstance(self._inner, AsyncHandler):
            raise RendezvousStateError(f"the backend of run {self.run_id} keeps no history")
        return self._call(self._inner.history)

    def leave(self) -> None:
        """Leave this round; the node may come again."""
        self._undone.wait(TAKEN_BACK_WITHIN)
        self._call(self._inner.leave)

    def ban(self, node_id: str, reason: str = "", *, now: bool = False) -> None:
        """Keep a node out of the next rounds, and with `now` put it out of this one."""
        self._call(lambda: self._inner.ban(node_id, reason, now=now))

    def unban(self, node_id: str) -> None:
        """Let a banned node come again."""
        self._call(self._inner.unban, node_id)

    @contextlib.contextmanager
    def changes(self) -> Iterator[Iterator[Change]]:
        """What happens to the round, as it happens, beginning with what already holds; see the async twin."""
        self._check_usable()
        with self._portal.wrap_async_context_manager(self._inner.changes()) as stream:
            yield self._each(stream)

    def _each(self, stream: AsyncIterator[Change]) -> Iterator[Change]:
        while True:
            try:
                yield self._call(stream.__anext__)
            except StopAsyncIteration:
                return

    def close(self) -> None:
        """Let go of the shared store's socket; the rest ends with the context that `connect` opened."""
        client, self._shared_client = self._shared_client, None
        if client is not None:
            client.close()

    def _call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Await something in the portal's loop; getting out of here by force cancels it there."""
        self._check_usable()
        undone = threading.Event()

        async def work() -> T:
            try:
                return await function(*arguments)
            finally:
                undone.set()

        future = None
        try:
            future = self._portal.start_task_soon(work)
            return future.result()
        except BaseException:
            if future is not None and not future.done():
                self._undone = undone
                future.cancel()
            raise

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise RendezvousStateError(
                f"this handler of run {self.run_id} was made before fork(); make a new one in the child"
            )


def connect(url: str, **overrides: Unpack[Overrides]) -> contextlib.AbstractContextManager[Handler]:
    """Take part in the rendezvous of a run for as long as the context lasts; the blocking twin of `rdzv.connect`."""
    return _Connection(url, overrides)


class _Connection(contextlib.AbstractContextManager[Handler]):
    """A handler, the thread in which it lives, and the end of both.

    No generator, for the reasons of `PortalThread`; and a forked child leaves it without a word, too.
    """

    def __init__(self, url: str, overrides: Overrides) -> None:
        self._url = url
        self._overrides = overrides
        self._opened = contextlib.ExitStack()
        self._pid = os.getpid()

    def __enter__(self) -> Handler:
        with contextlib.ExitStack() as opened:
            portal = opened.enter_context(PortalThread("rdzv"))
            connecting = portal.wrap_async_context_manager(builtin.connect(self._url, **self._overrides))
            handler = opened.enter_context(Handler(opened.enter_context(connecting), portal))
            self._opened = opened.pop_all()
        return handler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        if self._pid != os.getpid():
            return False
        return bool(self._opened.__exit__(kind, error, trace))
