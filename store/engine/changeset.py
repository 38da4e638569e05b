"""The state that survives a restart (promise S3).

`SavedStore` is the state of a store on disk: the sum of the `ChangeSet` of all steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from store.engine.watches import event_bytes

if TYPE_CHECKING:
    from store.messages import Entry, Event, Response

FACTS_OVERHEAD = 500  # bytes counted per step, besides its events


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLease:
    """The saved terms of a lease. If `ttl` is 0, the lease is ending."""

    id: int
    ttl: float
    disconnect_ttl: float | None = None
    gone_ttl: float | None = None
    anonymous: bool = False  # granted by a put with `ttl=`; the lease ends with its only key


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptReply:
    """The reply to a mutating request. The session's replies up to `acknowledged` can be freed."""

    session_id: bytes
    acknowledged: int
    request_id: int
    response: Response


@dataclass(slots=True, kw_only=True)
class ChangeSet:
    """The changes of one step of the engine, for the journal."""

    revisions: list[tuple[Event, ...]] = field(default_factory=list)
    compacted: int = 0
    leases: dict[int, SavedLease | None] = field(default_factory=dict)  # by id: a lease's terms; None if it ended
    last_lease: int = 0  # the highest id that the store chose in this step; 0 if none
    replies: list[KeptReply] = field(default_factory=list)
    sessions: dict[bytes, int | None] = field(default_factory=dict)  # by id: a new session's number; None if it ended
    last_session: int = 0  # the highest number that the store chose in this step; 0 if none
    _new: set[bytes] = field(default_factory=set, repr=False, compare=False)  # ids opened and never ended in this step

    def __bool__(self) -> bool:
        return bool(self.revisions or self.leases or self.replies or self.sessions or self.last_session)

    @property
    def size(self) -> int:
        """The approximate bytes of the changes, without the kept replies, which `Sessions.budget` counts."""
        return FACTS_OVERHEAD + sum(event_bytes(event) for events in self.revisions for event in events)

    @property
    def only_frees_space(self) -> bool:
        """True if the changes only delete keys and end leases."""
        return not any(self.leases.values()) and all(
            event.kind == "delete" for events in self.revisions for event in events
        )

    def note_session_opened(self, session_id: bytes, number: int) -> None:
        """Note a new session; an older session of the same id ends, with its replies."""
        if session_id not in self.sessions:
            self._new.add(session_id)
        self.sessions[session_id] = self.last_session = number

    def note_session_ended(self, session_id: bytes) -> None:
        """Note the end of a session. A session that was opened in this step is not saved at all."""
        if session_id in self._new:
            self._new.remove(session_id)
            del self.sessions[session_id]
        else:
            self.sessions[session_id] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """A session and its kept replies: pairs of request id and response, in ascending order."""

    id: bytes
    number: int
    replies: tuple[tuple[int, Response], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStore:
    """A durable store. `history` has the changes of each revision after `compacted`."""

    store_id: str
    revision: int = 0
    compacted: int = 0
    last_lease: int = 0
    last_session: int = 0
    entries: tuple[Entry, ...] = ()
    leases: tuple[SavedLease, ...] = ()
    sessions: tuple[SavedSession, ...] = ()
    history: tuple[tuple[Event, ...], ...] = ()
