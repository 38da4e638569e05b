"""When a process may serve the store of a URL that lists several hosts: at most one at any moment.

A kernel refuses a connection only if no process listens. So a process that wants to serve first listens, as a
candidate, and then asks all other hosts. The candidate serves once each other host has refused the connection, has
answered that its store has ended, or was reported lost by an operator. Two processes cannot both serve: the process
that listened later reaches the other. Silence proves nothing: a host that does not answer may still serve.

A candidate gives up if it finds a serving store, or a candidate earlier in the list. It waits until later
candidates have given up.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Self


class Answer(Enum):
    """A host's answer to a candidate."""

    SERVES = "serves"
    CANDIDATE = "is a candidate"
    ENDED = "has ended"
    REFUSED = "refuses"  # each address of the host's name refuses the connection
    LOST = "is lost"  # an operator has said that the host is lost
    SILENT = "does not answer"  # the host does not answer, or its answer is not a store's


PROOFS = frozenset({Answer.ENDED, Answer.REFUSED, Answer.LOST})


class Candidacy(NamedTuple):
    """A candidate's place in the list of hosts, and the places of hosts proven not to serve."""

    place: int
    proven: frozenset[int] = frozenset()

    def after_answer(self, host: int, answer: Answer) -> Self | None:
        """Return the candidacy after the answer of the host at place `host`; None if the candidate must give up."""
        if answer is Answer.SERVES or (answer is Answer.CANDIDATE and host < self.place):
            return None
        return self._replace(proven=self.proven | {host}) if answer in PROOFS else self

    def possible_hosts(self, hosts: int) -> list[int]:
        """Return the places, of `hosts` places, that may still serve; if none, the candidate may serve."""
        return [host for host in range(hosts) if host != self.place and host not in self.proven]
