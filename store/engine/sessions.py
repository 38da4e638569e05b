"""Pure: replies kept until acknowledged, so that a request sent twice is applied once (promise S2).

A session belongs to a client and outlives its connections. The client numbers its requests upwards; with each it says
up to which number it has had the replies to all its mutations. After a reconnect it sends again what it has no reply
to: what was applied already is answered from here.

Only replies to mutations are kept; reading twice does no harm.

A session has a number, which it gets when it is made. A client that meets its session under another number knows that
the server has forgotten it in between. "I know this session" would not do: where the welcome that said "I do not" was
lost on the way, the next one would say "I do", of a session that is empty, and what was applied under the old one would
be applied again.

What a kept reply holds on to is counted (promise S6). Most hold on to nothing but themselves. Those that carry values
keep these from being let go of, also when their keys have long been overwritten or deleted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from store.messages import (
    Added,
    Append,
    CompareAndSet,
    CompareAndSetResult,
    Create,
    Entry,
    Failed,
    Get,
    Guarded,
    Put,
    Response,
    Transact,
    TransactionResult,
    Written,
    key_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from store.engine.changeset import SavedSession
    from store.messages import Request

__all__ = ["FORGOTTEN", "Session", "Sessions", "reply_cost", "reply_cost_at_most"]

FORGOTTEN_AT_ONCE = 512  # sessions: about a millisecond
REPLY = 100  # bytes of bookkeeping for any reply that is kept, or any result in one
ENTRY = 200  # and for an entry in it


class Forgotten:
    """The request was applied once, but what it answered is no longer known."""


FORGOTTEN = Forgotten()

_request_id = itemgetter(0)  # of a reply that is kept


class Tally:
    """How many bytes the replies of several sessions hold on to."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes: int = 0


class Session:
    """One client's replies, and the connection it has now, if any; what they hold is counted in `tally`, too.

    Attributes:
        highest: The last of its mutations that was applied.
        held_bytes: About how many bytes the replies hold on to.
    """

    __slots__ = ("_replies", "_tally", "abandoned_at", "held_bytes", "highest", "id", "number", "peer")

    def __init__(self, id: bytes, number: int, tally: Tally | None = None) -> None:
        self.id: bytes = id
        self.number: int = number
        self.peer: int | None = None
        self.abandoned_at: float | None = None  # on the server's clock
        self._replies: deque[tuple[int, Response, int]] = deque()  # the request, its reply, its cost; oldest first
        self._tally = tally or Tally()
        self.held_bytes: int = 0
        self.highest: int = 0

    def acknowledge(self, up_to: int) -> None:
        """The client has the replies to all its mutations up to this request."""
        replies = self._replies
        while replies and replies[0][0] <= up_to:
            cost = replies.popleft()[2]
            self.held_bytes -= cost
            self._tally.bytes -= cost

    def replay(self, request_id: int) -> Response | Forgotten | None:
        """What was answered to this mutation; None if it was never applied."""
        if request_id > self.highest:
            return None
        place = bisect_left(self._replies, request_id, key=_request_id)
        if place < len(self._replies) and self._replies[place][0] == request_id:
            return self._replies[place][1]
        return FORGOTTEN

    @property
    def replies(self) -> int:
        """How many replies are kept."""
        return len(self._replies)

    def keep(self, request_id: int, response: Response, cost: int) -> None:
        """Keep the reply to a mutation that was just applied; `cost` is its rough size in bytes."""
        assert request_id > self.highest, "requests of a session are applied in order"
        self.highest = request_id
        self._replies.append((request_id, response, cost))
        self.held_bytes += cost
        self._tally.bytes += cost

    def forget(self) -> None:
        """The session has ended."""
        self._replies.clear()
        self._tally.bytes -= self.held_bytes
        self.held_bytes = 0


class Sessions:
    """All sessions of a store; what their replies hold is counted in `tally`."""

    def __init__(self, *, ttl: float, sessions_max: int) -> None:
        self._ttl, self._max = ttl, sessions_max
        self._sessions: dict[bytes, Session] = {}
        self._made = 0
        self.tally: Tally = Tally()
        self._abandoned: OrderedDict[bytes, None] = OrderedDict()  # those without a connection, longest first
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # those of them that keep no reply

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def made(self) -> int:
        """How many sessions there have ever been; the number of the newest."""
        return self._made

    @property
    def held_bytes(self) -> int:
        """About how many bytes the replies of all sessions hold on to."""
        return self.tally.bytes

    def open(self, id: bytes, *, peer: int) -> tuple[Session, int | None] | None:
        """Give a session to a connection; the caller has let those expire that are due.

        Returns:
            The session, and the peer that had it until now; None if there are too many.
        """
        session = self._sessions.get(id)
        if session is None:
            if len(self._sessions) >= self._max:
                return None
            self._made += 1
            session = self._sessions[id] = Session(id, self._made, self.tally)
        self._abandoned.pop(id, None)
        self._idle.pop(id, None)
        previous, session.peer, session.abandoned_at = session.peer, peer, None
        return session, previous

    def close(self, session: Session, *, peer: int, now: float) -> None:
        """The connection `peer` of a session has closed; the session waits for its client to come back."""
        if session.peer == peer:
            session.peer = None
            self._abandon(session, now)

    def _abandon(self, session: Session, now: float) -> None:
        session.abandoned_at = now
        self._abandoned[session.id] = None
        if not session.replies:
            self._idle[session.id] = None

    def end(self, session: Session, *, peer: int) -> bool:
        """The client said on the connection `peer` that it will not come back; said on an older one, it is no news."""
        if session.peer != peer:
            return False
        session.peer = None
        self._forget(session.id)
        return True

    def expire(self, now: float) -> list[bytes]:
        """Forget sessions whose clients have been away for too long, not too many at once; which they were."""
        forgotten: list[bytes] = []
        while self._abandoned and len(forgotten) < FORGOTTEN_AT_ONCE:
            id = next(iter(self._abandoned))
            abandoned_at = self._sessions[id].abandoned_at
            assert abandoned_at is not None, "an abandoned session knows since when"
            if now - abandoned_at < self._ttl:
                break
            self._forget(id)
            forgotten.append(id)
        return forgotten

    def make_way(self, id: bytes) -> list[bytes]:
        """Forget a session for a newcomer if there are as many as there may be; which it was.

        It is the one whose client has been away for longest of those that keep no reply: nothing is lost with it but
        that a request that never arrived can be told from one whose reply was lost.
        """
        if id in self._sessions or len(self._sessions) < self._max or not self._idle:
            return []
        idle = next(iter(self._idle))
        self._forget(idle)
        return [idle]

    def make_room(self, bytes_max: int) -> list[bytes]:
        """Forget sessions whose clients are away, the longest first, until there is room for replies; which they were.

        Their clients learn that nobody knows what became of what they had under way, as they would a little later.
        """
        forgotten = []
        while self._abandoned and self.held_bytes >= bytes_max:
            id = next(iter(self._abandoned))
            self._forget(id)
            forgotten.append(id)
        return forgotten

    def _forget(self, id: bytes) -> None:
        self._abandoned.pop(id, None)
        self._idle.pop(id, None)
        self._sessions.pop(id).forget()

    def restore(self, saved: Iterable[SavedSession], *, last: int, now: float, cost: Callable[[Response], int]) -> None:
        """Take up the sessions of an earlier life of this store; their clients have all the time to come back."""
        self._made = last
        for one in saved:
            session = self._sessions[one.id] = Session(one.id, one.number, self.tally)
            for request_id, response in one.replies:
                session.keep(request_id, response, cost(response))
            self._abandon(session, now)


def reply_cost(response: Response) -> int:
    """About how many bytes a kept reply holds on to."""
    if type(response) is Written or type(response) is Added:  # most are, and a `match` takes its time
        return REPLY
    if type(response) is CompareAndSetResult:
        return REPLY + _entry_cost(response.entry)
    match response:
        case TransactionResult(results=results):
            return REPLY * (1 + len(results)) + sum([_entry_cost(each) for each in results if type(each) is Entry])
        case Failed(message=message):
            return REPLY + len(message)
    return REPLY


def _entry_cost(entry: Entry | None) -> int:
    """What an entry takes that a reply holds on to, though its key may have been deleted."""
    return 0 if entry is None else ENTRY + key_bytes(entry.key) + len(entry.value)


def reply_cost_at_most(request: Request[Any], entries: Mapping[str, Entry]) -> int:
    """The same of the reply to a mutation that has not been made yet, on a store that holds these entries."""
    if isinstance(request, Guarded):
        request = request.request

    def size(key: str) -> int:
        entry = entries.get(key)
        return 0 if entry is None else len(entry.value)

    match request:
        case CompareAndSet(key=key, value=value):
            return REPLY + ENTRY + key_bytes(key) + max(size(key), len(value))
        case Transact(then=then, otherwise=otherwise):
            operations = then + otherwise
            written: dict[str, int] = {}
            for operation in operations:
                if isinstance(operation, Put | Append | Create):
                    written[operation.key] = written.get(operation.key, 0) + len(operation.value)

            def most(key: str) -> int:
                return ENTRY + key_bytes(key) + size(key) + written.get(key, 0)

            return REPLY + sum(
                REPLY + (most(operation.key) if isinstance(operation, Get | Create) else 0) for operation in operations
            )
    return REPLY
