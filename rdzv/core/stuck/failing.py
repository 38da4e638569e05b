"""Pure: when a node fails so often that it is kept out for a while (`ban_after`).

A failure is a round that a node was lost from, or in which a process of it was the first to fail. It counts once for
each round, whoever tells of it. Nothing here compares hours of several hosts: the store keeps each failure for as long
as it counts, and forgets it by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FailureRule"]


@dataclass(frozen=True, slots=True)
class FailureRule:
    """So many failures within so long are too many."""

    failures: int  # the number that is too much
    within: float  # seconds for which a failure counts, and for which a node is banned then

    def verdict(self, count: int, why: str) -> str:
        """Return why a node is banned that has failed so often, the last time for this reason; empty if it is not."""
        if count < self.failures:
            return ""
        return f"{count} failure{'s' if count != 1 else ''}, the last: {why or 'it was lost'}"
