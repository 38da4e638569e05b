"""A journal whose disk takes its time, for tests that look at what may not be said yet.

journal.begun.acquire()         the writer has a group in hand
journal.may_commit.release()    now it may write it
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from store.journal import Journal

if TYPE_CHECKING:
    from store.facts import Facts

__all__ = ["HeldBack"]

PATIENCE = 20.0  # seconds after which a test that forgot to let go fails instead of hanging


class HeldBack(Journal):
    """A journal that writes each group only when it is let; what it writes it writes really.

    Attributes:
        begun: Released when the writer has taken a group.
        may_commit: To be released once for each group.
        groups: Those that were written.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.begun = threading.Semaphore(0)
        self.may_commit = threading.Semaphore(0)
        self.groups: list[list[Facts]] = []

    def _commit(self, group: list[Facts]) -> None:
        self.begun.release()
        assert self.may_commit.acquire(timeout=PATIENCE), "nobody let this group be written"
        super()._commit(group)
        self.groups.append(group)
