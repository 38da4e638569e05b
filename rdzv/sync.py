"""Façade: the rendezvous for blocking callers.

    with rdzv.sync.connect("tcp://head:29400/job-7?min_nodes=2") as handler:
        store, rank, world_size = handler.next_rendezvous()

The classes are in `rdzv.node.blocking_handler` and `rdzv.loop.blocking`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, SupportsIndex, Unpack

from rdzv.backends import builtin
from rdzv.errors import RendezvousStateError
from rdzv.interface import BlockingRendezvousHandler as RendezvousHandler
from rdzv.loop.blocking import Round, iterate_rounds
from rdzv.loop.member import LoopOptions
from rdzv.membership import BlockingRendezvousInfo as RendezvousInfo
from rdzv.node.blocking_handler import BlockingChanges as Changes
from rdzv.node.blocking_handler import Handler
from rdzv.node.handler import Handler as AsyncHandler
from rdzv.node.link.node_loop import NodeThread
from rdzv.shared_store.store import BlockingSharedStore as SharedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rdzv.config.overrides import Overrides
    from rdzv.loop.member import OnWaiting

__all__ = ["Changes", "Handler", "RendezvousHandler", "RendezvousInfo", "Round", "SharedStore", "connect", "rounds"]


def connect(url: str, **overrides: Unpack[Overrides]) -> contextlib.AbstractContextManager[Handler]:
    """Take part in a run's rendezvous during the context; the blocking twin of `rdzv.connect`."""
    return _SyncConnectContext(url, overrides)


class _SyncConnectContext(contextlib.AbstractContextManager[Handler]):
    """The context of `connect`. It is no generator, which Python would close when collecting it.

    In a forked child, or at the end of a process that never left the context, closing would wait for a thread that no
    longer runs.
    """

    def __init__(self, url: str, overrides: Overrides) -> None:
        self._url = url
        self._overrides = overrides
        self._handler: Handler | None = None
        self._used = False

    def __enter__(self) -> Handler:
        if self._used:
            raise RendezvousStateError("rdzv.sync.connect(...) is entered once; call it again for another node")
        self._used = True
        inner = builtin.handler_for_url(self._url, self._overrides, blocking=True)
        handler = Handler(inner, inner.node.loop if isinstance(inner, AsyncHandler) else NodeThread())
        try:
            handler.connect()
        except BaseException:
            handler.close()
            raise
        self._handler = handler
        return handler

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            self._handler.close()


def rounds(
    url: str,
    *,
    on_waiting: OnWaiting = "now",
    progress: Callable[[], SupportsIndex] | None = None,
    no_progress: int = 0,
    **overrides: Unpack[Overrides],
) -> Iterator[Round]:
    """Take part in a run, round after round, until it is closed; arguments and errors are those of `rdzv.rounds`."""
    options = LoopOptions(on_waiting=on_waiting, progress=progress, no_progress=no_progress)
    return iterate_rounds(Round, connect(url, **overrides), options)
