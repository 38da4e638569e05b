"""One large value for many readers is encoded once, counted once, and written to all of them in turns (S6, S11)."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rdzv.testing.network import MemoryNetwork
from store import Server
from store.limits import MIB, Limits
from store.messages import Cancel, Done, Found, Get, GetMany, Listing, Ping, Pong, Put, Wait, Watch
from store.protocol import wire
from store.protocol.wire import Events
from store.server import deliverer
from store.server.outbox import frame_memory
from tests.support.stores import Peer, introduce, serve_in_memory

LIMITS = Limits(memory_bytes_max=256 * MIB, history_bytes_max=MIB)
VALUE = bytes(30 * MIB)
READERS, STOPPED = 60, 20
ASKED: dict[str, Any] = {"waits": Wait(keys=("big",)), "watches": Watch(prefix="big"), "gets": Get("big")}
ASKED["gets of several"] = GetMany(keys=("big",))

pytestmark = pytest.mark.virtual_time


def has_value(peer: Peer) -> bool:
    for said in peer.said:
        match said:
            case Events(events=(event,)):
                return event.value == VALUE
            case wire.Reply(response=Listing(entries=(entry,)) | Found(entry=entry)):
                return entry is not None and entry.value == VALUE
    return False


async def readers_of(network: MemoryNetwork, kind: str) -> list[Peer]:
    """Return peers that will get the value; the first ones do not read."""
    readers = [await introduce(network, source=f"reader {number}") for number in range(READERS)]
    if kind.startswith("gets"):
        writer = await introduce(network, source="writer")
        await writer.answer(*writer.ask(Put("big", VALUE)))
    for reader in readers:
        reader.ask(ASKED[kind])
    if kind == "watches":
        for reader in readers:
            await reader.until(reader.replies)
    for reader in readers[:STOPPED]:
        reader.transport.pause_reading()
    return readers


def written_by_step(server: Server) -> list[int]:
    """Return a list of the bytes that each step of the server writes to transports."""
    steps: list[int] = []
    conversations = server._scheduler

    def counted(step: Callable[..., None]) -> Callable[..., None]:
        def take(*arguments: Any) -> None:
            before = server.figures()["bytes_out"]
            step(*arguments)
            steps.append(server.figures()["bytes_out"] - before)

        return take

    for name in ("handle_bytes", "_run_pass", "resume_requests"):
        setattr(conversations, name, counted(getattr(conversations, name)))
    return steps


@pytest.mark.in_ci
@pytest.mark.parametrize("kind", ASKED)
async def test_a_broadcast_is_encoded_and_counted_once_and_written_in_turns(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 60 members that waited for 30 MB: all were delayed by 6 s, memory grew to 1,950 MiB, some disconnected."""
    network = MemoryNetwork(socket_buffer_bytes=4 * MIB)
    encoded: list[Any] = []
    encode = wire.encode_shared_body

    def counted(said: Any) -> tuple[bytes, ...]:
        encoded.append(said)
        return encode(said)

    monkeypatch.setattr(wire, "encode_shared_body", counted)
    async with serve_in_memory(network, limits=LIMITS) as server:
        ticks = itertools.count()  # a millisecond with every reading of the clock: in virtual time no turn would end
        for room, name in ((server._scheduler, "stopwatch"), (server._scheduler.deliverer, "_stopwatch")):
            monkeypatch.setattr(room, name, lambda: next(ticks) / 1000)
        readers = await readers_of(network, kind)
        writer, bystander = await introduce(network, source="writer"), await introduce(network, source="bystander")
        steps = written_by_step(server)
        writer.ask(Ping() if kind.startswith("gets") else Put("big", VALUE))
        assert isinstance(await bystander.answer(*bystander.ask(Ping())), Pong)
        for reader in readers[STOPPED:]:
            await reader.until(lambda reader=reader: has_value(reader))  # type: ignore[misc]
        assert server.connections == READERS + 2 + kind.startswith("gets"), "nobody is hung up on"
        outboxes = [peer.outbox.bytes for peer in server._peers.by_id.values()]
        assert sum(size > frame_memory(len(VALUE)) for size in outboxes) == STOPPED, "each outbox counts it ..."
        assert server.figures()["outbox_bytes"] < 1.1 * frame_memory(len(VALUE)) + STOPPED * 2 * MIB, (
            "... and all, once"
        )
        assert len(encoded) == 1
        assert max(steps) <= 6 * deliverer.BYTES_AT_ONCE
        for reader in readers[:STOPPED]:
            reader.transport.resume_reading()
        for reader in readers[:STOPPED]:
            await reader.until(lambda reader=reader: has_value(reader))  # type: ignore[misc]
        await asyncio.sleep(1)
        assert server.figures()["outbox_bytes"] == 0
        assert not server._scheduler.deliverer._shared


async def test_a_wait_that_is_cancelled_while_its_answer_is_sent_gets_the_rest_of_it() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network, limits=LIMITS):
        reader, writer = await introduce(network, source="reader"), await introduce(network, source="writer")
        (wait,) = reader.ask(Wait(keys=("big",)))
        await reader.answer(*reader.ask(Ping()))
        reader.transport.pause_reading()
        await writer.answer(*writer.ask(Put("big", VALUE)))
        await asyncio.sleep(1)
        (cancel,) = reader.ask(Cancel(target=wait))
        reader.transport.resume_reading()
        assert isinstance(await reader.answer(cancel), Done)
        assert has_value(reader)
