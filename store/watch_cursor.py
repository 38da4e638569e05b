"""The request that reopens a watch after an interruption, at the built-in server or at etcd (promise S4)."""

from __future__ import annotations

from store.errors import StoreUsageError
from store.messages import Event, Watch


class WatchCursor:
    """The progress of one watch."""

    def __init__(self, prefix: str, *, start_revision: int | None, snapshot: bool) -> None:
        if snapshot and start_revision is not None:
            raise StoreUsageError("a watch starts with a snapshot or at start_revision, not both")
        self._prefix, self._snapshot = prefix, snapshot
        self._next = start_revision  # revision to open the watch at; None: open it at the present state
        self._seen_any = False

    @property
    def is_resumable(self) -> bool:
        """True if nothing is lost by closing the watch now and opening it again later."""
        return self._next is not None

    def opening_request(self) -> tuple[Watch, Event | None]:
        """Return the request that opens the watch now, and a `reset` if the reader must forget earlier events."""
        if self._next is not None:
            return Watch(prefix=self._prefix, start_revision=self._next), None
        reset = Event(kind="reset", revision=0) if self._seen_any else None
        self._seen_any = False
        return Watch(prefix=self._prefix, snapshot=self._snapshot), reset

    def note_opened(self, revision: int) -> None:
        """Note that the server has opened the watch, and will send every change after `revision`."""
        if self._next is None and not self._snapshot:
            self._next = revision + 1

    def note_delivered(self, events: tuple[Event, ...]) -> None:
        """Note that these events have arrived."""
        last = events[-1]
        self._seen_any = last.kind != "reset"
        if last.kind == "synced" or self._next is not None:
            self._next = last.revision + 1  # not set while a snapshot is incomplete: no watch can resume in it

    def note_progress(self, revision: int) -> None:
        """Note that all events up to this revision have arrived, as a later answer shows."""
        if self._next is not None:
            self._next = max(self._next, revision + 1)

    def note_compacted(self) -> bool:
        """Note that the changes to resume from are lost; return True if a `reset` and a new snapshot follow."""
        self._next = None
        return self._snapshot
