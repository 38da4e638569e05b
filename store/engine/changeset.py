"""Pure: what must survive a restart, as nouns (promise S3).

`Facts` is what one step of the engine adds; a journal makes it durable before anything of that step is said to anybody.
`Saved` is all of it put together, from which an engine goes on. Durations only: what a lease has left is not saved,
since after a restart each gets its full TTL again (S5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from store.engine.watches import event_bytes

if TYPE_CHECKING:
    from store.messages import Entry, Event, Response

FACTS_OVERHEAD = 500  # bytes of bookkeeping for one step, rounded up

__all__ = ["Facts", "KeptReply", "Saved", "SavedLease", "SavedSession"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLease:
    """A lease, with what it was granted for; which keys are on it, the entries say. Without a ttl it is ending."""

    id: int
    ttl: float
    disconnect_ttl: float | None = None
    gone_ttl: float | None = None
    anonymous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptReply:
    """The reply to a mutation, kept until acknowledged; those up to `acknowledged` need not be kept any more."""

    session_id: bytes
    acknowledged: int
    request_id: int
    response: Response


@dataclass(slots=True, kw_only=True)
class Facts:
    """What one step has added. Empty if nothing need be made durable.

    Attributes:
        revisions: The changes, one tuple of events per revision.
        compacted: Up to which revision history is not kept any more.
        leases: Leases that are new, or begin to end, and those that are gone, with None. The last word on each: an id
            that its client has chosen may come again as soon as it is gone.
        last_lease: The highest id that the store has given to any of them; 0 if it has given none.
        replies: Replies that are new, of sessions that are known or among these.
        sessions: Sessions that are new, with their numbers, and those that are gone, with None. The last word on each:
            while a disk is full, sessions come, go and come again in what is one step to the journal.
        last_session: The number of the newest session there has been; 0 if none is new.
    """

    revisions: list[tuple[Event, ...]] = field(default_factory=list)
    compacted: int = 0
    leases: dict[int, SavedLease | None] = field(default_factory=dict)
    last_lease: int = 0
    replies: list[KeptReply] = field(default_factory=list)
    sessions: dict[bytes, int | None] = field(default_factory=dict)
    last_session: int = 0
    _new: set[bytes] = field(default_factory=set, repr=False, compare=False)  # sessions of which nobody knew before

    def __bool__(self) -> bool:
        return bool(self.revisions or self.leases or self.replies or self.sessions or self.last_session)

    @property
    def size(self) -> int:
        """About how many bytes it takes to keep them until they are durable; replies are counted by their sessions."""
        return FACTS_OVERHEAD + sum(event_bytes(event) for events in self.revisions for event in events)

    @property
    def only_takes_away(self) -> bool:
        """Whether keys and leases only go with it."""
        return not any(self.leases.values()) and all(
            event.kind == "delete" for events in self.revisions for event in events
        )

    def opened(self, session_id: bytes, number: int) -> None:
        """Note a session that is new; one of the same id is gone, and its replies with it."""
        if session_id not in self.sessions:
            self._new.add(session_id)
        self.sessions[session_id] = self.last_session = number

    def forgotten(self, session_id: bytes) -> None:
        """Note a session that is gone, and its replies with it.

        One that has only come in this step leaves nothing but its number: while a disk is full there is no next step,
        and clients come and go.
        """
        if session_id in self._new:
            self._new.remove(session_id)
            del self.sessions[session_id]
        else:
            self.sessions[session_id] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """A session, and the replies kept for it: pairs of request id and response, upwards."""

    id: bytes
    number: int
    replies: tuple[tuple[int, Response], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A whole store, as it was made durable.

    Attributes:
        store_id: Its identity.
        revision: Of its last change.
        compacted: Up to which revision history is not kept.
        last_lease: The highest lease id that the store has ever given.
        last_session: The highest session number ever given.
        entries: Its keys.
        leases: Its leases.
        sessions: Its clients' sessions.
        history: The latest changes, one tuple of events per revision, without gaps after `compacted`.
    """

    store_id: str
    revision: int = 0
    compacted: int = 0
    last_lease: int = 0
    last_session: int = 0
    entries: tuple[Entry, ...] = ()
    leases: tuple[SavedLease, ...] = ()
    sessions: tuple[SavedSession, ...] = ()
    history: tuple[tuple[Event, ...], ...] = ()
