"""A simulated node: what a handler and its coordinator do, step by step, around the same pure rooms.

Its scripts follow `rdzv.node.coordinator` and the design's "How a round goes" write for write, so that a crash or a
pause may strike between any two of them. What is pure is the real thing: `View`, `decide`, `follow`, `changes_since`,
`JoinClock`, `report_due`, and the follower's folding of the head.

`Seams` is where a bug can be planted, to see that the simulation would find it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import msgpack

from rdzv.core.decision import (
    Complete,
    JoinClock,
    Me,
    Parked,
    Refused,
    RoundToCheck,
    Rules,
    Wait,
    changes_since,
    decide,
    follow,
    report_due,
)
from rdzv.core.state import (
    BUCKET_SIZE,
    Assignment,
    Change,
    Closed,
    Keys,
    Member,
    NodeRecord,
    NodesLeft,
    NodesLost,
    NodesWaiting,
    Participant,
    Progress,
    Round,
    bucket_of,
    pack_members,
    pack_roster,
    unpack_members,
)
from rdzv.core.view import View
from rdzv.node.follower import Follower
from store import when
from store.messages import (
    CompareAndSet,
    CompareAndSetResult,
    Condition,
    Delete,
    DeletePrefix,
    Entry,
    Failed,
    Found,
    Get,
    Grant,
    Granted,
    Guarded,
    KeepAlive,
    List,
    Listing,
    Put,
    Revoke,
    Transact,
    TransactionResult,
)
from tests.sim.world import Ask, Machine, Process, Script, Sleep, World

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from store import Event, Store
    from tests.sim.checker import Checker

__all__ = ["LEADER_TTL", "TTL", "Node", "Seams", "commit_conditions"]

TTL = 2.0  # seconds, as all times here: short, so that little has to be simulated
DISCONNECT_TTL = 0.6
LEADER_TTL = 1.2
LEADER_DISCONNECT_TTL = 0.4
ELECTION_PER_NODE = 0.001
REFUSED_PAUSE = 0.2
ELECTION_MOST = 0.5


def commit_conditions(
    *, keys: Keys, term: int, last: Round | None, members: list[Member]
) -> dict[str, list[Condition]]:
    """What a commit is conditional on, by what it is for."""
    return {
        "term": [when.create_revision(keys.coordinator) == term],
        "round": [when.mod_revision(keys.round) == (last.revision if last else 0)],
        "closed": [when.missing(keys.closed)],
        "arrivals": [when.mod_revision(keys.node(member.node_id)) == member.arrival for member in members],
    }


@dataclass(frozen=True, slots=True)
class Seams:
    """Where a bug can be planted.

    Attributes:
        view: What coordinators see with.
        left_out: Which of the commit's conditions are forgotten.
        fenced: Whether writes to a round's shared store are conditional.
    """

    view: Callable[..., View] = View
    left_out: frozenset[str] = frozenset()
    fenced: bool = True


def _calls_for_regrouping(change: Change) -> bool:
    return isinstance(change, NodesLost | NodesLeft) or (isinstance(change, NodesWaiting) and change.count > 0)


class Node(Machine):
    """One process of one node.

    Attributes:
        assignment: The round it believes to be in, if in any.
        refused: Why it will never be in another, if so.
        spare: Whether it was told to be one, when it last looked.
        wants_out: It is to give up waiting, or to leave its round, at the next opportunity.
    """

    pauses = ((0.05, 0.5), (LEADER_TTL * 0.7, LEADER_TTL * 1.2), (LEADER_TTL * 0.7, LEADER_TTL * 1.2), (TTL, 2 * TTL))

    def __init__(
        self, world: World, node_id: str, *, keys: Keys, rules: Rules, checker: Checker, seams: Seams, patience: float
    ) -> None:
        super().__init__(world, node_id)
        self.keys, self.rules, self.checker, self.seams, self.patience = keys, rules, checker, seams, patience
        self.incarnation = f"{world.rng.getrandbits(32):08x}"
        self.follower = Follower(cast("Store", self), keys)
        self.assignment: Assignment | None = None
        self.refused: Refused | None = None
        self.spare = False
        self.wants_out = False
        self.settle = False  # to meet again once, and then to stay
        self._lease: int | None = None
        self._record = 0  # the revision of our record, as far as we know
        self._lapsed = False
        self._leading: int | None = None  # the lease of the role
        self._lost_role = False
        self._events: deque[Event] = deque()
        self.link.watch(keys.head, self._heard_head)
        self.link.on_reconnect = self._reconnected
        self.membership = self.run(self._take_part())
        self._keeper = self.run(self._keep())
        self._candidacy = self.run(self._be_ready())
        self._leader_keeper: Process | None = None

    def stop(self, *, noticed: bool = True, why: str = "ends") -> None:
        """End, as the process it is."""
        super().stop(noticed=noticed, why=why)
        if self._leader_keeper is not None:
            self._leader_keeper.kill()

    def poke(self) -> None:
        """Let everything look again."""
        self.membership.poke()
        self._candidacy.poke()

    # ------------------------------------------------------------------------------------------ as the shell does

    def _heard_head(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.follower._take(event)
        self.poke()

    def _reconnected(self) -> None:
        self._keeper.poke()  # the leases are to be kept by the new connection, before `disconnect_ttl` is over
        if self._leader_keeper is not None:
            self._leader_keeper.poke()

    def _keep(self) -> Script:
        """Keep the lease of the membership."""
        while True:
            yield Sleep(self.time() + TTL / 3)
            lease = self._lease
            if lease is None:
                continue
            response = yield Ask(KeepAlive(lease=lease))
            if isinstance(response, Failed) and self._lease == lease:
                self._lease, self._lapsed = None, True
                self.membership.poke()

    def _keep_role(self, lease: int) -> Script:
        while self._leading == lease:
            yield Sleep(self.time() + LEADER_TTL / 3)
            response = yield Ask(KeepAlive(lease=lease))
            if isinstance(response, Failed) and self._leading == lease:
                self._lost_role = True
                self._candidacy.poke()
                return

    # ------------------------------------------------------------------------------------------ taking part

    def _take_part(self) -> Script:
        while not self.follower.synced.is_set():
            yield Sleep()
        while True:
            if (yield from self._join()):
                yield from self._stay()
                if self.refused is not None:
                    yield from self._leave()
                    return
            elif self.refused is not None:
                return
            else:
                yield Sleep(self.time() + self.world.rng.uniform(0.2, 1.5))

    def _register(self, arrived_after: int) -> Generator[Ask | Sleep, Any, None]:
        """Create our record, or rewrite it: a new arrival."""
        record = NodeRecord(
            node_id=self.name,
            incarnation=self.incarnation,
            arrived_after=arrived_after,
            address=f"{self.name}.{self.incarnation}",
            port=self.world.rng.randrange(1024, 65536),
        )
        key = self.keys.node(self.name)
        while True:
            if self._lease is None:
                granted = yield Ask(Grant(ttl=TTL, disconnect_ttl=DISCONNECT_TTL))
                assert isinstance(granted, Granted)
                self._lease, self._record = granted.lease, 0
                self._keeper.poke()
            self._lapsed = False
            response = yield Ask(
                CompareAndSet(key=key, value=record.pack(), expected_revision=self._record, lease=self._lease)
            )
            if isinstance(response, Failed):
                self._lease = None  # it has lapsed meanwhile
                continue
            assert isinstance(response, CompareAndSetResult)
            if response.succeeded:
                assert response.entry is not None
                self._record = response.entry.mod_revision
                return
            held = response.entry
            if held is None:
                self._record = 0
            elif NodeRecord.unpack(self.name, held.value, arrival=held.mod_revision).incarnation == self.incarnation:
                self._record = held.mod_revision
            else:
                yield Sleep(self.time() + TTL / 3)  # a live node holds this name: wait until it is gone

    def _join(self) -> Generator[Ask | Sleep, Any, bool]:
        """Wait for the next round. True once in it, False if this node has given up."""
        clock = JoinClock(self.patience, now=self.time())
        me = yield from self._arrive()
        while True:
            if self._lapsed or self._lease is None:
                me = yield from self._arrive()
            answer = follow(me, self.follower.head, now=self.time())
            self.spare = isinstance(answer, Parked) and answer.reason.startswith("a spare")
            match answer:
                case Refused():
                    self.refused = answer
                    return False
                case RoundToCheck(round=round):
                    rank = yield from self._look_up(round, me.arrival)
                    if rank is not None:
                        self.checker.learned(self.name, round, rank, me.arrival)
                        self.assignment = Assignment(round=round, rank=rank)
                        return True
                    me = replace(me, passed_over=round.revision)
                case Parked(suspended=suspended):
                    clock.set(suspended=suspended, now=self.time())
                    if self.wants_out or not clock.left(self.time()):
                        self.wants_out = False
                        if (yield from self._withdraw(me.arrival)):
                            return False
                    else:
                        yield Sleep(clock.deadline(self.time()))

    def _arrive(self) -> Generator[Ask | Sleep, Any, Me]:
        known = self.follower.head.round
        number = known.number if known else -1
        was_member = self.assignment is not None and self.assignment.round.number == number
        self.assignment = None
        yield from self._register(number)
        return Me(arrival=self._record, known_round=number, was_member=was_member)

    def _look_up(self, round: Round, arrival: int) -> Generator[Ask | Sleep, Any, int | None]:
        bucket = bucket_of(self.name, round.buckets)
        found = yield Ask(Get(self.keys.ranks(round.number, round.term, bucket)))
        assert isinstance(found, Found)
        if found.entry is None:
            return None  # a later round has completed already
        for member in unpack_members(found.entry.value):
            if member.node_id == self.name and member.arrival == arrival:
                return member.rank
        return None

    def _withdraw(self, arrival: int) -> Generator[Ask | Sleep, Any, bool]:
        """Give up, unless a round has completed meanwhile: it may hold this node."""
        known = self.follower.head.round
        key = self.keys.node(self.name)
        self.world.disturbed(f"{self.name} gives up", lasting=0.3)
        result = yield Ask(
            Transact(
                when=(
                    when.mod_revision(self.keys.round) == (known.revision if known else 0),
                    when.mod_revision(key) == arrival,
                ),
                then=(Delete(key),),
                otherwise=(Get(self.keys.round), Get(key)),
            )
        )
        assert isinstance(result, TransactionResult)
        if result.succeeded:
            self._record = 0
            return True
        round_entry, own = result.results
        if isinstance(round_entry, Entry):
            self.follower.take_round(Round.unpack(round_entry.value, revision=round_entry.mod_revision))
        if own is None:
            self._lapsed = True
        return False

    def _stay(self) -> Generator[Ask | Sleep, Any, None]:
        """Be in a round, until it is time to meet again."""
        assert self.assignment is not None
        round, rng = self.assignment.round, self.world.rng
        arrival = self._record
        seen: list[Change] = []
        until = self.time() + rng.expovariate(1 / 3)
        write_at = self.time() + rng.uniform(0, 1)
        while True:
            head = self.follower.head
            changes = changes_since(seen, head, round=round, dropped="lapsed" if self._lapsed else None)
            for change in changes:
                assert change not in seen
                seen = [other for other in seen if type(other) is not type(change)] + [change]
            if head.closed is not None:
                self.refused = Refused(closed=head.closed)
                return
            if self._lapsed or (head.round is not None and head.round.number > round.number):
                return
            if any(_calls_for_regrouping(change) for change in seen):
                until = min(until, self.time() + rng.uniform(0, 0.2))
            elif self.world.calm:
                until = float("inf")
            if self.settle:
                self.settle, until = False, self.time()
            if self.wants_out:
                self.wants_out = False
                yield from self._leave()
                return
            if self.time() >= until:
                return
            if self.time() >= write_at:
                write_at = self.time() + 0.5
                yield from self._write_shared(round, arrival)
                continue
            yield Sleep(min(until, write_at))

    def _write_shared(self, round: Round, arrival: int) -> Generator[Ask | Sleep, Any, None]:
        key = f"{self.keys.shared(round.number, round.term)}{self.name}"
        put = Put(key, msgpack.packb((self.name, arrival, round.number)))
        fence = (
            when.mod_revision(self.keys.round) == round.revision,
            when.mod_revision(self.keys.node(self.name)) == arrival,
        )
        response = yield Ask(Guarded(when=fence, request=put) if self.seams.fenced else put, peril=6)
        self.checker.refused_write(self.name, round, arrival, refused=isinstance(response, Failed))

    def _leave(self) -> Generator[Ask | Sleep, Any, None]:
        """Leave on our own account, saying so first."""
        self.world.disturbed(f"{self.name} leaves", lasting=0.3)
        self.assignment = None
        key = self.keys.node(self.name)
        record = NodeRecord(node_id=self.name, incarnation=self.incarnation, left=True)
        if self._lease is None or not self._record:
            return
        response = yield Ask(
            CompareAndSet(key=key, value=record.pack(), expected_revision=self._record, lease=self._lease)
        )
        if isinstance(response, CompareAndSetResult) and response.succeeded:
            assert response.entry is not None
            yield Ask(Transact(when=(when.mod_revision(key) == response.entry.mod_revision,), then=(Delete(key),)))
        self._record = 0

    def close_run(self, reason: str) -> None:
        """Close the run; the first who does wins."""
        closed = Closed(reason=reason, by=self.name)
        self.ask(CompareAndSet(key=self.keys.closed, value=closed.pack(), expected_revision=0), lambda _: None)

    # ------------------------------------------------------------------------------------------ coordinating

    def _be_ready(self) -> Script:
        rng = self.world.rng
        while not self.follower.synced.is_set():
            yield Sleep()
        while True:
            while self.follower.head.coordinator is not None or self.follower.head.closed is not None:
                yield Sleep()
            progress = self.follower.head.progress
            known = progress.joined + progress.live if progress else 1
            yield from self._pause(rng.uniform(0, min(ELECTION_PER_NODE * max(known, 1), ELECTION_MOST)))
            if self.follower.head.coordinator is None:
                yield from self._take_role()

    def _pause(self, seconds: float) -> Generator[Ask | Sleep, Any, None]:
        until = self.time() + seconds
        while self.time() < until - 1e-9:
            yield Sleep(until)

    def _take_role(self) -> Generator[Ask | Sleep, Any, None]:
        granted = yield Ask(Grant(ttl=LEADER_TTL, disconnect_ttl=LEADER_DISCONNECT_TTL))
        assert isinstance(granted, Granted)
        lease = self._leading = granted.lease
        self._lost_role = False
        self._leader_keeper = self.run(self._keep_role(lease))
        taken = yield Ask(
            CompareAndSet(key=self.keys.coordinator, value=self.name.encode(), expected_revision=0, lease=lease)
        )
        if isinstance(taken, CompareAndSetResult) and taken.succeeded:
            assert taken.entry is not None
            yield from self._lead(taken.entry.create_revision)
        elif self.follower.head.coordinator is None:
            yield Sleep(self.time() + ELECTION_MOST)
        self._leading = None
        self._leader_keeper.kill()
        yield Ask(Revoke(lease=lease))

    def _lead(self, term: int) -> Generator[Ask | Sleep, Any, None]:
        """Decide, and do what was decided, until the role is lost or the run is closed."""
        keys, in_office = self.keys, when.create_revision(self.keys.coordinator) == term
        view = self.seams.view(nodes_prefix=keys.nodes, needed=self.rules.needed)
        reported = yield from self._take_over(view, in_office)
        reported_at = self.follower.head.progress_at
        events: deque[Event] = deque()

        def heard(some: tuple[Event, ...]) -> None:
            events.extend(some)
            self._candidacy.poke()

        end_watch = self.link.watch(keys.nodes, heard)
        while not self._lost_role:
            now = self.time()
            while events:
                view.fold(events.popleft(), now=now, last_call_timeout=self.rules.last_call)
            if not view.synced:
                yield Sleep()
                continue
            closed = self.follower.head.closed is not None
            decision = decide(view, self.rules, closed=closed, now=now)
            if isinstance(decision, Complete):
                if not (yield from self._commit(view, decision, term, in_office)):
                    break
                continue
            assert isinstance(decision, Wait)
            progress = decision.progress
            nodes = progress.joined + progress.live
            due = report_due(reported, reported_at, progress, nodes=nodes, now=now)
            if due is not None and due <= now:
                put = Put(keys.progress, progress.pack())
                response = yield Ask(Guarded(when=(in_office,), request=put))
                if isinstance(response, Failed):
                    break
                reported, reported_at = progress, now
                due = report_due(progress, now, progress, nodes=nodes, now=now)
            if closed and reported == progress:
                break
            wakes = [at for at in (due, decision.until) if at is not None]
            yield Sleep(min(wakes, default=None))
        end_watch()

    def _take_over(self, view: View, in_office: Condition) -> Generator[Ask | Sleep, Any, Progress | None]:
        head = self.follower.head
        found = yield Ask(Get(self.keys.round))
        assert isinstance(found, Found)
        round, members = None, []
        if found.entry is not None:
            round = Round.unpack(found.entry.value, revision=found.entry.mod_revision)
            for index in range(round.buckets):
                bucket = yield Ask(Get(self.keys.ranks(round.number, round.term, index)))
                assert isinstance(bucket, Found)
                if bucket.entry is not None:  # else we are not in office any more
                    members.extend(unpack_members(bucket.entry.value))
        view.took_over(round, members, head.progress, progress_at=head.progress_at)
        keep = self.keys.attempt(round.number, round.term) if round else None
        listing = yield Ask(List(prefix=self.keys.rounds, keys_only=True))
        assert isinstance(listing, Listing)
        attempts = {"/".join(entry.key.split("/")[:6]) + "/" for entry in listing.entries if entry is not None}
        for prefix in sorted(attempts):
            if prefix != keep:
                yield Ask(Guarded(when=(in_office,), request=DeletePrefix(prefix=prefix)))
        return head.progress

    def _commit(
        self, view: View, decision: Complete, term: int, in_office: Condition
    ) -> Generator[Ask | Sleep, Any, bool]:
        """Write the buckets, and then the round. False if the role is lost."""
        keys, number = self.keys, decision.number
        members = [
            Member(node_id=record.node_id, rank=rank, arrival=record.arrival)
            for rank, record in enumerate(decision.members)
        ]
        first = decision.members[0]
        buckets = -(-len(members) // BUCKET_SIZE)
        for index in range(buckets):
            ranks = [member for member in members if bucket_of(member.node_id, buckets) == index]
            low = index * BUCKET_SIZE
            roster = [
                Participant(node_id=record.node_id, rank=low + offset, address=record.address)
                for offset, record in enumerate(decision.members[low : low + BUCKET_SIZE])
            ]
            for write in (
                Put(keys.ranks(number, term, index), pack_members(ranks)),
                Put(keys.roster(number, term, index), pack_roster(roster)),
            ):
                response = yield Ask(Transact(when=(in_office,), then=(write,)))
                if isinstance(response, Failed) or not response.succeeded:
                    return False
        round = Round(number=number, term=term, size=len(members), buckets=buckets, host=first.address, port=first.port)
        last = view.round
        conditions = commit_conditions(keys=keys, term=term, last=last, members=members)
        result = yield Ask(
            Transact(
                when=tuple(
                    condition
                    for kind, some in conditions.items()
                    if kind not in self.seams.left_out
                    for condition in some
                ),
                then=(Put(keys.round, round.pack()),),
            ),
            peril=40,
        )
        assert isinstance(result, TransactionResult)
        if not result.succeeded:
            found = yield Ask(Get(keys.coordinator))
            assert isinstance(found, Found)
            if found.entry is None or found.entry.create_revision != term:
                return False
            yield Sleep(self.time() + REFUSED_PAUSE)
            return True
        committed = replace(round, revision=result.revision)
        view.completed(committed, members, now=self.time())
        self.follower.take_round(committed)
        self.poke()
        if last is not None:
            prefix = f"{keys.rounds}{last.number}/"
            yield Ask(Guarded(when=(in_office,), request=DeletePrefix(prefix=prefix)))
        return True
