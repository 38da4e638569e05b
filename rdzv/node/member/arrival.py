"""Pure: a node's arrival at its run, as a machine: what stands in the store of it, and what may happen next.

A node has at most one record in its run, and everything it does there goes by that record: it is what the coordinator
takes into a round, and what the others see disappear. So where the record stands is one state, and every change of it
is one line of `TRANSITIONS`. What is not in that table is a defect of ours, and fails at once.

    ABSENT      no record of this node is in the store, as far as it knows
    SENT        a record was sent, and the answer has not come: it may stand, or not
    STANDING    the record stands, and the node waits for a round
    TAKEN_IN    a round holds this very arrival: the node is a member
    WITHDRAWN   the node is taking its record back; until that is done, nothing new is sent

Two things may happen in any state, and from outside: the lease lapses (`GONE`), and the caller does not want to go on
(`WITHDRAW`). An answer may come after either, and must not bring back what has ended: that is why ABSENT and WITHDRAWN
have lines for answers.

A member that comes again sends its new record over the old one. If that is refused (`KEPT`), it is a member still.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.state import NodeRecord

__all__ = ["TRANSITIONS", "Arrival", "Happening", "State"]

L = TypeVar("L")


class State(Enum):
    """Where a node's record stands."""

    ABSENT = "absent"
    SENT = "sent"
    STANDING = "standing"
    TAKEN_IN = "taken in"
    WITHDRAWN = "withdrawn"


class Happening(Enum):
    """What changes it."""

    SEND = "send"  # a record is sent; also once more, if nobody knows what became of the last one
    WRITTEN = "written"  # the store has taken it
    REFUSED = "refused"  # the store has not, and there is no earlier one
    KEPT = "kept"  # the store has not, and the earlier one stands
    TAKE_IN = "take in"  # a round holds it
    WITHDRAW = "withdraw"  # the node takes back whatever there is
    GONE = "gone"  # it is not in the store any more: deleted, or lapsed with its lease


TRANSITIONS: Final[Mapping[State, Mapping[Happening, State]]] = {
    State.ABSENT: {
        Happening.SEND: State.SENT,
        Happening.WRITTEN: State.ABSENT,  # on a lease that has lapsed meanwhile: it went with it
        Happening.REFUSED: State.ABSENT,
        Happening.KEPT: State.ABSENT,
        Happening.GONE: State.ABSENT,
        Happening.WITHDRAW: State.ABSENT,
    },
    State.SENT: {
        Happening.SEND: State.SENT,
        Happening.WRITTEN: State.STANDING,
        Happening.REFUSED: State.ABSENT,
        Happening.KEPT: State.TAKEN_IN,
        Happening.GONE: State.ABSENT,
        Happening.WITHDRAW: State.WITHDRAWN,
    },
    State.STANDING: {
        Happening.TAKE_IN: State.TAKEN_IN,
        Happening.GONE: State.ABSENT,
        Happening.WITHDRAW: State.WITHDRAWN,
    },
    State.TAKEN_IN: {
        Happening.SEND: State.SENT,
        Happening.GONE: State.ABSENT,
        Happening.WITHDRAW: State.WITHDRAWN,
    },
    State.WITHDRAWN: {
        Happening.WRITTEN: State.WITHDRAWN,
        Happening.REFUSED: State.WITHDRAWN,
        Happening.KEPT: State.WITHDRAWN,
        Happening.WITHDRAW: State.WITHDRAWN,
        Happening.GONE: State.ABSENT,
    },
}
"""Every change there is."""


class Arrival(Generic[L]):
    """One node's record in its run.

    Attributes:
        state: Where it stands.
        record: As it stands in the store, if it does; while another one is under way, the one before.
        lease: What the node's records are on, for as long as that is kept.
        began: The revision of the first record of all; 0 before there is one. What was written of the node's name
            before that is about another process.
    """

    def __init__(self) -> None:
        self.state: State = State.ABSENT
        self.record: NodeRecord | None = None
        self.lease: L | None = None
        self.began: int = 0
        self._sent: NodeRecord | None = None

    @property
    def revision(self) -> int:
        """The revision of the record that stands; 0 if none does."""
        return self.record.arrival if self.record is not None else 0

    def stands(self, revision: int) -> bool:
        """Whether the record written at this revision is still the node's, as far as is known."""
        return self.record is not None and self.record.arrival == revision and self.state is not State.WITHDRAWN

    def send(self, record: NodeRecord) -> None:
        """A record is about to be sent, on the lease that is kept: its end is the record's, and must be heard of."""
        assert self.lease is not None, "a record that is sent is on a lease that is kept"
        self._happens(Happening.SEND)
        self._sent = record

    def written(self, revision: int) -> bool:
        """The store has taken what was sent; False if that counts for nothing any more."""
        sent, self._sent = self._sent, None
        self._happens(Happening.WRITTEN)
        if self.state is not State.STANDING:
            return False
        assert sent is not None, "what was written was sent before"
        self.began = self.began or revision
        self.record = sent.replace(arrival=revision)
        return True

    def refused(self) -> None:
        """The store has not taken what was sent."""
        self._sent = None
        self._happens(Happening.REFUSED if self.record is None else Happening.KEPT)

    def taken_in(self) -> None:
        """A round holds the record that stands."""
        self._happens(Happening.TAKE_IN)

    def gone(self) -> None:
        """The record is not in the store any more; its lease may be."""
        self._happens(Happening.GONE)
        self.record = self._sent = None

    def lapsed(self) -> None:
        """The lease has lapsed, and the record with it."""
        self.lease = None
        self.gone()

    @property
    def in_doubt(self) -> bool:
        """Whether a record was sent of which nobody knows whether it stands: only ending its lease takes that back."""
        return self.state is State.SENT

    def withdraw(self) -> None:
        """The node wants nothing of its own to stand. Once that is done, or nobody can do it, the record is `gone`."""
        self._happens(Happening.WITHDRAW)

    def _happens(self, happening: Happening) -> None:
        after = TRANSITIONS[self.state].get(happening)
        assert after is not None, f"an arrival that is {self.state.value} cannot {happening.value}"
        self.state = after
