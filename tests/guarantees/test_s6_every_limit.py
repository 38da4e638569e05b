"""S6: frames, values, keys, watches, outboxes, history, sessions and total memory each have a limit that a client
cannot pass, and a clear error. Here a client goes past each limit of a real server, without effect on a bystander.
"""

import asyncio
import contextlib
import itertools
import re
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import store
from store import Add, Append, ConnectionLost, Get, LimitExceeded, Limits, Put, Server, WatchCompacted, when
from tests.support.journals import a_peer, held_back
from tests.support.limits import limits_with
from tests.support.spoken import CompareAndSet, Failed, GetMany, Ping, Request, Wait, Watch, Written, wire
from tests.support.stores import Peer

pytestmark = pytest.mark.some_here(6)

MIB = 2**20


class Scene:
    """A server, a client that goes past a limit, and the server's log."""

    def __init__(self, server: Server, client: store.Client, log: pytest.LogCaptureFixture) -> None:
        self.server = server
        self.client = client
        self.log = log
        self._stack = contextlib.AsyncExitStack()

    async def another(self, **options: Any) -> store.Client:
        """Connect one more client, for as long as the scene lasts."""
        return await self._stack.enter_async_context(store.connect(self.server.url, **options))

    async def a_peer(self, **options: Any) -> Peer:
        """Connect a peer that speaks the protocol by hand."""
        loop = asyncio.get_running_loop()
        _, peer = await loop.create_connection(lambda: Peer(**options), "127.0.0.1", self.server.port)
        self._stack.push_async_callback(peer.lost.wait)
        self._stack.callback(peer.transport.abort)
        await peer.until(lambda: peer.connection.welcomed)
        return peer

    async def says(self, what: str) -> str:
        """Return the line of the log that contains this."""
        while True:
            for record in self.log.records:
                if what in record.getMessage():
                    return record.getMessage()
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        await self._stack.aclose()


async def refusal(call: Awaitable[object], error: type[Exception] = LimitExceeded) -> str:
    """Return the error with which a call is refused."""
    with pytest.raises(error) as caught:
        await call
    return str(caught.value)


async def unacknowledged(peer: Peer, request: Request[Any], *, first: int, count: int) -> str:
    """Send requests as a client that never acknowledges a reply; return the last answer, which is a refusal."""
    peer.transport.write(b"".join(wire.encode_request(first + each, 0, request) for each in range(count)))
    answer = await peer.answer(first + count - 1)
    assert isinstance(answer, Failed)
    return answer.message


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], Callable[[Scene], Awaitable[str]]]] = {}
"""By limit: the limits of its server, further text that the error must contain, and the case."""


def past(
    limits: dict[str, Any], *shown: str
) -> Callable[[Callable[[Scene], Awaitable[str]]], Callable[[Scene], Awaitable[str]]]:
    """Register a case that goes past the first of these limits; the others are set so that this one is met first."""

    def register(case: Callable[[Scene], Awaitable[str]]) -> Callable[[Scene], Awaitable[str]]:
        name = next(iter(limits))
        assert name not in CASES
        CASES[name] = (limits, shown, case)
        return case

    return register


@past({"frame_bytes_max": 20_000, "value_bytes_max": 15_000}, "bytes", "send less at once")
async def a_frame(scene: Scene) -> str:
    return await refusal(scene.client.transact(then=[Put("a", bytes(12_000)), Put("b", bytes(12_000))]))


@past({"append_bytes_max": 1000}, "1001 bytes", "append to another key, or put the value")
async def an_append(scene: Scene) -> str:
    await scene.client.put("a", bytes(2000))
    await scene.client.put("a", bytes(1000))
    return await refusal(scene.client.append("a", b"x"))


@past({"value_bytes_max": 1000}, "1001 bytes", "store a reference to it instead")
async def a_value(scene: Scene) -> str:
    await scene.client.put("a", bytes(1000))
    await scene.client.delete("a")
    return await refusal(scene.client.put("a", bytes(1001)))


@past({"key_bytes_max": 100}, "101 bytes", "use a shorter one")
async def a_key(scene: Scene) -> str:
    assert "prefix" in await refusal(scene.client.watch("k" * 101).__aenter__())
    return await refusal(scene.client.put("k" * 101, b""))


@past({"keys_max": 3}, "hold 4 keys", "delete some")
async def keys(scene: Scene) -> str:
    await scene.client.transact(then=[Put("a", b""), Put("b", b"")])
    message = await refusal(scene.client.put("c", b""))
    await scene.client.delete_prefix("")
    await scene.client.put("bystander", b"0")
    return message


@past({"group_keys_max": 2}, "hold 3 keys", "delete some")
async def keys_of_a_group(scene: Scene) -> str:
    for key in ("/rdzv/a/1", "/rdzv/a/2", "/rdzv/b/1", "/rdzv/b"):
        await scene.client.put(key, b"")
    await scene.client.put("/rdzv/a/2", b"again")
    return await refusal(scene.client.transact(then=[Put("/rdzv/b/2", b""), Put("/rdzv/a/3", b"")]))


@past({"group_bytes_max": 10_000}, "would hold", "delete some")
async def bytes_of_a_group(scene: Scene) -> str:
    for key in ("/rdzv/a/1", "/rdzv/b/1"):
        await scene.client.put(key, bytes(9_000))
    await scene.client.put("/rdzv/a/1", bytes(8_000))
    return await refusal(scene.client.append("/rdzv/a/1", bytes(2_000)))


@past({"stored_bytes_max": 10_000}, "would hold", "delete some")
async def stored_bytes(scene: Scene) -> str:
    return await refusal(scene.client.put("a", bytes(10_000)))


@past({"history_bytes_max": 5000}, "history begins at", "watch with snapshot=True")
async def history(scene: Scene) -> str:
    for _ in range(10):
        await scene.client.put("a", bytes(1000))
    assert scene.server.figures()["history_bytes"] <= 5000
    message = await refusal(scene.client.watch("a", start_revision=1).__aenter__(), WatchCompacted)
    await scene.client.delete("a")
    return message


@past({"operations_max": 3}, "4 conditions", "split it")
async def operations(scene: Scene) -> str:
    assert "operations_max is 3: split it" in await refusal(scene.client.get_many(["k"] * 5000))
    return await refusal(scene.client.transact(when=[when.missing("a")] * 4, then=[Get("a")]))


@past({"watches_max": 2}, "3 watches and waits", "end some")
async def watches(scene: Scene) -> str:
    async with scene.client.watch("a"), scene.client.watch("b"):
        assert "watches_max" in await refusal(scene.client.wait(["never"]))
        return await refusal(scene.client.watch("c").__aenter__())


@past({"waits_bytes_max": 2000}, "bytes", "wait for fewer keys")
async def waits(scene: Scene) -> str:
    return await refusal(scene.client.wait([f"never/{number}" for number in range(20)]))


@past({"outbox_bytes_max": 20_000}, "bytes", "ask again")
async def an_outbox(scene: Scene) -> str:
    peer = await scene.a_peer()
    asked, _, ping = peer.ask(Wait(keys=("b",)), Watch(prefix="a"), Ping())
    await peer.answer(ping)
    peer.transport.pause_reading()
    while not any("reads too slowly" in record.getMessage() for record in scene.log.records):
        await scene.client.put("a", bytes(15_000))  # bytes in the system's buffers do not count as the server's
        assert scene.server.figures()["outbox_bytes"] <= 40_000
    scene.log.clear()
    await scene.client.put("b", bytes(15_000))
    peer.transport.resume_reading()
    refused = await peer.answer(asked)
    peer.transport.abort()
    assert isinstance(refused, Failed)
    return refused.message


@past({"writes_max": 3}, "names 4 operations", "split it")
async def writes(scene: Scene) -> str:
    message = await refusal(scene.client.transact(when=[], then=[Put(f"w/{number}", b"") for number in range(4)]))
    for number in range(8):
        await scene.client.put(f"w/{number}", b"")
    assert await scene.client.delete_prefix("w/") == 8, "in several steps"
    return message


@past(
    {
        "memory_bytes_max": 4 * MIB,
        "outbox_bytes_max": MIB,
        "frame_bytes_max": MIB,
        "value_bytes_max": MIB // 2,
        "history_bytes_max": MIB // 4,
    },
    "bytes in all",
    "delete some",
)
async def all_memory(scene: Scene) -> str:
    """Memory of the connections counts, too: if peers do not read, keys have less, and the slowest peer is closed."""
    deaf = [await scene.a_peer() for _ in range(4)]
    for number, peer in enumerate(deaf):
        # a different prefix for each: shared bytes count once
        await peer.answer(*peer.ask(Watch(prefix=f"deaf/{number}")))
        peer.transport.pause_reading()
    await scene.client.put("m", bytes(400_000))
    for number in itertools.cycle(range(len(deaf))):
        if scene.log.records:
            break
        await scene.client.put(f"deaf/{number}", bytes(200_000))
        assert scene.server.figures()["memory_bytes"] <= 4 * MIB
    assert "memory_bytes_max is 4194304" in await scene.says("is disconnected")
    scene.log.clear()
    for peer in deaf:
        peer.transport.abort()
    while scene.server.figures()["outbox_bytes"]:  # noqa: ASYNC110 - a server has no event for it
        await asyncio.sleep(0)

    async def fill() -> None:
        for number in range(100):
            await scene.client.put(f"n/{number}", bytes(200_000))

    message = await refusal(fill())
    await scene.client.delete_prefix("n/")
    await scene.client.put("n", b"")
    return message


@past({"journal_bytes_max": 2 * MIB}, "of changes", "")
async def a_disk_that_takes_nothing(scene: Scene) -> str:
    limits = scene.server._limits
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        async with held_back(Path(directory), patch, limits=limits) as (server, journal):
            early, late = [await a_peer(server, journal) for _ in range(2)]
            asked = early.ask(*[Put("a", bytes(MIB - 1000))] * 10)[-1]
            while server.figures()["journal_bytes"] <= 2 * MIB:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
            asked_late = late.ask(Put("b", bytes(MIB - 1000)))[0]
            for _ in range(200):  # in each of them one packet of 256 KiB could be read from each peer
                await asyncio.sleep(0)
                assert server.figures()["journal_bytes"] < 3.1 * MIB, "no more than the request that went past it"
            assert server.figures()["inbox_bytes"] < 1.5 * MIB, "and not the whole of the next one of each"
            journal.may_commit.release(1000)
            assert isinstance(await early.answer(asked), Written)
            assert isinstance(await late.answer(asked_late), Written)
            assert server.figures()["journal_bytes"] == 0
            early.transport.abort()
            late.transport.abort()
    return "journal_bytes_max is 2097152: no more of changes than that waits for the disk"


@past({"connections_max": 3}, "it has 3 connections", "within 1 s")
async def connections(scene: Scene) -> str:
    message = await refusal(scene.another(timeout=1.0), ConnectionLost)
    assert len(scene.log.records) == 1
    scene.log.clear()
    return message.replace("3 connections", "connections_max is 3: it has 3 connections")


@past({"handshakes_max": 2}, "it has sent no valid hello", "2 such connections wait")
async def unfinished_handshakes(scene: Scene) -> str:
    peers = []
    for _ in range(2):
        _, peer = await asyncio.get_running_loop().create_connection(
            lambda: Peer(hello=False), "127.0.0.1", scene.server.port
        )
        peers.append(peer)
    await (await scene.another()).ping()  # once one of the two has been silent for a second
    message = await scene.says("is closed")
    scene.log.clear()
    for peer in peers:
        peer.transport.abort()
        await peer.lost.wait()
    return message


@past({"address_connections_max": 3}, "has 3 connections", "the most that one address may have")
async def connections_of_one_address(scene: Scene) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("store.server.accept.connection_table.is_loopback", lambda _: False)
        message = await refusal(scene.another(timeout=1.0), ConnectionLost)
    scene.log.clear()
    return message


@past({"sessions_max": 3}, "the server has 3 sessions", "come again")
async def sessions(scene: Scene) -> str:
    message = await refusal(scene.another(timeout=1.0), ConnectionLost)
    scene.log.clear()
    return message


@past({"session_replies_max": 4}, "5 replies of this client", "read replies before sending more")
async def session_replies(scene: Scene) -> str:
    return await unacknowledged(await scene.a_peer(), Add("a", 1), first=1, count=5)


@past({"session_replies_bytes_max": 450}, "bytes of replies of this client", "read replies before sending more")
async def session_replies_bytes(scene: Scene) -> str:
    return await unacknowledged(await scene.a_peer(), Add("a", 1), first=1, count=6)


@past({"replies_bytes_max": 5000}, "bytes of replies", "read replies before sending more")
async def all_replies(scene: Scene) -> str:
    large = CompareAndSet(key="a", value=bytes(400), expected_revision=0)
    await unacknowledged(await scene.a_peer(), large, first=1, count=40)
    message = await unacknowledged(await scene.a_peer(), Append("b", b"x"), first=1, count=2)
    assert scene.server.figures()["replies_bytes"] <= 6000
    return message


@past({"session_ttl": 0.2}, "another session", "")
async def a_session_that_was_left(scene: Scene) -> str:
    numbers = []
    for pause in (0.0, 0.3, 0.0):
        peer = await scene.a_peer(session_id=b"a session's name")
        assert peer.connection.welcomed is not None
        numbers.append(peer.connection.welcomed.session)
        peer.transport.abort()
        while scene.server.connections > 3:
            await scene.client.ping()
        await asyncio.sleep(pause)  # of `session_ttl`, which is counted on the server's real clock
    assert numbers[0] == numbers[1], "in time"
    assert numbers[2] != numbers[0], "too late: its client knows by the number that nobody remembers it"
    return "session_ttl is 0.2: another session"


@past({"leases_max": 2}, "have 3 leases", "revoke some")
async def leases(scene: Scene) -> str:
    await scene.client.grant(10.0)
    await scene.client.grant(10.0)
    return await refusal(scene.client.grant(10.0))


@past({"lease_ttl_max": 2.5}, "ttl is 3 s", "ask for less, and renew it")
async def a_ttl(scene: Scene) -> str:
    return await refusal(scene.client.grant(3.0))


async def hung_up_on(scene: Scene, said: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.server.port)
    writer.write(said)
    told = (await asyncio.wait_for(reader.read(), 5.0)).decode(errors="replace")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    assert len(scene.log.records) == 1
    logged = scene.log.records[0].getMessage()
    scene.log.clear()
    assert logged.partition("disconnected: ")[2] in told, "the disconnected client is told the same"
    return logged


@past({"handshake_timeout": 0.2}, "no hello within 0.2 s", "")
async def a_handshake(scene: Scene) -> str:
    return await hung_up_on(scene, b"\0\0")


@past({"frame_timeout": 0.2}, "half a frame and 0.2 s of silence", "")
async def half_a_frame(scene: Scene) -> str:
    hello = wire.encode_opening(wire.Hello(wire.VERSION, bytes(16), bytes(16), b""))
    return await hung_up_on(scene, hello + b"\0\0\1\0half")


class Bystander:
    """Two clients that go on working all the time, and must not notice anything."""

    def __init__(self, writer: store.Client, reader: store.Client, watch: Any) -> None:
        self.writer, self.reader, self.watch = writer, reader, watch
        self.losses: list[bool] = []
        self.written = 0
        for client in (writer, reader):
            client.on_connection_change(self.losses.append)

    async def works(self) -> None:
        """Write, and get exactly this event from the watch."""
        self.written += 1
        await self.writer.put("bystander", b"%d" % self.written, timeout=30.0)
        async with asyncio.timeout(30.0):
            event = await anext(self.watch)
            while event.value == b"0" or event.kind == "delete":  # from a case that clears all keys
                event = await anext(self.watch)
        assert event.value == b"%d" % self.written
        assert self.losses == []


@contextlib.asynccontextmanager
async def bystander(server: Server) -> AsyncIterator[Bystander]:
    async with (
        store.connect(server.url) as writer,
        store.connect(server.url) as reader,
        reader.watch("bystander") as watch,
    ):
        it = Bystander(writer, reader, aiter(watch))
        await it.works()
        yield it
        await it.works()


@pytest.mark.parametrize("limit", CASES)
async def test_s6_one_past_a_limit_is_one_clear_error_and_does_not_affect_others(
    limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits, shown, go_past = CASES[limit]
    async with (
        store.serve(limits=limits_with(**limits)) as server,
        bystander(server) as others,
        store.connect(server.url, timeout=60.0) as client,
    ):
        scene = Scene(server, client, caplog)
        try:
            async with asyncio.timeout(60.0):
                message = await go_past(scene)
            for what in (limit, f"{limits[limit]:g}" if limits[limit] < 10**6 else str(limits[limit]), *shown):
                assert what in message, message
            assert "\n" not in message
            assert len(message) < 400
            await others.works()
            await client.ping(timeout=60.0)
            more = [each.getMessage() for each in caplog.records if " % of " not in each.getMessage()]
            assert more == [], "and nothing more in the log than that a limit is near"
        finally:
            await scene.aclose()


def test_s6_every_limit_has_a_case_that_goes_past_it() -> None:
    """So that a limit added later is not forgotten."""
    assert set(CASES) == {*Limits.__annotations__, "sessions_max"}
    assert all(re.fullmatch("[a-z_]+", limit) for limit in CASES)


async def test_s6_when_memory_is_full_the_peer_with_the_oldest_half_request_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(
        memory_bytes_max=9 * MIB,
        frame_bytes_max=2 * MIB,
        value_bytes_max=MIB,
        outbox_bytes_max=MIB,
        history_bytes_max=MIB // 4,
    )
    async with (
        store.serve(limits=limits) as server,
        bystander(server) as others,
        store.connect(server.url, timeout=60.0) as client,
    ):
        scene = Scene(server, client, caplog)
        slow = [await scene.a_peer() for _ in range(9)]
        for number, peer in enumerate(slow, start=1):
            peer.transport.write((2 * MIB).to_bytes(4, "big") + bytes(MIB - 1000))
            while server.figures()["inbox_bytes"] < number * (MIB - 1000) and not caplog.records:  # noqa: ASYNC110
                # it is read in pieces; the first must have been there for longer than the others
                await asyncio.sleep(0)
            assert server.figures()["memory_bytes"] <= 9 * MIB
        await slow[0].lost.wait()
        assert "memory_bytes_max" in str(slow[0].problem), "who has held so much for longest is told, and comes again"
        await others.works()
        for peer in slow:
            peer.transport.abort()
        while server.figures()["inbox_bytes"]:
            await client.ping()
        await scene.aclose()


async def test_s6_a_transaction_writes_no_more_than_a_frame_holds_also_if_it_appends() -> None:
    """Each append writes its whole value again."""
    limits = Limits(frame_bytes_max=6000, value_bytes_max=1900)
    async with store.serve(limits=limits) as server, store.connect(server.url) as client:
        for key in "abcd":
            await client.put(key, bytes(1500))
        message = await refusal(client.transact(then=[Append("a", b"1"), *(Append(key, b"") for key in "bcd")]))
        assert "values of 6001 bytes" in message
        assert "frame_bytes_max is 6000" in message
        assert (await client.transact(then=[Append(key, b"") for key in "abcd"])).succeeded


@pytest.mark.in_ci
async def test_s6_one_transaction_carries_ten_thousand_conditions() -> None:
    """One transaction may carry 10,000 conditions within the frame limit."""
    keys = [f"rdzv/a-run-with-a-long-name/nodes/{number:05d}" for number in range(10_000)]
    async with store.serve() as server, store.connect(server.url) as client:
        await asyncio.gather(*[client.put(key, b"", timeout=60.0) for key in keys])
        entries = await client.get_many(keys)
        conditions = [
            when.mod_revision(key) == entry.mod_revision
            for key, entry in zip(keys, entries, strict=True)
            if entry is not None
        ]
        assert len(conditions) == 10_000
        result = await client.transact(when=conditions, then=[Put("done", b"")])
        assert result.succeeded
        await client.put(keys[-1], b"changed")
        result = await client.transact(when=conditions, then=[Put("done", b"again")])
        assert not result.succeeded, "each of them counts"
        assert len(wire.encode_request(1, 0, GetMany(keys=tuple(keys)))) < Limits().frame_bytes_max


async def test_s6_a_client_that_reads_nothing_costs_less_than_its_outbox_and_its_watch_resumes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(outbox_bytes_max=4 * MIB, history_bytes_max=64 * MIB)
    async with (
        store.serve(limits=limits) as server,
        store.connect(server.url) as writer,
        store.connect(server.url) as reader,
        reader.watch("a", snapshot=True) as watch,
    ):
        batches = watch.batches()
        assert [event.kind for event in await anext(batches)] == ["synced"]
        assert reader._link is not None
        assert reader._link.transport is not None
        reader._link.transport.pause_reading()
        worst = 0
        for _ in range(240):
            await writer.put("a", bytes(256 * 1024))  # 60 MB
            worst = max(worst, server.figures()["outbox_bytes"])
        assert 1 * MIB < worst <= 4 * MIB + 1000
        assert "reads too slowly" in caplog.text
        reader._link.transport.resume_reading()
        revisions: list[int] = []
        async with asyncio.timeout(60):
            while len(revisions) < 240:
                revisions += [event.revision for event in await anext(batches)]
        assert revisions == list(range(revisions[0], revisions[0] + 240))


async def test_s6_a_packet_that_requests_gigabytes_costs_at_most_one_peers_limit() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        await client.put("large", bytes(8 * MIB))
        assert client._link is not None
        assert client._link.transport is not None
        client._link.transport.pause_reading()
        tracemalloc.start()
        try:
            asking = [asyncio.create_task(client.get("large", timeout=60.0)) for _ in range(500)]  # 4 GB of answers
            async with store.connect(server.url) as other:
                for _ in range(20):
                    await other.ping()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 64 * MIB
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
