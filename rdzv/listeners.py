"""Pure: the listeners of an object, notified in the order in which they were added."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import Iterator

log: logging.Logger = escaping(logging.getLogger(__name__))


class Listener(Protocol):
    """An object that is notified of changes."""

    def changed(self) -> None:
        """Look at the state anew: it has changed, perhaps in a way that does not matter here."""


class Listeners:
    """Listeners that are notified together; as a `Listener`, a group may be in another.

    A notification has no content. A listener is added first, then looks at the state, and again at each notification,
    so it misses no change. Any thread may add, remove and notify; each access to the table is one step of the
    interpreter. There is no lock: a child that is forked while another thread holds one could never take it.
    """

    def __init__(self) -> None:
        self._listeners: dict[Listener, Listener] = {}

    def changed(self) -> None:
        """Notify all, here and now. A listener's error is logged, and the others are still notified."""
        for listener in tuple(self._listeners):
            try:
                listener.changed()
            except Exception:
                log.exception("a listener has failed: %r", listener)

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Notify the listener, too, inside the context."""
        self.add(listener)
        try:
            yield
        finally:
            self.remove(listener)

    def add(self, listener: Listener) -> None:
        """Notify the listener, too."""
        self._listeners[listener] = listener

    def remove(self, listener: Listener) -> bool:
        """Stop notifying it; return True to the one caller that has removed it."""
        return self._listeners.pop(listener, None) is not None
