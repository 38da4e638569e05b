"""Pure: a node's arrival at its run, as a state machine: its record in the store, and the possible next events.

A node has at most one record in its run. The coordinator takes the record into a round, and other nodes notice its
deletion. `TRANSITIONS` has one line per event, with the states in which it is possible; any other change of the state
is a defect, and raises at once.

    ABSENT      no record of this node is in the store, as far as it knows
    SENT        a record was sent, and the answer has not come: it may be stored, or not
    STANDING    the record is stored, and the node waits for a round
    TAKEN_IN    a round contains this very record: the node is a member
    WITHDRAWN   the node is deleting its record; until that is done, no other is sent

In any state the lease may lapse (`GONE`), or the caller give up (`WITHDRAW`). A late answer must not bring back an
ended record: in ABSENT and WITHDRAWN, an answer changes nothing. A member that rejoins replaces its record; if the
store refuses the new one (`KEPT`), the node is still a member.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.state import NodeRecord

L = TypeVar("L")


class State(Enum):
    """The state of a node's record."""

    ABSENT = "absent"
    SENT = "sent"
    STANDING = "standing"
    TAKEN_IN = "taken in"
    WITHDRAWN = "withdrawn"


class Happening(Enum):
    """An event that changes the state."""

    SEND = "send"  # also again, if the last record's outcome is unknown
    WRITTEN = "written"
    REFUSED = "refused"  # the store refused the record, and there is no earlier one
    KEPT = "kept"  # the store refused the record, and the earlier one remains
    TAKE_IN = "take in"
    WITHDRAW = "withdraw"
    GONE = "gone"  # not in the store any more: deleted, or lapsed with its lease


_ABSENT, _SENT, _STANDING, _TAKEN_IN, _WITHDRAWN = State

TRANSITIONS: Final[Mapping[Happening, Mapping[State, State]]] = {
    Happening.SEND: {_ABSENT: _SENT, _SENT: _SENT, _TAKEN_IN: _SENT},
    # In ABSENT, the lease lapsed after the record was sent, and the record with it.
    Happening.WRITTEN: {_ABSENT: _ABSENT, _SENT: _STANDING, _WITHDRAWN: _WITHDRAWN},
    Happening.REFUSED: {_ABSENT: _ABSENT, _SENT: _ABSENT, _WITHDRAWN: _WITHDRAWN},
    Happening.KEPT: {_ABSENT: _ABSENT, _SENT: _TAKEN_IN, _WITHDRAWN: _WITHDRAWN},
    Happening.TAKE_IN: {_STANDING: _TAKEN_IN},
    Happening.WITHDRAW: {_ABSENT: _ABSENT} | dict.fromkeys((_SENT, _STANDING, _TAKEN_IN, _WITHDRAWN), _WITHDRAWN),
    Happening.GONE: dict.fromkeys(State, _ABSENT),
}


class Arrival(Generic[L]):
    """One node's record in its run."""

    def __init__(self) -> None:
        self.state: State = State.ABSENT
        self.record: NodeRecord | None = None  # the stored record, also while another is being sent
        self.lease: L | None = None  # the lease of the record, while the node renews it
        self.began: int = 0  # the revision of the first record, or 0; older drains are of an earlier process
        self._sent: NodeRecord | None = None

    @property
    def revision(self) -> int:
        """The revision of the stored record; 0 if there is none."""
        return self.record.arrival if self.record is not None else 0

    def stands(self, revision: int) -> bool:
        """Return True if the record of this revision is still stored, as far as is known."""
        return self.record is not None and self.record.arrival == revision and self.state is not State.WITHDRAWN

    def send(self, record: NodeRecord) -> None:
        """Note that a record is being sent, on the present lease."""
        assert self.lease is not None, "a record that is sent is on a lease that is kept"
        self._happens(Happening.SEND)
        self._sent = record

    def written(self, revision: int) -> bool:
        """Note that the store has written the record; return False if the record has ended meanwhile."""
        sent, self._sent = self._sent, None
        self._happens(Happening.WRITTEN)
        if self.state is not State.STANDING:
            return False
        assert sent is not None, "what was written was sent before"
        self.began = min(self.began or revision, revision)  # lower: the first one in another store
        self.record = sent.replace(arrival=revision)
        return True

    def refused(self) -> None:
        """Note that the store has refused the record."""
        self._sent = None
        self._happens(Happening.REFUSED if self.record is None else Happening.KEPT)

    def taken_in(self) -> None:
        """Note that a round contains the stored record."""
        self._happens(Happening.TAKE_IN)

    def gone(self) -> None:
        """Note that the record is no longer in the store."""
        self._happens(Happening.GONE)
        self.record = self._sent = None

    def lapsed(self) -> None:
        """Note that the lease has lapsed, and the record with it."""
        self.lease = None
        self.gone()

    @property
    def in_doubt(self) -> bool:
        """True if it is unknown whether a sent record is stored: only the end of its lease is sure to delete it."""
        return self.state is State.SENT

    def withdraw(self) -> None:
        """Note that the node begins to delete its record; after the deletion, call `gone`."""
        self._happens(Happening.WITHDRAW)

    def _happens(self, happening: Happening) -> None:
        after = TRANSITIONS[happening].get(self.state)
        assert after is not None, f"an arrival that is {self.state.value} cannot {happening.value}"
        self.state = after
