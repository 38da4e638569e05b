"""The listeners of an object, notified in order of addition."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, Protocol

from store.printable import make_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

log: Final = make_logger(__name__)


class ChangeListener(Protocol):
    """An object notified of changes."""

    def notify(self) -> None:
        """React to a change of the observed state, which may not concern this listener."""


class Listeners:
    """A group of listeners notified together; a group is itself a `ChangeListener`, so it may be in another group.

    A listener reads the state itself, once after it was added and again at each notification, so it misses no change.
    Any thread may add, remove and notify listeners: each access to their table is atomic in Python. There is no
    lock: a process forked while another thread holds a lock could never acquire that lock.
    """

    def __init__(self) -> None:
        self._listeners: dict[ChangeListener, ChangeListener] = {}

    def notify(self) -> None:
        """Notify all listeners, in this thread. A listener's error is logged, and the others are still notified."""
        for listener in tuple(self._listeners):
            try:
                listener.notify()
            except Exception:
                log.exception("a listener has failed: %r", listener)

    @contextlib.contextmanager
    def subscribed(self, listener: ChangeListener) -> Iterator[None]:
        """Notify the listener of changes during the context."""
        self.add(listener)
        try:
            yield
        finally:
            self.remove(listener)

    def add(self, listener: ChangeListener) -> None:
        """Notify the listener of changes from now on."""
        self._listeners[listener] = listener

    def remove(self, listener: ChangeListener) -> bool:
        """Stop notifying the listener; of several concurrent calls, return True in the one that has removed it."""
        return self._listeners.pop(listener, None) is not None
