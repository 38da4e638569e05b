"""Replies kept until acknowledged, so that a request sent twice is carried out once (promise S2).

A session belongs to a client and outlives its connections. After a reconnect the client repeats its unanswered
requests, and gets the kept reply to each that was carried out before. A new session number tells the client that the
server has forgotten the earlier session, even if a welcome is lost.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from store import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from store.engine.changeset import SavedSession

AWAY_LEAST = 10.0  # seconds that a session outlives its connection even if a new session has no room
FORGOTTEN_AT_ONCE = 512  # sessions forgotten in one step: 1 ms
SESSION_OVERHEAD = 800  # bytes counted per session, without its kept replies
REPLY, RESULT = 250, 100  # bytes per kept reply, and per result of a transaction in it, without entries
ENTRY = 200  # bytes of an entry in a kept reply, without key and value


_request_id = itemgetter(0)


@dataclass(slots=True, eq=False, repr=False)
class ByteCount:
    """A sum of bytes to which several objects add."""

    bytes: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One client's kept replies, the id of its last mutation (`highest`), and its connection, if any."""

    id: bytes
    number: int
    budget: ByteCount
    peer: int | None = None
    # Per request, oldest first: its id, the reply, and the reply's bytes.
    replies: list[tuple[int, messages.Response, int]] = field(default_factory=list)
    held_bytes: int = 0
    highest: int = 0

    def keep_reply(self, request_id: int, response: messages.Response) -> None:
        """Keep the reply to a mutation."""
        assert request_id > self.highest, "requests of a session are applied in order"
        cost = reply_cost(response)
        self.highest = request_id
        self.replies.append((request_id, response, cost))
        self.held_bytes += cost
        self.budget.bytes += cost

    def kept_reply(self, request_id: int) -> messages.Response | None:
        """Return the kept reply to a request; None if it was freed."""
        place = bisect_left(self.replies, request_id, key=_request_id)
        if place < len(self.replies) and self.replies[place][0] == request_id:
            return self.replies[place][1]
        return None

    def acknowledge(self, up_to: float) -> None:
        """Free the kept replies to requests up to this id."""
        count = bisect_right(self.replies, up_to, key=_request_id)
        freed = sum(cost for _, _, cost in self.replies[:count])
        del self.replies[:count]
        self.held_bytes -= freed
        self.budget.bytes -= freed


class Sessions:
    """All sessions of a store; `made`: how many there ever were; `budget`: the bytes of all kept replies."""

    def __init__(self, *, ttl: float, sessions_max: int) -> None:
        self._ttl, self._max = ttl, sessions_max
        self._sessions: dict[bytes, Session] = {}
        self.made: int = 0
        self.budget: ByteCount = ByteCount()
        self._abandoned: OrderedDict[bytes, float] = OrderedDict()  # by id: when the session was disconnected, in order

    def __len__(self) -> int:
        return len(self._sessions)

    def open_session(self, id: bytes, *, peer: int) -> tuple[Session, int | None] | None:
        """Open or resume a session; return it and its earlier connection, if any; None if there is no room."""
        session = self._sessions.get(id)
        if session is None:
            if len(self._sessions) >= self._max:
                return None
            self.made += 1
            session = self._sessions[id] = Session(id, self.made, self.budget)
        self._abandoned.pop(id, None)
        previous, session.peer = session.peer, peer
        return session, previous

    def keep_for_reconnect(self, session: Session, *, peer: int, now: float) -> None:
        """Keep a session for a reconnect, after its connection `peer` has closed."""
        if session.peer == peer:
            session.peer = None
            self._abandoned[session.id] = now

    def end(self, session: Session, *, peer: int) -> list[bytes]:
        """End a session after a goodbye on `peer`, unless it has a newer connection; return the ended sessions' ids."""
        return [self._forget_session(session.id)] if session.peer == peer else []

    def expire(self, now: float) -> list[bytes]:
        """Forget some sessions whose clients were away for too long; return their ids."""
        expired = takewhile(lambda one: now - self._abandoned[one] >= self._ttl, self._abandoned)
        return [self._forget_session(id) for id in [*islice(expired, FORGOTTEN_AT_ONCE)]]

    def evict_for_session(self, id: bytes, now: float) -> list[bytes]:
        """Without room for session `id`, forget the longest disconnected one, after `AWAY_LEAST`; return its id."""
        if id in self._sessions or len(self._sessions) < self._max or self.seconds_until_room(now) > 0:
            return []
        return [self._forget_session(next(iter(self._abandoned)))]

    def seconds_until_room(self, now: float) -> float:
        """Return the seconds until a new session may replace a disconnected one; infinity if none is disconnected."""
        return next(iter(self._abandoned.values()), math.inf) + AWAY_LEAST - now

    def evict_for_replies(self, bytes_max: int) -> list[bytes]:
        """Forget disconnected sessions, oldest first, until replies take less than `bytes_max`; return their ids."""
        forgotten = []
        while self._abandoned and self.budget.bytes >= bytes_max:
            forgotten.append(self._forget_session(next(iter(self._abandoned))))
        return forgotten

    def _forget_session(self, id: bytes) -> bytes:
        self._abandoned.pop(id, None)
        self._sessions.pop(id).acknowledge(math.inf)
        return id

    def restore(self, saved: Iterable[SavedSession], *, last: int, now: float) -> None:
        """Restore saved sessions, as if disconnected at `now`; those with the latest writes are dropped last."""
        self.made = last
        for one in sorted(
            saved, key=lambda one: (max((_revision_of_reply(reply) for _, reply in one.replies), default=0), one.number)
        ):
            session = self._sessions[one.id] = Session(one.id, one.number, self.budget)
            for request_id, response in one.replies:
                session.keep_reply(request_id, response)
            self._abandoned[session.id] = now


def _revision_of_reply(response: messages.Response) -> int:
    told = response.entry if isinstance(response, messages.CompareAndSetResult) else response
    return int(getattr(told, "mod_revision", 0) or getattr(told, "revision", 0))


def reply_cost(response: messages.Response) -> int:
    """Return the approximate bytes of a kept reply."""
    if type(response) is messages.CompareAndSetResult:
        return REPLY + _entry_cost(response.entry)
    if type(response) is messages.TransactionResult:
        entries = [each for each in response.results if type(each) is messages.Entry]
        return REPLY + RESULT * len(response.results) + sum(map(_entry_cost, entries))
    return REPLY + (len(response.message) if type(response) is messages.Failed else 0)


def _entry_cost(entry: messages.Entry | None) -> int:
    return 0 if entry is None else ENTRY + messages.key_size(entry.key) + len(entry.value)


def reply_cost_at_most(request: messages.Request[Any], entries: Mapping[str, messages.Entry]) -> int:
    """Return the most bytes that the kept reply to a mutation may take."""
    inner = request.request if isinstance(request, messages.Guarded) else request
    if not isinstance(inner, messages.CompareAndSet | messages.Transact):
        return REPLY
    operations = messages.operations_of(inner)
    written: dict[str, int] = {}
    for operation in operations:
        written[operation.key] = written.get(operation.key, 0) + len(getattr(operation, "value", b""))
    keys = [operation.key for operation in operations]  # per key, the reply may hold the old and the new entry
    there = sum(_entry_cost(entries.get(key)) + ENTRY + messages.key_size(key) + written[key] for key in keys)
    return REPLY + RESULT * len(keys) + there
