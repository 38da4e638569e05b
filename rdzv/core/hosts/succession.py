"""Pure: when a process may serve the store of a URL that lists several hosts: at most one does at any moment.

A kernel refuses a connection only if no process listens. So a process that wants to serve listens first, as a
candidate, and then asks all other hosts. It serves once each of them has refused since it began to listen, or has said
that its store has ended. Two processes cannot both do that: the one that listened later finds the other. No clock and
no count of nodes is involved. Silence proves nothing: a machine that does not answer may be at work.

A candidate gives way to a store that serves, and to a candidate before it in the list; it waits for one behind it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Self

__all__ = ["Answer", "Candidacy"]


class Answer(Enum):
    """The answer of a host to the question whether it serves."""

    SERVES = "serves"
    CANDIDATE = "is a candidate"
    ENDED = "has ended"
    REFUSED = "refuses"  # at each address of its name
    LOST = "is lost"  # by an operator's word
    SILENT = "does not answer"  # or not like a store


PROOFS = frozenset({Answer.ENDED, Answer.REFUSED, Answer.LOST})


class Candidacy(NamedTuple):
    """A candidate at a place in the list, and the hosts that have proven, since it listens, that they do not serve."""

    place: int
    proven: frozenset[int] = frozenset()

    def heard(self, host: int, answer: Answer) -> Self | None:
        """Return the candidacy after the answer of the host at that place; None if it ends."""
        if answer is Answer.SERVES or (answer is Answer.CANDIDATE and host < self.place):
            return None
        return self._replace(proven=self.proven | {host}) if answer in PROOFS else self

    def missing(self, hosts: int) -> list[int]:
        """Return the places of the hosts without a proof; with none the candidate may serve."""
        return [host for host in range(hosts) if host != self.place and host not in self.proven]
