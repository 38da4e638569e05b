"""Shell: tells whether a run's store is gone for good: it was in memory only, and its process is not there any more.

A store with a data directory comes back with all it had, so it is worth waiting for. One in memory comes back empty if
at all: the run begins anew in it. Whoever starts such a store again does so at once, so a few seconds are enough.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, Self

from rdzv.errors import RendezvousConnectionError, RendezvousError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from rdzv import sync
    from rdzv.config.settings import Settings

__all__ = ["MemoryStore"]

log: logging.Logger = logging.getLogger("rdzv.torch")

COMES_BACK_WITHIN: Final = 2.0
"""In seconds: how long a process that is gone may take to be replaced by one that listens."""

LOOK_EVERY: Final = 0.2
"""In seconds."""


class MemoryStore:
    """A store that ends with its process."""

    def __init__(self, settings: Settings) -> None:
        self._run_id = settings.run_id
        self._name = settings.endpoint.url
        ((self._host, self._port),) = settings.endpoint.hosts

    @classmethod
    def of(cls, settings: Settings, stats: Mapping[str, Any]) -> Self | None:
        """The store that has given these `stats` after something was written to it; None if it keeps what it has."""
        if settings.endpoint.info.family != "tcp" or stats.get("commits", 1):
            return None
        return cls(settings)

    @contextlib.contextmanager
    def watched(self, handler: sync.Handler) -> Iterator[list[RendezvousConnectionError]]:
        """End whatever the block waits for once the process is gone; what is yielded then has the reason."""
        gone: list[RendezvousConnectionError] = []
        done = threading.Event()
        watching = threading.Thread(
            target=self._watch, args=(handler, done, gone), name="rdzv memory store", daemon=True
        )
        watching.start()
        try:
            yield gone
        finally:
            done.set()
            watching.join(COMES_BACK_WITHIN)

    def _watch(self, handler: sync.Handler, done: threading.Event, gone: list[RendezvousConnectionError]) -> None:
        node = handler.node
        while node is not None and not done.is_set():
            if not node.in_reach:
                try:
                    self.raise_if_gone(done)
                except RendezvousConnectionError as error:
                    gone.append(error)
                    with contextlib.suppress(RuntimeError, RendezvousError):  # it has been closed meanwhile
                        node.loop.start(node.give_up_store(str(error)))
                    return
            done.wait(LOOK_EVERY)

    def raise_if_gone(self, done: threading.Event) -> None:
        """Return at once if somebody listens; else wait for a moment, and say for what.

        Args:
            done: Set once nobody wants to know any more.

        Raises:
            RendezvousConnectionError: Its process is gone. A host that cannot be reached says nothing about that.
        """
        deadline = time.monotonic() + COMES_BACK_WITHIN
        told = False
        while self._refuses():
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(
                    f"run {self._run_id}: the store at {self._name} was in memory only, and its process is gone: "
                    f"nobody listens there for {COMES_BACK_WITHIN:g} s; start all nodes again; "
                    f"a store that outlives its process is served by `rdzv serve --data-dir`"
                )
            if not told:
                told = True
                log.warning(
                    "run %s: nobody listens at %s, where the store was, in memory only; waiting %g s for another one",
                    *(self._run_id, self._name, COMES_BACK_WITHIN),
                )
            if done.wait(LOOK_EVERY):
                return

    def _refuses(self) -> bool:
        with contextlib.suppress(OSError):
            try:
                socket.create_connection((self._host, self._port), timeout=COMES_BACK_WITHIN).close()
            except ConnectionRefusedError:
                return True
        return False
