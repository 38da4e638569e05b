"""The ring of turns: peers with few requests go first, and each peer has one turn before any has a second."""

import asyncio
from typing import Any

import pytest

from rdzv.testing.network import MemoryNetwork
from store import Delete, Put, Server
from store.engine.engine import WAITS_AT_ONCE, Engine
from store.engine.requests import LOOKS_A_STEP, LOOKS_OF_A_WAIT
from store.messages import Cancel, Count, Ping, Pong, Wait, Watch
from store.protocol.wire import Events, Reply
from store.server.deliverer import AT_ONCE, CAUGHT_UP_AT_ONCE
from store.server.request_scheduler import RequestScheduler
from store.server.round_robin import PASS, TURN
from tests.support.stores import introduce


class Stopwatch:
    """It advances by a millisecond with every reading, so that a turn is a few requests on any machine."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.001
        return self.seconds


class Timed:
    """Records how long each ping has waited from its arrival until it is carried out."""

    def __init__(self, conversations: RequestScheduler, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._received, self._apply_request = conversations.handle_bytes, conversations._apply_request
        self._arrived: dict[int, float] = {}
        self.waits: list[float] = []
        self.deliverer = conversations.deliverer
        self.peers = self.deliverer._peers.by_id
        conversations.handle_bytes = self.received  # type: ignore[method-assign]
        conversations._apply_request = self.apply  # type: ignore[method-assign]

    def received(self, peer: Any, size: int) -> None:
        self._arrived[peer.id] = self._stopwatch()
        self._received(peer, size)

    def apply(self, peer: Any, asked: Any, now: float, **how: Any) -> Any:
        if type(asked[2]) is Ping:
            self.waits.append(self._stopwatch() - self._arrived[peer.id])
        return self._apply_request(peer, asked, now, **how)


def serve_counted(network: MemoryNetwork, engine: Engine) -> Timed:
    stopwatch = Stopwatch()
    server = Server(engine, clock=asyncio.get_running_loop().time, stopwatch=stopwatch)
    network.listen("store", server.protocol)
    return Timed(server._scheduler, stopwatch)


@pytest.mark.virtual_time
@pytest.mark.in_ci
async def test_a_heap_of_requests_is_carried_out_in_turns_and_others_come_in_between() -> None:
    """18,000 requests in 251 kB delayed a bystander by 37 s."""
    network = MemoryNetwork()
    timed = serve_counted(network, Engine(store_id="it"))
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
async def test_many_heaps_together_delay_others_no_longer_than_one() -> None:
    """A pass of the loop has one time limit for all of them together, and peers with few requests go first."""
    network = MemoryNetwork()
    timed = serve_counted(network, Engine(store_id="it"))
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


@pytest.mark.virtual_time
async def test_many_waits_that_one_change_ends_are_answered_in_turns_and_as_if_at_once() -> None:
    """20,000 waits that one put ended delayed all clients by 84 ms: they were checked and answered in one step."""
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
    do_postponed_work = engine.do_postponed_work

    def counted() -> Any:
        deliveries = do_postponed_work()
        steps.append(len(deliveries))
        return deliveries

    engine.do_postponed_work = counted  # type: ignore[method-assign]
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


@pytest.mark.virtual_time
async def test_events_of_one_change_for_thousands_of_watches_are_sent_in_slices_and_in_order() -> None:
    """10,000 watchers of one key took some 300 ms of one step. The events of each change come in its order."""
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


@pytest.mark.virtual_time
async def test_a_peer_with_thousands_of_watches_is_notified_in_slices_and_in_order() -> None:
    """All the watches of 64 peers were notified in one step: 262,144 events. So were a peer's at its request."""
    network = MemoryNetwork()
    timed = serve_counted(network, Engine(store_id="it"))
    watching = [await introduce(network, source=f"watching {number}") for number in range(3)]
    each = CAUGHT_UP_AT_ONCE * 3 // 2
    for peer in watching:
        await peer.answer(peer.ask(*[Watch(prefix="head/")] * each)[-1])
    told: list[int] = []
    tell, announce_on = timed.deliverer._queue_events, timed.deliverer._notify_some

    def counted(*what: Any) -> None:
        told[-1] += 1
        tell(*what)

    def step() -> bool:
        told.append(0)
        return announce_on()

    timed.deliverer._queue_events, timed.deliverer._notify_some = counted, step  # type: ignore[method-assign,assignment]
    writer, bystander = await introduce(network, source="writer"), await introduce(network, source="bystander")
    writer.ask(Put("head/round", b"1"), Put("head/round", b"2"))
    (asked,) = watching[-1].ask(Ping())
    await bystander.answer(*bystander.ask(Ping()))
    assert sum(told) < each, "others were served before all were told"
    assert max(timed.waits) < 0.05
    assert isinstance(await watching[-1].answer(asked), Pong)
    for peer in watching:
        await peer.until(lambda peer=peer: len([one for one in peer.said if isinstance(one, Events)]) == 2 * each)  # type: ignore[misc]
        pongs = [one for one in peer.replies() if isinstance(one.response, Pong)]
        places = [place_of(one) for one in peer.said if isinstance(one, Events) or one in pongs]
        assert places == sorted(places), "and the answer to a ping comes after all that it says has been"
    assert max(told) <= CAUGHT_UP_AT_ONCE + AT_ONCE
    assert sum(told) == 3 * 2 * each
    assert not timed.deliverer._owed


def place_of(said: Any) -> float:
    """Return a message's place in the order: its revision; a pong comes after the events of the same one."""
    if isinstance(said, Events):
        return float(said.events[0].revision)
    return float(said.response.revision) + 0.5 * isinstance(said.response, Pong)


@pytest.mark.virtual_time
async def test_a_peer_that_leaves_or_cancels_a_watch_during_a_broadcast_gets_no_wrong_message() -> None:
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


def test_the_turn_of_a_peer_fits_into_a_pass_and_a_pass_into_the_promise() -> None:
    assert TURN < PASS < 0.05 / 3, "a pass that has begun, one turn that overruns, and the pass in which it is served"
