"""S11: "No legal request, and no heap of them, holds the others up for more than 50 ms: work is done in turns."

What a turn takes is counted in the pure parts and on a stopwatch that is told what each look costs, so that a busy
machine changes nothing. One run is honest: real sockets, a real clock, and bounds from a baseline of the same run.
`python -m benchmarks.fairness` plays every kind at its limit, and prints what a bystander waits.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

import store
from rdzv.testing.network import MemoryNetwork
from store import Add, Append, Delete, Get, Grant, Limits, Put, Server, when
from store.engine.applied import Delivery
from store.engine.engine import WAITS_AT_ONCE, Engine
from store.engine.processes import Closing
from store.engine.requests import LOOKS_A_STEP, LOOKS_OF_A_WAIT
from store.engine.snapshots import STEP_KEYS
from store.messages import (
    Cancel,
    Count,
    Counted,
    DeletePrefix,
    Failed,
    GetMany,
    Guarded,
    KeepAlive,
    List,
    Listing,
    ListingPart,
    Ping,
    Pong,
    Revoke,
    Transact,
    Wait,
    Watch,
)
from store.protocol import wire
from store.protocol.wire import Events, Reply
from store.server.telling import AT_ONCE
from store.server.turns import PASS, TURN
from tests.support.by_hand import Desk
from tests.support.stores import Peer, introduce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from store.server.conversations import Conversations

K = 1000


class Stopwatch:
    """Says that a millisecond has passed with every look: so a turn is a few requests, however quick the machine."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.001
        return self.seconds


class Timed:
    """Notes how long each ping has waited from its arrival until it is carried out."""

    def __init__(self, conversations: Conversations, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._received, self._apply = conversations.received, conversations._apply
        self._arrived: dict[int, float] = {}
        self.waits: list[float] = []
        self.peers = conversations.telling._peers.by_id
        conversations.received = self.received  # type: ignore[method-assign]
        conversations._apply = self.apply  # type: ignore[method-assign]

    def received(self, peer: Any, size: int) -> None:
        self._arrived[peer.id] = self._stopwatch()
        self._received(peer, size)

    def apply(self, peer: Any, asked: Any, now: float, **how: Any) -> Any:
        if type(asked[2]) is Ping:
            self.waits.append(self._stopwatch() - self._arrived[peer.id])
        return self._apply(peer, asked, now, **how)


def serve_counted(network: MemoryNetwork, engine: Engine) -> Timed:
    stopwatch = Stopwatch()
    server = Server(engine, clock=asyncio.get_running_loop().time, stopwatch=stopwatch)
    network.listen("store", server.protocol)
    return Timed(server.conversations, stopwatch)


def filled(count: int, **limits: Any) -> Desk:
    desk = Desk(**limits)
    for first in range(0, count, K):
        desk.ask(Transact(when=(), then=tuple(Put(f"k/{n:06}", b"v") for n in range(first, first + K))), peer=9)
    return desk


@pytest.mark.virtual_time
async def test_s11_a_heap_of_requests_is_carried_out_in_turns_and_others_come_in_between() -> None:
    """ "no heap of them": 18,000 requests in 251 kB kept a bystander waiting for 37 s."""
    network = MemoryNetwork()
    engine = Engine(store_id="it")
    timed = serve_counted(network, engine)
    greedy, bystander = await introduce(network, source="greedy"), await introduce(network, source="bystander")
    heap = greedy.ask(*[Count(prefix="k")] * 5000)
    for _ in range(20):
        await bystander.answer(*bystander.ask(Ping()))
    assert len(greedy.replies()) < 2000, "the heap is not done yet"
    assert len(timed.waits) == 20
    assert max(timed.waits) < 0.05
    await greedy.answer(heap[-1])
    assert [reply.request_id for reply in greedy.replies()] == heap, "in order, and nobody is dropped"


@pytest.mark.virtual_time
async def test_s11_many_heaps_together_hold_nobody_up_for_longer_than_one() -> None:
    """A pass of the loop does no more than so much for all of them together, and who asks little goes first."""
    network = MemoryNetwork()
    engine = Engine(store_id="it")
    timed = serve_counted(network, engine)
    greedy = [await introduce(network, source=f"greedy {number}") for number in range(12)]
    bystander = await introduce(network, source="bystander")
    last = [peer.ask(*[Count(prefix="k")] * 500)[-1] for peer in greedy]
    for _ in range(20):
        await bystander.answer(*bystander.ask(Ping()))
    assert len(timed.waits) == 20
    assert max(timed.waits) < 0.05
    done = [len(peer.replies()) for peer in greedy]
    assert max(done) - min(done) < 50, "and all of them come forward alike"
    for peer, asked in zip(greedy, last, strict=True):
        await peer.answer(asked)


def steps_of(desk: Desk, request: Any) -> Iterator[Any]:
    """A request carried out step by step; what each step answers."""
    desk.connect(1)
    desk.last_id[1] = request_id = desk.last_id.get(1, 0) + 1
    applied = desk.engine.apply(request, peer=1, request_id=request_id, acknowledged=0, now=desk.now)
    while True:
        desk.take(applied.deliveries)
        yield applied.response
        if applied.work is None:
            return
        applied = desk.engine.go_on(applied.work)


@pytest.mark.parametrize("keys_only", [False, True])
def test_s11_a_long_listing_comes_in_parts_that_are_all_of_one_revision(keys_only: bool) -> None:
    """ "what costs more is paged": and it is still one moment's listing, whatever others write meanwhile (S1)."""
    desk = filled(3 * STEP_KEYS // K * K + K)
    before = list(desk.engine._keys.entries.values())
    revision = desk.engine.revision
    entries: list[Any] = []
    for number, part in enumerate(steps_of(desk, List(prefix="k/", keys_only=keys_only))):
        entries += part.entries
        assert isinstance(part, Listing if len(entries) == len(before) else ListingPart)
        assert len(part.entries) <= STEP_KEYS
        desk.ask(Put("k/000000", b"behind it"), peer=2)
        desk.ask(Put("k/006999", b"ahead of it: %d" % number), peer=2)
        desk.ask(Put(f"k/{number:06}x", b"new"), peer=2)
        desk.ask(Put("k/006998x", b"new, and ahead"), peer=2)
        desk.ask(DeletePrefix(prefix=f"k/00{6 - number}5"), peer=2)
    assert part.revision == revision
    assert [each.key for each in entries] == sorted(each.key for each in before)
    if not keys_only:
        assert sorted(entries, key=lambda each: each.key) == sorted(before, key=lambda each: each.key)
    assert desk.engine.unread_bytes == 0, "and nothing is kept for it any more"


def test_s11_unread_listings_do_not_slow_who_writes_down() -> None:
    """Each of five hundred was told of each put: 2,000 puts took 1.7 s of CPU, and 14 ms without them."""
    desk = filled(3 * STEP_KEYS // K * K)
    puts = [Put(f"k/{number:06}", b"new") for number in range(2 * K)]

    def cost() -> float:
        began = time.process_time()
        for put in puts:
            desk.ask(put, peer=1)
        return time.process_time() - began

    alone = min(cost() for _ in range(3))
    for peer in range(2, 502):
        desk.connect(peer)
        listing = desk.engine.apply(List(prefix="k/"), peer=peer, request_id=1, acknowledged=0, now=desk.now)
        assert listing.work is not None
    assert cost() < 10 * alone


def test_s11_a_watch_that_opens_with_a_large_snapshot_has_no_gap_and_tells_nothing_twice() -> None:
    """ "what costs more is sliced"; S4: "snapshot, then every later change, no gap"."""
    desk = filled(5 * K)
    revision = desk.engine.revision
    for number, _ in enumerate(steps_of(desk, Watch(prefix="k/", snapshot=True))):
        desk.ask(Put("k/004999", b"%d" % number), peer=2)
        desk.ask(Put("other", b""), peer=2)
    desk.ask(Put("k/000001", b"after"), peer=2)
    told = [event for events in desk.told[1, 1] for event in events]
    synced = [event.kind for event in told].index("synced")
    assert synced == 5 * K
    assert told[synced].revision == revision
    assert all(event.revision <= revision for event in told[:synced])
    later = [event.value for event in told[synced + 1 :]]
    assert later == [*[b"%d" % one for one in range(number + 1)], b"after"]


def test_s11_a_watch_that_resumes_up_to_date_looks_at_no_history() -> None:
    """It took 1.7 ms each at 318,000 revisions: 4,096 nodes that came back kept the store busy for seconds."""
    desk = Desk()
    for number in range(K):
        desk.ask(Put("k", b"%d" % number), peer=2)

    class Looked(list[Any]):
        looked = 0

        def __getitem__(self, which: Any) -> Any:
            found = super().__getitem__(which)
            Looked.looked += len(found)
            return found

    desk.engine._history._revisions = Looked(desk.engine._history._revisions)
    desk.ask(Watch(prefix="", start_revision=K - 1), request_id=1)
    assert len(desk.told[1, 1]) == 2
    assert Looked.looked == 2


def test_s11_counting_looks_at_no_key() -> None:
    desk = filled(5 * K)
    desk.engine._keys.entries.clear()  # nobody needs them to count
    assert desk.ask(Count(prefix="k/")) == Counted(count=5 * K, revision=desk.engine.revision)
    assert desk.ask(Count(prefix="k/0000")).count == 100


def test_s11_all_keys_of_a_lease_go_at_one_revision_if_one_transaction_could_delete_them() -> None:
    desk = Desk(lease_keys_max=35, writes_max=40)
    lease = desk.ask(Grant(ttl=1.0), peer=2).lease
    for number in range(35):
        desk.ask(Put(f"k/{number:02}", b"", lease=lease), peer=2)
    refused = desk.fails(Put("k/35", b"", lease=lease), peer=2)
    assert "lease_keys_max is 35: " in refused.message
    assert desk.ask(Put("k/34", b"again", lease=lease), peer=2).revision, "it is on that lease already"
    desk.ask(Delete("k/34"), peer=2)
    two = desk.fails(Transact(when=(), then=(Put("k/35", b"", lease=lease), Put("k/36", b"", lease=lease))), peer=2)
    assert f"lease {lease} would have 36 keys" in two.message, "those of one transaction count together"
    desk.ask(Watch(prefix="k/"), request_id=1)
    revision = desk.engine.revision
    desk.ask(Revoke(lease=lease), peer=2)
    assert desk.engine.revision == revision + 1
    assert [len(events) for events in desk.told[1, 1]] == [34]


@pytest.mark.parametrize("ending", ["lapses", "is revoked"])
def test_s11_a_lease_with_more_keys_than_go_at_once_ends_in_steps(ending: str) -> None:
    """A lease of 100,000 keys took 11.5 s to lapse, in which nobody was served."""
    desk = Desk(writes_max=10)
    lease = desk.ask(Grant(ttl=1.0), peer=2).lease
    for number in range(35):
        desk.ask(Put(f"k/{number:02}", b"", lease=lease), peer=2)
    desk.ask(Watch(prefix="k/"), request_id=1)
    if ending == "lapses":
        desk.now += 0.3
        desk.look()
        while not desk.told[1, 1]:
            desk.now += 0.1
            desk.look()
    else:
        desk.ask(Revoke(lease=lease), peer=2)
    assert [len(events) for events in desk.told[1, 1]] == [10]
    for request in (KeepAlive(lease=lease), Put("k/new", b"", lease=lease), Put("k/34", b"", lease=lease)):
        assert f"lease {lease} has lapsed or was revoked" in desk.fails(request, peer=2).message
    desk.ask(Put("k/33", b"another's by now"), peer=2)
    ticks = 0
    while desk.engine.next_tick_in() == 0.0:
        desk.look()
        ticks += 1
    assert ticks == 3, "it is due at once until the last key has gone"
    kinds = [[event.kind for event in events] for events in desk.told[1, 1]]
    assert kinds == [["delete"] * 10, ["put"], ["delete"] * 10, ["delete"] * 10, ["delete"] * 4]
    assert desk.keys() == ["k/33"]
    figures = desk.engine.figures()
    assert (figures["leases"], figures["leases_lapsed"]) == (0, int(ending == "lapses"))


@pytest.mark.virtual_time
async def test_s11_many_waits_that_one_change_ends_are_answered_in_turns_and_as_if_at_once() -> None:
    """Twenty thousand waits that one put ended held everybody up for 84 ms: looked at, and told, in one step."""
    network = MemoryNetwork()
    engine = Engine(store_id="it")
    timed = serve_counted(network, engine)
    waiting = [await introduce(network, source=f"waiting {number}") for number in range(3)]
    writer, bystander = await introduce(network, source="writer"), await introduce(network, source="bystander")
    each = WAITS_AT_ONCE // 2
    asked = [(peer, peer.ask(*[Wait(keys=("k",))] * each)) for peer in waiting]
    for peer in waiting:
        await peer.answer(*peer.ask(Ping()))
    steps: list[int] = []
    do_chore = engine.do_chore

    def counted() -> Any:
        deliveries = do_chore()
        steps.append(len(deliveries))
        return deliveries

    engine.do_chore = counted  # type: ignore[method-assign]
    timed.waits.clear()
    put, _ = writer.ask(Put("k", b"there"), Delete("k"))
    written = await writer.answer(put)
    await bystander.answer(*bystander.ask(Ping()))
    assert sum(steps) < 3 * each, "not all are looked at yet"
    assert max(timed.waits) < 0.05
    for peer, ids in asked:
        answers = [await peer.answer(one) for one in ids]
        assert {getattr(answer, "revision", None) for answer in answers} == {getattr(written, "revision", 0)}
    assert sum(steps) == 3 * each
    assert max(steps) <= 1 + LOOKS_A_STEP // LOOKS_OF_A_WAIT


def test_s11_prefixes_longer_than_a_key_cost_it_nothing() -> None:
    """Two thousand watches on prefixes of distinct lengths made every put 12 times as slow."""
    desk = Desk()
    for length in range(1, 2000):
        desk.ask(Watch(prefix="x" * length), peer=length % 7)
    asked = 0

    class Asked(dict[str, Any]):
        def __contains__(self, prefix: object) -> bool:
            nonlocal asked
            asked += 1
            return super().__contains__(prefix)

    desk.engine._watches.by_prefix = Asked(desk.engine._watches.by_prefix)
    desk.ask(Put("short", b""), peer=9)
    assert asked == len("short")


def test_s11_a_request_changes_no_more_keys_than_their_watchers_can_be_found_for_in_time() -> None:
    """Two thousand puts of long keys, compared with prefixes of two thousand lengths, took 2.3 s in one step."""
    desk = Desk()
    for length in range(1, 2000):
        desk.ask(Watch(prefix="x" * length), peer=length % 7)
    keys = ["k" * 2000 + f"/{number:04}" for number in range(2000)]
    refused = desk.fails(Transact(when=(), then=tuple(Put(key, b"") for key in keys)), peer=9)
    assert "that 22 of them are all that may change at once: split it, or use shorter keys" in refused.message
    lease = desk.ask(Grant(ttl=1.0), peer=9).lease
    for key in keys[:50]:
        desk.ask(Put(key, b"", lease=lease), peer=9)
    desk.fails(DeletePrefix(prefix="k"), peer=9)
    assert desk.ask(DeletePrefix(prefix="k", at_most=2000), peer=9).count == 22
    desk.ask(Watch(prefix="k"), request_id=10_000, peer=1)
    desk.now += 0.3
    while desk.keys():
        desk.now += 0.1
        desk.look()
    assert [len(events) for events in desk.told[1, 10_000]] == [22, 6]
    assert desk.ask(Transact(when=(), then=tuple(Put(f"k/{number}", b"") for number in range(2000))), peer=9).succeeded


STEP_SECONDS = 0.05
"""CPU time of the longest step of any request: what the promise allows, and more than twice what is measured."""

REFERENCE_SECONDS = 0.006
"""What `reference` takes on an idle machine that is fast enough for the promise."""

WRITES, CONDITIONS = range(Limits().writes_max), range(Limits().operations_max)

AT_THE_LIMIT: dict[str, Any] = {
    "count": Count(prefix="k/"),
    "list": List(prefix="k/"),
    "list, keys only": List(prefix="k/", keys_only=True),
    "get_many": GetMany(keys=tuple(f"k/{number:06}" for number in CONDITIONS)),
    "wait": Wait(keys=tuple(f"w/{number}" for number in CONDITIONS)),
    "puts": Transact(when=(), then=tuple(Put(f"t/{number}", b"v") for number in WRITES)),
    "puts with a time to live": Transact(when=(), then=tuple(Put(f"t/{number}", b"v", ttl=9.0) for number in WRITES)),
    "adds": Transact(when=(), then=tuple(Add(f"a/{number}", 1) for number in WRITES)),
    "appends": Transact(when=(), then=tuple(Append(f"a/{number}", b"v") for number in WRITES)),
    "gets": Transact(when=(), then=tuple(Get(f"k/{number:06}") for number in WRITES)),
    "conditions": Transact(when=tuple(when.missing(f"q/{number}") for number in CONDITIONS), then=(Put("c", b""),)),
    "conditions and puts": Transact(
        when=tuple(when.mod_revision(f"q/{number}") == 0 for number in CONDITIONS),
        then=tuple(Put(f"t/{number}", b"v") for number in WRITES),
    ),
    "a guard, and reads": Guarded(
        when=tuple(when.mod_revision(f"q/{number}") == 0 for number in CONDITIONS),
        request=GetMany(keys=tuple(f"k/{number:06}" for number in CONDITIONS)),
    ),
    "delete_prefix": DeletePrefix(prefix="k/", at_most=len(WRITES)),
    "watch with a snapshot": Watch(prefix="k/", snapshot=True),
    "watch from the beginning": Watch(prefix="k/", start_revision=1),
    "revoke": Revoke(lease=1),
}


def decoded_in_steps(body: memoryview) -> tuple[Any, list[float]]:
    """A request decoded as a server does it, and the CPU time of each step."""
    decoding = wire.decode_request_in_steps(body, elements_max=wire.elements_max(Limits().operations_max))
    took: list[float] = []
    said = None
    while said is None:
        began = time.process_time()
        try:
            next(decoding)
        except StopIteration as ended:
            said = ended.value
        took.append(time.process_time() - began)
    return said, took


def longest_step(engine: Engine, frame: bytes) -> float:
    """CPU time of the longest step in which a request is decoded, carried out, and what it leads to is encoded.

    What other processes do meanwhile is not counted.
    """
    (request_id, acknowledged, request), took = decoded_in_steps(memoryview(frame)[4:])
    began = time.process_time()
    applied = engine.apply(request, peer=1, request_id=request_id, acknowledged=acknowledged, now=0.0)
    while True:
        assert not isinstance(applied.response, Failed), applied.response
        if applied.response is not None:
            wire.encode_response(request_id, applied.response)
        for delivery in applied.deliveries:
            assert isinstance(delivery, Delivery)
            wire.encode_events(delivery.events)
        took.append(time.process_time() - began)
        if applied.work is None:
            return max(took)
        began = time.process_time()
        applied = engine.go_on(applied.work)


def reference() -> float:
    """CPU time of a piece of work that is always the same: objects made, put into a dict, and sorted.

    A busy machine makes CPU time longer, too: caches are shared, and a virtual processor may be taken away.
    """
    began = time.process_time()
    entries = {f"k/{number}": Put(f"k/{number}", b"v") for number in range(6000)}
    assert len(sorted(entries)) == 6000
    return time.process_time() - began


@pytest.mark.parametrize("kind", AT_THE_LIMIT)
def test_s11_no_step_of_a_request_at_its_limit_takes_long(kind: str) -> None:
    """Decoding 16,384 conditions took 80 ms in one piece, and 16,384 reads in a transaction 60 ms.

    The best of five is judged, and by what the machine gives at that moment: a collection of Python's garbage may fall
    into any of them, or the work of others.
    """
    longest: list[float] = []
    for _ in range(5):
        desk = filled(20 * K)
        desk.connect(1)
        if kind == "revoke":
            lease = desk.ask(Grant(ttl=60.0), peer=9).lease
            assert lease == 1
            for first in range(0, 20 * K, 1024):
                puts = tuple(Put(f"l/{number}", b"", lease=lease) for number in range(first, first + 1024))
                desk.ask(Transact(when=(), then=puts), peer=9)
        frame = wire.encode_request(1, 0, AT_THE_LIMIT[kind])
        before = reference()
        took = longest_step(desk.engine, frame)
        longest.append(took * REFERENCE_SECONDS / max(before, reference(), REFERENCE_SECONDS))
        if longest[-1] < STEP_SECONDS:
            return
    pytest.fail(f"the longest steps took {longest} s of a machine that is idle")


def many_leases() -> tuple[Desk, Any]:
    """A process with many leases dies."""
    desk = Desk()
    for peer, process in ((1, b"p" * 16), (2, b"q" * 16)):
        desk.connect(peer, process=process)
        for number in range(60 * K if peer == 1 else 1):
            desk.engine.apply(Grant(ttl=30.0, disconnect_ttl=1.0, gone_ttl=0.1), peer, number + 1, number, desk.now)
    return desk, lambda: desk.engine.disconnect(1, now=desk.now, how=Closing.DROPPED)


def many_watches() -> tuple[Desk, Any]:
    """The connections of many watches are cut at once."""
    return parked_by(lambda number: Watch(prefix=f"k/{number}"), peers=25)


def many_waits() -> tuple[Desk, Any]:
    """The connections of many waits are cut at once."""
    return parked_by(lambda number: Wait(keys=(f"k/{number % 100}",)))


def unread_listing() -> tuple[Desk, Any]:
    """Who has a long listing unread, of which nothing is left in the store, goes."""
    desk = filled(200 * K)
    desk.connect(1)
    assert desk.engine.apply(List(prefix="k/"), 1, 1, 0, desk.now).work is not None
    while desk.keys():
        desk.ask(DeletePrefix(prefix="k/", at_most=len(WRITES)), peer=2)
    return desk, lambda: desk.engine.disconnect(1, now=desk.now, how=Closing.DROPPED)


def parked_by(request: Callable[[int], Any], *, peers: int = 16) -> tuple[Desk, Any]:
    desk = Desk()
    for peer in range(peers):
        desk.connect(peer)
        for number in range(4000):
            desk.engine.apply(request(number), peer, number + 1, number, desk.now)

    def cut() -> None:
        for peer in range(peers):
            desk.engine.disconnect(peer, now=desk.now, how=Closing.CUT)

    return desk, cut


def one_for_many() -> tuple[Desk, Any]:
    """One put ends many waits, and another one breaks the condition of others."""
    desk, _ = parked_by(lambda number: Guarded(when=(when.missing("b"),), request=Wait(keys=("ac"[number % 2],))))
    desk.connect(99)

    def put() -> None:
        for number, key in enumerate("ab", 1):
            desk.engine.apply(Put(key, b""), 99, number, number - 1, desk.now)

    return desk, put


def many_sessions() -> tuple[Desk, Any]:
    """Many sessions expire at once."""
    desk = Desk()
    for peer in range(65 * K):
        desk.connect(peer, session=b"%016d" % peer)
        desk.disconnect(peer)
    desk.now += 400.0
    return desk, lambda: desk.connect(99 * K)


@pytest.mark.parametrize("scene", [many_leases, many_watches, many_waits, one_for_many, many_sessions, unread_listing])
def test_s11_the_end_of_many_things_at_once_is_done_in_steps(scene: Callable[[], tuple[Desk, Any]]) -> None:
    """A process with 199,000 leases that died held everybody up for half a second; the others for 150 to 250 ms."""
    desk, end = scene()
    longest = 0.0

    def step(what: Callable[[], Any]) -> None:
        nonlocal longest
        began = time.process_time()
        what()
        took = time.process_time() - began
        if took > STEP_SECONDS:
            longest = max(longest, took * REFERENCE_SECONDS / max(reference(), REFERENCE_SECONDS))

    gc.disable()
    try:
        step(end)
        while desk.engine.has_chores:
            step(desk.engine.do_chore)
        for _ in range(400):
            desk.now += 0.1
            step(lambda: desk.engine.look(now=desk.now) and desk.engine.tick(now=desk.now))
    finally:
        gc.enable()
    assert longest < STEP_SECONDS
    figures = desk.engine.figures()
    assert figures["leases"] <= 1
    assert figures["watches"] == figures["waits"] == 0


def test_s11_who_watches_prefixes_of_many_lengths_is_told_of_many_changes_at_once() -> None:
    """Thirty keys under 1,500 watched prefixes were encoded 1,500 times: 200 ms in one step."""
    desk = Desk()
    for number in range(1, 1501):
        desk.ask(Watch(prefix="x" * number))
    puts = tuple(Put("x" * 50 * number, b"") for number in range(1, 31))
    applied = desk.engine.apply(Transact(when=(), then=puts[::-1]), 1, 2000, 1999, desk.now)
    assert len(applied.deliveries) == 30
    desk.take(applied.deliveries)
    for number in (1, 700, 1500):
        assert [event.key for (events) in desk.told[1, number] for event in events] == [
            put.key for put in puts[::-1] if len(put.key) >= number
        ]


def test_s11_a_heap_of_small_requests_is_cut_up_as_it_is_carried_out() -> None:
    """Before the first of 26,000 was looked at, all were cut out: in 20 ms, and 19 times their memory."""
    reader = wire.FrameReader(10**6)
    bodies = reader.feed(wire.encode_request(1, 0, Ping()) * (26 * K))
    tracemalloc.start()
    try:
        next(bodies)
        assert tracemalloc.get_traced_memory()[1] < 10 * K
    finally:
        tracemalloc.stop()
    assert sum(1 for _ in bodies) == 26 * K - 1


def test_s11_a_large_request_is_decoded_in_steps_and_means_the_same() -> None:
    """Others have their turns in between; 16,384 conditions are some twenty steps."""
    for kind in ("conditions", "conditions and puts", "get_many", "puts"):
        body = wire.encode_request(7, 3, AT_THE_LIMIT[kind])[4:]
        said, took = decoded_in_steps(memoryview(body))
        assert said == wire.decode_request(body) == (7, 3, AT_THE_LIMIT[kind])
        assert len(took) > len(body) // 20_000


@pytest.mark.virtual_time
async def test_s11_fifty_heaps_at_once_hold_nobody_up() -> None:
    """Counted time: of each pass a bystander waits for one, however many stand in the ring."""
    network = MemoryNetwork()
    timed = serve_counted(network, Engine(store_id="it"))
    greedy = [await introduce(network, source=f"greedy {number}") for number in range(50)]
    bystander = await introduce(network, source="bystander")
    last = [peer.ask(*[Count(prefix="k")] * 200)[-1] for peer in greedy]
    for _ in range(10):
        await bystander.answer(*bystander.ask(Ping()))
    assert len(timed.waits) == 10
    assert max(timed.waits) < 0.08, "looking at the time costs a millisecond here, for each of the fifty"
    for peer, asked in zip(greedy, last, strict=True):
        await peer.answer(asked)
    assert len(timed.peers) == 51, "nobody is dropped"


@pytest.mark.virtual_time
async def test_s11_what_one_change_means_to_thousands_is_told_in_slices_and_in_order() -> None:
    """10,000 watchers of one key took some 300 ms of one step; and each change is heard of in its place."""
    network = MemoryNetwork()
    timed = serve_counted(network, Engine(store_id="it"))
    watching = [await introduce(network, source=f"watching {number}") for number in range(5 * AT_ONCE)]
    for peer in watching:
        peer.ask(Watch(prefix="head/"), Wait(keys=("later",)))
    for peer in watching:
        await peer.until(peer.replies)
    writer, bystander = await introduce(network, source="writer"), await introduce(network, source="bystander")
    writer.ask(Put("head/round", b"1"), Put("later", b"it"), Put("head/round", b"2"))
    await bystander.answer(*bystander.ask(Ping()))
    (asked,) = watching[-1].ask(Ping())
    assert not any(isinstance(said, Events) for said in watching[-1].said), "others were served before all were told"
    for peer in watching:
        many = 5 + (peer is watching[-1])
        await peer.until(lambda peer=peer, many=many: len(peer.said) >= many)  # type: ignore[misc]
        told = [place_of(one) for one in peer.said[2:]]
        assert told == sorted(told), "and the answer to a ping comes after all that it says has been"
        assert {1, 2, 3} <= set(told)
    assert isinstance(await watching[-1].answer(asked), Pong)
    assert max(timed.waits) < 0.05


def place_of(said: Any) -> float:
    """Where it belongs among all that is said: by its revision, and a pong behind what is of the same one."""
    if isinstance(said, Events):
        return float(said.events[0].revision)
    return float(said.response.revision) + 0.5 * isinstance(said.response, Pong)


@pytest.mark.virtual_time
async def test_s11_who_leaves_or_ends_a_watch_while_thousands_are_told_is_told_nothing_wrong() -> None:
    network = MemoryNetwork()
    serve_counted(network, Engine(store_id="it"))
    watching = [await introduce(network, source=f"watching {number}") for number in range(3 * AT_ONCE)]
    watches = [peer.ask(Watch(prefix="head/"))[0] for peer in watching]
    for peer in watching:
        await peer.until(peer.replies)
    writer = await introduce(network, source="writer")
    writer.ask(Put("head/round", b"1"))
    gone, ends = watching[-1], watching[-2]
    gone.transport.abort()
    (ended,) = ends.ask(Cancel(target=watches[-2]))
    writer.ask(Put("head/round", b"2"))
    for peer in watching[:-2]:
        await peer.until(lambda peer=peer: len([one for one in peer.said if isinstance(one, Events)]) == 2)  # type: ignore[misc]
    await ends.answer(ended)
    assert isinstance(ends.said[-1], Reply), "nothing comes after its end"
    heard = [one.events[0].value for one in ends.said if isinstance(one, Events)]
    assert heard == [b"1"], "and what was before it was told first"


def test_s11_what_is_done_for_one_peer_fits_into_a_pass_and_a_pass_into_the_promise() -> None:
    assert TURN < PASS < 0.05 / 3, "a pass that has begun, one turn that overruns, and the pass in which it is served"


async def test_s11_with_real_sockets_a_bystander_is_served_beside_everything_at_once() -> None:
    """The honest run, judged by order: how long it takes is the machine's. The heaps held everybody up for 37 s.

    A pass is so much time, so a quick machine does more in it: some 7,000 requests have been seen while a bystander was
    served three times. The heap of those that cost least is larger than that by far.
    """
    async with store.serve(limits=Limits()) as server, store.connect(server.url) as client:
        await client.put("small", b"")
        for first in range(0, 5 * K, K):
            await client.transact(then=[Put(f"k/{n:06}", b"value") for n in range(first, first + K)])
        loop = asyncio.get_running_loop()
        greedy = [(await loop.create_connection(Peer, "127.0.0.1", server.port))[1] for _ in range(4)]
        for peer in greedy:
            await peer.until(lambda peer=peer: peer.connection.welcomed)  # type: ignore[misc]
        before = server.figures()["requests"]
        heaps = [
            greedy[0].ask(*[Count(prefix="k")] * 30 * K),
            greedy[1].ask(*[List(prefix="k")] * 4),
            greedy[2].ask(*[Watch(prefix="k", snapshot=True)] * 4),
            greedy[3].ask(*[Wait(keys=("w", f"{number}")) for number in range(999)], *[Get("k/000001")] * 999),
        ]
        for _ in range(3):
            await client.get("small")
        done = server.figures()["requests"] - before
        assert 3 <= done < sum(map(len, heaps)) // 2, "a bystander was served while the heaps were being carried out"
        for peer, heap in zip(greedy, heaps, strict=True):
            await peer.answer(heap[-1])
        assert server.connections == 5, "nobody is dropped"
        greedy[0].ask(*[Count(prefix="k")] * 10 * K)  # S9 holds meanwhile: the server leaves though there is more to do
    for peer in greedy:
        peer.transport.abort()
