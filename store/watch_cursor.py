"""Pure: how far a watch has come, for every client that opens watches, over our protocol or etcd's."""

from __future__ import annotations

from store.errors import StoreUsageError
from store.messages import Event, Watch

__all__ = ["WatchCursor"]


class WatchCursor:
    """How far a watch has come, and how it is to be opened again after an interruption (promise S4).

    Args:
        prefix: What is watched.
        start_revision: From where on, if that was asked for.
        snapshot: Whether it begins with what is there.
    """

    def __init__(self, prefix: str, *, start_revision: int | None, snapshot: bool) -> None:
        if snapshot and start_revision is not None:
            raise StoreUsageError("a watch starts with a snapshot or at start_revision, not both")
        self._prefix, self._snapshot = prefix, snapshot
        self._next = start_revision  # where to resume; None until the watch, or its snapshot, has been opened whole
        self._seen_any = False

    @property
    def resumable(self) -> bool:
        """Whether nothing is lost by closing it now and opening it again later."""
        return self._next is not None

    def opening(self) -> tuple[Watch, Event | None]:
        """Return the request that opens it now, and what its reader must be told first, if anything."""
        if self._next is not None:
            return Watch(prefix=self._prefix, start_revision=self._next), None
        reset = Event(kind="reset", revision=0) if self._seen_any else None
        self._seen_any = False
        return Watch(prefix=self._prefix, snapshot=self._snapshot), reset

    def opened(self, revision: int) -> None:
        """Note that the server has opened it, and will send every change after `revision`."""
        if self._next is None and not self._snapshot:
            self._next = revision + 1

    def delivered(self, events: tuple[Event, ...]) -> None:
        """Note that these events have come."""
        last = events[-1]
        self._seen_any = last.kind != "reset"
        if last.kind == "synced" or self._next is not None:
            self._next = last.revision + 1  # within a snapshot there is no revision to resume from

    def nothing_before(self, revision: int) -> None:
        """Note that everything up to this revision has come: the server has answered from it since."""
        if self._next is not None:
            self._next = max(self._next, revision + 1)

    def compacted(self) -> bool:
        """Note that history is gone. Return whether the watch goes on, with a reset and a new snapshot."""
        self._next = None
        return self._snapshot
