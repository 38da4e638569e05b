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

import math
from bisect import bisect_left
from collections import OrderedDict
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from store.messages import (
    Add,
    Added,
    CompareAndSet,
    CompareAndSetResult,
    Delete,
    Entry,
    Failed,
    Get,
    Guarded,
    Response,
    Transact,
    TransactionResult,
    Written,
    key_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from store.engine.changeset import SavedSession
    from store.messages import Operation, Request

__all__ = ["Budget", "Session", "Sessions", "reply_cost", "reply_cost_at_most"]

AWAY_LEAST = 10.0  # seconds that a session keeps its place though a newcomer finds none
FORGOTTEN_AT_ONCE = 512  # sessions: about a millisecond
REPLY = 100  # bytes of bookkeeping for any reply that is kept, or any result in one
ENTRY = 200  # and for an entry in it


_request_id = itemgetter(0)  # of a reply that is kept


class Budget:
    """How many bytes several of a kind hold together; each of them counts its own."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes: int = 0


class Session:
    """One client's replies, and the connection it has now, if any; what they hold is counted in `budget`, too.

    Attributes:
        highest: The last of its mutations that was applied.
        held_bytes: About how many bytes the replies hold on to.
    """

    __slots__ = ("_budget", "_replies", "held_bytes", "highest", "id", "number", "peer")

    def __init__(self, id: bytes, number: int, budget: Budget) -> None:
        self.id: bytes = id
        self.number: int = number
        self.peer: int | None = None
        # The request, its reply, its cost; oldest first. A list: an empty deque takes 760 bytes.
        self._replies: list[tuple[int, Response, int]] = []
        self._budget = budget
        self.held_bytes: int = 0
        self.highest: int = 0

    @property
    def replies(self) -> int:
        """How many replies are kept."""
        return len(self._replies)

    def keep(self, request_id: int, response: Response) -> None:
        """Keep the reply to a mutation that was just applied."""
        assert request_id > self.highest, "requests of a session are applied in order"
        cost = reply_cost(response)
        self.highest = request_id
        self._replies.append((request_id, response, cost))
        self.held_bytes += cost
        self._budget.bytes += cost

    def replay(self, request_id: int) -> Response | None:
        """What was answered to a mutation that was applied; None if nobody knows any more."""
        place = bisect_left(self._replies, request_id, key=_request_id)
        if place < len(self._replies) and self._replies[place][0] == request_id:
            return self._replies[place][1]
        return None

    def acknowledge(self, up_to: float) -> None:
        """The client has the replies to all its mutations up to this request."""
        count = freed = 0
        for request_id, _, cost in self._replies:
            if request_id > up_to:
                break
            count += 1
            freed += cost
        del self._replies[:count]
        self.held_bytes -= freed
        self._budget.bytes -= freed


class Sessions:
    """All sessions of a store; what their replies hold is counted in `budget`.

    Attributes:
        made: How many there have ever been; the number of the newest.
    """

    def __init__(self, *, ttl: float, sessions_max: int) -> None:
        self._ttl, self._max = ttl, sessions_max
        self._sessions: dict[bytes, Session] = {}
        self.made: int = 0
        self.budget: Budget = Budget()
        self._abandoned: OrderedDict[bytes, float] = OrderedDict()  # since when they have no connection, longest first

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, id: bytes, *, peer: int) -> tuple[Session, int | None] | None:
        """Give a session to a connection; the caller has let those expire that are due.

        Returns:
            The session, and the peer that had it until now; None if there are too many.
        """
        session = self._sessions.get(id)
        if session is None:
            if len(self._sessions) >= self._max:
                return None
            self.made += 1
            session = self._sessions[id] = Session(id, self.made, self.budget)
        self._abandoned.pop(id, None)
        previous, session.peer = session.peer, peer
        return session, previous

    def close(self, session: Session, *, peer: int, now: float) -> None:
        """The connection `peer` of a session has closed; the session waits for its client to come back."""
        if session.peer == peer:
            session.peer = None
            self._abandoned[session.id] = now

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
            id, since = next(iter(self._abandoned.items()))
            if now - since < self._ttl:
                break
            forgotten.append(self._forget(id))
        return forgotten

    def make_way(self, id: bytes, now: float) -> list[bytes]:
        """Forget the session whose client has been away for longest if a newcomer finds no place; which it was.

        Its client, if it comes back, learns that nobody knows what became of a write that was under way.
        """
        if id in self._sessions or len(self._sessions) < self._max or self.place_in(now) > 0:
            return []
        return [self._forget(next(iter(self._abandoned)))]

    def place_in(self, now: float) -> float:
        """Seconds until a session can make way for a newcomer; infinity while all clients are connected."""
        return next(iter(self._abandoned.values()), math.inf) + AWAY_LEAST - now

    def make_room(self, bytes_max: int) -> list[bytes]:
        """Forget sessions whose clients are away, the longest first, until there is room for replies; which they were.

        Their clients learn that nobody knows what became of what they had under way, as they would a little later.
        """
        forgotten = []
        while self._abandoned and self.budget.bytes >= bytes_max:
            forgotten.append(self._forget(next(iter(self._abandoned))))
        return forgotten

    def _forget(self, id: bytes) -> bytes:
        self._abandoned.pop(id, None)
        self._sessions.pop(id).acknowledge(math.inf)
        return id

    def restore(self, saved: Iterable[SavedSession], *, last: int, now: float) -> None:
        """Take up the sessions of an earlier life of this store; their clients have all the time to come back.

        Those that wrote last, as far as their replies tell, make way last.
        """
        self.made = last
        for one in sorted(
            saved, key=lambda one: (max((_revision_in(reply) for _, reply in one.replies), default=0), one.number)
        ):
            session = self._sessions[one.id] = Session(one.id, one.number, self.budget)
            for request_id, response in one.replies:
                session.keep(request_id, response)
            self._abandoned[session.id] = now


def _revision_in(response: Response) -> int:
    """The revision that a reply tells of; 0 if it tells of none."""
    told = response.entry if isinstance(response, CompareAndSetResult) else response
    return int(getattr(told, "mod_revision", 0) or getattr(told, "revision", 0))


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
    """What the reply to a mutation would cost at most, on a store that holds these entries."""
    if isinstance(request, Guarded):
        request = request.request
    match request:
        case CompareAndSet():
            operations: tuple[CompareAndSet | Operation, ...] = (request,)
        case Transact(then=then, otherwise=otherwise):
            operations = then + otherwise
        case _:
            return REPLY
    written: dict[str, int] = {}
    for operation in operations:
        if not isinstance(operation, Get | Delete | Add):
            written[operation.key] = written.get(operation.key, 0) + len(operation.value)
    keys = [operation.key for operation in operations]  # each may give what is there, and what is written here
    there = sum(_entry_cost(entries.get(key)) + ENTRY + key_bytes(key) + written.get(key, 0) for key in keys)
    return REPLY * (1 + len(keys)) + there
