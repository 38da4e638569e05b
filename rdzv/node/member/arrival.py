"""A node's arrival at its run, as a state machine: the state of its record in the store.

A node has at most one record in its run. `TRANSITIONS` has one line per event: the states in which it may happen, and
the state after each. Any other event raises.

    ABSENT      the node knows of no record of its own in the store
    SENT        the node has sent a record, which may be stored or not, as the answer is missing
    STANDING    the record is stored, and the node waits for a round
    TAKEN_IN    a round contains this very record: the node is a member
    WITHDRAWN   the node is deleting its record, and sends no other until that is done

In any state the record's lease may expire (`GONE`), or the caller may give up (`WITHDRAW`). In ABSENT and WITHDRAWN a
late answer to a sent record changes nothing. A member that rejoins replaces its record; if the store refuses the new
one (`KEPT`), it stays a member.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.state import NodeRecord

L = TypeVar("L")


class ArrivalState(Enum):
    """The state of a node's record."""

    ABSENT = "absent"
    SENT = "sent"
    STANDING = "standing"
    TAKEN_IN = "taken in"
    WITHDRAWN = "withdrawn"


class ArrivalEvent(Enum):
    """An event that changes the state."""

    SEND = "send"  # also possible while the outcome of the last sent record is unknown
    WRITTEN = "written"
    REFUSED = "refused"  # the store refused the sent record, and the node has no earlier record
    KEPT = "kept"  # the store refused the sent record, and the node's earlier record remains
    TAKE_IN = "take in"
    WITHDRAW = "withdraw"
    GONE = "gone"  # the record was deleted, or expired with its lease


_ABSENT, _SENT, _STANDING, _TAKEN_IN, _WITHDRAWN = ArrivalState

TRANSITIONS: Final[Mapping[ArrivalEvent, Mapping[ArrivalState, ArrivalState]]] = {
    ArrivalEvent.SEND: {_ABSENT: _SENT, _SENT: _SENT, _TAKEN_IN: _SENT},
    # If the answer comes in ABSENT, the record's lease, and the record with it, have expired since it was sent.
    ArrivalEvent.WRITTEN: {_ABSENT: _ABSENT, _SENT: _STANDING, _WITHDRAWN: _WITHDRAWN},
    ArrivalEvent.REFUSED: {_ABSENT: _ABSENT, _SENT: _ABSENT, _WITHDRAWN: _WITHDRAWN},
    ArrivalEvent.KEPT: {_ABSENT: _ABSENT, _SENT: _TAKEN_IN, _WITHDRAWN: _WITHDRAWN},
    ArrivalEvent.TAKE_IN: {_STANDING: _TAKEN_IN},
    ArrivalEvent.WITHDRAW: {_ABSENT: _ABSENT} | dict.fromkeys((_SENT, _STANDING, _TAKEN_IN, _WITHDRAWN), _WITHDRAWN),
    ArrivalEvent.GONE: dict.fromkeys(ArrivalState, _ABSENT),
}


class Arrival(Generic[L]):
    """One node's record in its run."""

    def __init__(self) -> None:
        self.state: ArrivalState = ArrivalState.ABSENT
        self.record: NodeRecord | None = None  # the stored record, also while the node sends another
        self.lease: L | None = None  # the lease that the node holds for its records, or None
        self.began: int = 0  # lowest revision of this process's records, or 0; older drains are not for this process
        self._sent: NodeRecord | None = None

    @property
    def revision(self) -> int:
        """The revision of the stored record; 0 without one."""
        return self.record.arrival if self.record is not None else 0

    def is_recorded(self, revision: int) -> bool:
        """Return True if the record of this revision is stored, as far as the node knows."""
        return self.record is not None and self.record.arrival == revision and self.state is not ArrivalState.WITHDRAWN

    def on_send(self, record: NodeRecord) -> None:
        """Handle the sending of a record, on the lease `self.lease`."""
        assert self.lease is not None, "a record that is sent is on a lease that is kept"
        self._apply(ArrivalEvent.SEND)
        self._sent = record

    def on_written(self, revision: int) -> bool:
        """Handle the confirmation of the sent record; return False if the record was given up or lost since."""
        sent, self._sent = self._sent, None
        self._apply(ArrivalEvent.WRITTEN)
        if self.state is not ArrivalState.STANDING:
            return False
        assert sent is not None, "what was written was sent before"
        self.began = min(self.began or revision, revision)  # a new store may give the record a lower revision
        self.record = sent.replace(arrival=revision)
        return True

    def on_write_refused(self) -> None:
        """Handle the store's refusal of the sent record."""
        self._apply(ArrivalEvent.REFUSED if self.record is None else ArrivalEvent.KEPT)

    def on_accepted(self) -> None:
        """Handle a round that contains the stored record."""
        self._apply(ArrivalEvent.TAKE_IN)

    def on_removed(self) -> None:
        """Handle the disappearance of the record from the store."""
        self._apply(ArrivalEvent.GONE)
        self.record = self._sent = None

    def on_lease_lost(self) -> None:
        """Handle the expiry of the lease, and of the record with it."""
        self.lease = None
        self.on_removed()

    @property
    def is_in_doubt(self) -> bool:
        """True if a sent record may be stored or not: only the end of its lease is sure to delete the record."""
        return self.state is ArrivalState.SENT

    def on_withdraw(self) -> None:
        """Handle the beginning of the record's deletion; `on_removed` handles its end."""
        self._apply(ArrivalEvent.WITHDRAW)

    def _apply(self, happening: ArrivalEvent) -> None:
        after = TRANSITIONS[happening].get(self.state)
        assert after is not None, f"an arrival that is {self.state.value} cannot {happening.value}"
        self.state = after
