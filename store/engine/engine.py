"""Pure: the whole store as one state machine.

It is told the time and a request, and answers with what should now be said to whom; sockets, clocks and disks are the
server's. Every request takes effect at once and whole, which is all there is to its linearizability (promise S1).

The order of one `apply`:

    1. a mutation that this session has already made is answered with the reply kept for it, and nothing is done (S2);
    2. the request is checked against every limit, and refused before anything has changed (S6);
    3. its changes, if any, are made at the next revision, all at the same one;
    4. what they cause is collected: events for watches, answers to parked waits.

Leases lapse only in `tick`, which the server calls when `next_tick_in` says so, and after it has read what waited in
its sockets, and which is told of whom it has not carried everything out yet: a keep-alive that has arrived is never
overtaken by its own lease (S5).
"""

from __future__ import annotations

import math
from collections import deque
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from store.engine.applied import Answer, Applied, Delivery, Overtaken, Work
from store.engine.changes import Changes
from store.engine.changeset import Facts, KeptReply
from store.engine.keyspace import events_of
from store.engine.processes import Closing
from store.engine.requests import Requests
from store.engine.state import State
from store.errors import LimitExceeded, StoreError
from store.limits import Limits
from store.messages import (
    ERRORS,
    Failed,
    FailureKind,
    Granted,
    Request,
    Response,
    mutates,
    only_takes_away,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from store.engine.changeset import Saved
    from store.engine.keyspace import Groups
    from store.engine.sessions import Session
    from store.engine.waits import Postponed
    from store.engine.watches import Watcher

__all__ = ["Answer", "Applied", "Delivery", "Engine", "Overtaken", "Work"]

NOBODY: Final = MappingProxyType[int, float]({})
WRITES_ON_A_FULL_DISK = 512  # keys of one change: each may take a page of 4 KiB, of the 4 MiB that there are
LAPSES_AT_ONCE = 256  # leases that one tick ends; the next one comes a millisecond later
WAITS_AT_ONCE = 512  # that one change may end in its own step: about four milliseconds ...
WAITED_KEYS_AT_ONCE = 16_384  # ... or as many keys as one wait may have


ENDED = object()

_make_applied = tuple.__new__  # a named tuple's own constructor takes twice as long, and every request makes one

_KINDS = {error: kind for kind, error in ERRORS.items()}


class Engine:
    """The state of a store.

    Args:
        store_id: The random identity of this store (promise S10).
        limits: What clients may ask of it.
        durable: Whether somebody takes the facts and keeps them (promise S3).

    Attributes:
        read_only: Why nothing can be written now; None if it can.
        writable_bytes: What such a small write may have; 0 if there may be none.
        postponed: The waits that changes have ended and that are still to be answered, by `do_chore`.
        has_chores: Whether something is left to be done by `do_chore`.
    """

    def __init__(self, *, store_id: str, limits: Limits | None = None, durable: bool = False) -> None:
        self.store_id = store_id
        self.limits: Limits = limits or Limits()
        self.read_only: str | None = None
        self._only_deletes: str | None = None
        self.writable_bytes: int = 0
        self._state = state = State(self.limits)
        self._keys, self._leases, self._sessions = state.keys, state.leases, state.sessions
        self._watches, self._waits = state.watches, state.waits
        self.postponed: Postponed = state.postponed
        self._history, self._snapshots = state.history, state.snapshots
        self._replies = state.sessions.budget
        self._session_of: dict[int, Session] = {}
        self._changes = Changes(state, facts=Facts() if durable else None)
        self._asked = Requests(state, self._changes, figures=self.figures)
        self._ends: deque[Iterator[None]] = deque()  # what is left to be done for peers that have gone
        self.has_chores: bool = False
        self._works: dict[int, Work] = {}  # by peer, each of which has one at most
        self._requests = 0
        self._now = -math.inf  # the reading of the clock at the last request
        self._lapsed = 0

    @property
    def groups(self) -> Groups:
        """What each group of keys takes."""
        return self._keys.groups

    @property
    def only_deletes(self) -> str | None:
        """Why nothing but deletes, and small writes, can be written now; None if more can."""
        return self._only_deletes

    @only_deletes.setter
    def only_deletes(self, why: str | None) -> None:
        self._only_deletes = why
        self._state.writes_max = min(self.limits.writes_max, WRITES_ON_A_FULL_DISK if why else self.limits.writes_max)

    @property
    def memory_bytes(self) -> int:
        """What the store takes in memory, without what its server holds for its connections and its disk."""
        return self._state.memory_bytes

    @property
    def unread_bytes(self) -> int:
        """What is kept of earlier revisions for those who read it in parts."""
        return self._snapshots.held_bytes

    @property
    def slowest_reader(self) -> int | None:
        """The peer for which most of that is kept, if anything is."""
        return self._snapshots.oldest_reader

    def count_elsewhere(self, held: Callable[[], int]) -> None:
        """The server tells by `held` what it holds for its connections and its disk, whatever is asked of the store."""
        self._state.held_elsewhere = held

    @property
    def revision(self) -> int:
        """How many changes there have been."""
        return self._keys.revision

    @classmethod
    def restore(cls, saved: Saved, *, limits: Limits | None = None, now: float) -> Engine:
        """A durable store as it was saved; it goes on from there."""
        engine = cls(store_id=saved.store_id, limits=limits, durable=True)
        engine._keys.revision = saved.revision
        engine._keys.groups.now = now
        engine._leases.restore(saved.leases, last=saved.last_lease)
        for entry in saved.entries:
            engine._keys.put(entry, None)
            lease = engine._leases.with_keys(entry.lease) if entry.lease is not None else None
            if lease is not None:
                lease.keys[entry.key] = None
        engine._history.restore(saved.history, compacted=saved.compacted)
        engine._sessions.restore(saved.sessions, last=saved.last_session, now=now)
        return engine

    def take_facts(self) -> Facts | None:
        """What must be made durable before anything of it is said; None if there is nothing."""
        facts = self._changes.facts
        if not facts:
            return None
        self._changes.facts = Facts()
        return facts

    # --------------------------------------------------------------------------------------- connections

    def connect(
        self, peer: int, *, session_id: bytes, now: float, process: bytes = b""
    ) -> tuple[int, int | None] | None:
        """A client has said hello; `process` is the one it is in, as far as it says.

        Returns:
            The number of its session, and the peer that had it until now and should be closed; None if there are too
            many sessions.
        """
        self._note_forgotten(self._sessions.expire(now) + self._sessions.make_way(session_id, now))
        made = self._sessions.made
        opened = self._sessions.open(session_id, peer=peer)
        if opened is None:
            return None
        session, previous = opened
        self._leases.peer_connected(peer, process, previous=previous)
        if self._changes.facts is not None and self._sessions.made != made:
            self._changes.facts.opened(session.id, session.number)
        self._session_of[peer] = session
        return session.number, previous

    def place_in(self, now: float) -> float:
        """Seconds until there may be a session for a newcomer that got none; infinity if nobody knows."""
        return self._sessions.place_in(now)

    def disconnect(self, peer: int, *, now: float, how: Closing) -> None:
        """The connection of `peer` has closed."""
        self._leases.advance(now)
        work = self._works.pop(peer, None)
        snapshot = None if work is None else work.snapshot
        if snapshot is not None:
            self._snapshots.end(snapshot)
        leases = self._leases.peer_closed(peer, how)
        unread = () if snapshot is None else snapshot.let_go()
        end = chain(leases, self._watches.peer_closed(peer), self._waits.peer_closed(peer), unread)
        if self._ends or next(end, ENDED) is not ENDED:  # thousands of connections may end together, too
            self._ends.append(end)
        self.has_chores = bool(self.has_chores or self._ends or self._state.past)
        session = self._session_of.pop(peer, None)
        if session is not None:
            if how is Closing.GOODBYE:
                if self._sessions.end(session, peer=peer) and self._changes.facts is not None:
                    self._changes.facts.forgotten(session.id)
            else:
                self._sessions.close(session, peer=peer, now=now)

    def _note_forgotten(self, forgotten: list[bytes]) -> None:
        if self._changes.facts is not None:
            for session_id in forgotten:
                self._changes.facts.forgotten(session_id)

    def end_watch(self, peer: int, watch_id: int) -> bool:
        """The server drops a watch whose reader is too slow; False if it was closed already."""
        return self._watches.remove(peer, watch_id)

    # ------------------------------------------------------------------------------------------ requests

    def apply(self, request: Request[Any], peer: int, request_id: int, acknowledged: int, now: float) -> Applied:
        """Carry out one request at once.

        Args:
            request: What is asked.
            peer: The connection it came on, which has said hello.
            request_id: The number its client gave it, counting upwards; watches and waits are known by it.
            acknowledged: Up to which of its requests the client has all replies to mutations.
            now: Seconds on the server's monotonic clock; never less than in an earlier call.
        """
        self._requests += 1
        if now != self._now:  # what the sockets have brought together is done at one reading of the clock
            self._now = self._keys.groups.now = now
            self._leases.advance(now)
        session = self._session_of[peer]
        if session.held_bytes:  # else it keeps no reply
            session.acknowledge(acknowledged)
        changes = mutates(request)
        if changes:
            if request_id <= session.highest:
                return Applied(response=self._replay(session, request_id, peer))
            try:
                self._check_mutation(session, request)
            except LimitExceeded as error:  # not kept: there is no room for it, and it says that nothing was done
                return Applied(response=_failed(error))
        try:
            response = self._asked.carry_out(request, peer, request_id)
        except StoreError as error:
            assert not self._changes.made, "a refused request has changed nothing"
            response = _failed(error)
        if self._changes.made:
            self._announce()
        work = self._asked.work
        if work is not None:
            self._works[peer], self._asked.work = work, None
        if changes and response is not None:
            session.keep(request_id, response)
            if self._changes.facts is not None:
                self._changes.facts.replies.append(
                    KeptReply(
                        session_id=session.id, acknowledged=acknowledged, request_id=request_id, response=response
                    )
                )
        return _make_applied(Applied, (response, self._take_deliveries() if self._asked.deliveries else (), work))

    def go_on(self, work: Work) -> Applied:
        """Do the next step of a request that takes several. What others have done meanwhile is not seen by it."""
        response = self._asked.go_on(work)
        more, self._asked.work = self._asked.work, None
        if more is None:
            del self._works[work.watcher[0]]
            self.has_chores = self.has_chores or bool(self._state.past)
        return _make_applied(Applied, (response, self._take_deliveries(), more))

    def _check_mutation(self, session: Session, request: Request[Any]) -> None:
        """Refuse a mutation that cannot be made, or whose reply could not be kept."""
        if self.read_only is not None:
            raise LimitExceeded(
                f"nothing was written, because the store takes no writes now: {self.read_only}; reading goes on"
            )
        if self._only_deletes is not None and not only_takes_away(request):
            size = self._state.written_bytes(request)
            if size > self.writable_bytes:
                small = f" and writes of {self.writable_bytes} bytes" if self.writable_bytes else ""
                raise LimitExceeded(
                    f"nothing was written, because the store takes only deletes{small} now, and this has {size}: "
                    f"{self._only_deletes}; delete something"
                )
        full = self._replies.bytes >= self.limits.replies_bytes_max
        if full:
            self._note_forgotten(self._sessions.make_room(self.limits.replies_bytes_max))
        if full or session.held_bytes:
            self._state.check_reply(session, request)

    def _take_deliveries(self) -> tuple[Delivery | Answer | Overtaken, ...]:
        if not self._asked.deliveries:
            return ()
        deliveries, self._asked.deliveries = tuple(self._asked.deliveries), []
        return deliveries

    def _replay(self, session: Session, request_id: int, peer: int) -> Response:
        """What was answered to a mutation that this session has already made."""
        replayed = session.replay(request_id)
        if replayed is None:
            message = f"request {request_id} was applied before the connection broke, but its reply is no longer kept"
            return Failed(kind=FailureKind.FORGOTTEN, message=message)
        if isinstance(replayed, Granted):
            # Who asks again for a lease it was granted has come back: it keeps that lease, as if it had renewed it.
            lease = self._leases.get(replayed.lease)
            if lease is not None:
                self._leases.keep_alive(lease, peer=peer)
        return replayed

    def tick(self, *, now: float, unheard: Mapping[int, float] = NOBODY) -> tuple[Delivery | Answer | Overtaken, ...]:
        """Let leases lapse whose time is over, each at a revision of its own, and sessions that were abandoned.

        What is due goes in several ticks if it is much, so that others are served in between: it is due again at once.

        Args:
            now: Seconds on the server's monotonic clock.
            unheard: Peers that may have sent keep-alives which were not carried out yet, and for how many seconds at
                most those may have waited: what came due since then stays for now.
        """
        self._leases.advance(now)
        room = self._state.writes_max
        for lease in self._leases.due(most=LAPSES_AT_ONCE):
            if room <= 0:
                self._leases.due_again(lease)
                continue
            if lease.keeper is not None and self._leases.was_due_for(lease) < unheard.get(lease.keeper, 0.0):
                self._leases.look_again(lease)
                continue
            self._lapsed += not lease.ending
            most = self._watches.affordable([*islice(lease.keys, room)])
            ended = self._changes.end_lease(lease, most=most, cause=lease.cause)
            room = room - ended if self._watches.quick_to_ask else 0
            if lease.keys:
                self._leases.due_again(lease)
            self._announce()
        self._note_forgotten(self._sessions.expire(now))
        return self._take_deliveries()

    def next_tick_in(self) -> float | None:
        """Seconds until the next lease may lapse; None if there is none."""
        return self._leases.next_due_in()

    def look(self, *, now: float) -> bool:
        """Keep served time up to date; True if a lease is due. The server looks at least every 0.1 s."""
        self._leases.advance(now)
        due = self._leases.next_due_in()
        return due is not None and due <= 0

    def figures(self) -> dict[str, Any]:
        """The counters that `stats()` shows."""
        return {
            "store_id": self.store_id,
            "revision": self.revision,
            "keys": len(self._keys.entries),
            "stored_bytes": self._keys.bytes,
            "groups": len(self._keys.groups),
            "history_bytes": self._history.bytes,
            "compacted_revision": self._history.compacted,
            "leases": len(self._leases),
            "leases_lapsed": self._lapsed,
            "watches": len(self._watches),
            "waits": len(self._waits),
            "parked_bytes": self._watches.bytes + self._waits.bytes,
            "sessions": len(self._sessions),
            "replies_bytes": self._replies.bytes,
            "unread_bytes": self.unread_bytes,
            "memory_bytes": self.memory_bytes,
            "requests": self._requests,
        }

    # -------------------------------------------------------------------------------------- making a change

    def _announce(self) -> None:
        """Close the revision being made, if anything changed, and collect who must hear of it."""
        if not self._changes.made:
            return
        changes = self._changes.close()
        self._history.append(changes)
        if self._changes.facts is not None:
            self._changes.facts.revisions.append(events_of(changes))
            self._changes.facts.compacted = self._history.compacted
        if self._watches.by_prefix:
            for watchers, about in self._watches.interested(changes):
                self._asked.deliveries.append(Delivery(watchers=watchers, events=events_of(about)))
        if self._waits.parked and (stirred := self._waits.stirred(changes)):
            self._look_at_waits(stirred)

    def _look_at_waits(self, stirred: list[tuple[dict[str, dict[Watcher, None]], str]]) -> None:
        """Answer the waits that a change has ended, now or, if they are many, in steps to come."""
        if sum(len(standing[key]) for standing, key in stirred) <= WAITS_AT_ONCE:
            watchers = {watcher: None for standing, key in stirred for watcher in standing[key]}
            if self._waits.weigh(watchers) <= WAITED_KEYS_AT_ONCE:
                if self.postponed:
                    # A wait that is to be looked at later anyway is looked at for this change then, after those that
                    # came before it: looked at now, it would be answered though its condition has failed in between.
                    watchers = {watcher: None for watcher in watchers if self._waits.stands(watcher)}
                for standing, key in stirred:
                    del standing[key]
                self._asked.look_at_waits(watchers)
                return
        self.postponed.add([standing.pop(key) for standing, key in stirred], self.revision)
        self.has_chores = True

    # -------------------------------------------------------------------------------------- what is left for later

    def do_chore(self) -> tuple[Delivery | Answer | Overtaken, ...]:
        """Do some of what is left to be done: answer waits, the first change's first, and let go of who has gone."""
        if self.postponed:
            self._asked.look_at_postponed()
        if self._ends and next(self._ends[0], ENDED) is ENDED:
            self._ends.popleft()
        is_past_left = self._state.forget_past()
        self.has_chores = bool(self.postponed or self._ends or is_past_left)
        return self._take_deliveries()


def _failed(error: StoreError) -> Failed:
    return Failed(kind=_KINDS[type(error)], message=str(error))
