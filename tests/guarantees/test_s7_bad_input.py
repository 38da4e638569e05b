"""S7: bad input costs its sender the connection, with one log line, and affects no other client.

`tests/store/protocol/test_bad_input.py` feeds malformed frames, by the million.
"""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator

import pytest

import store
from store import Server
from tests.support.limits import limits_with
from tests.support.seeds import FRESH
from tests.support.spoken import wire


class Bystander:
    """A well-behaved client that goes on adding, and must never notice anything."""

    def __init__(self, client: store.Client) -> None:
        self.client = client
        self.additions = 0
        self.losses: list[bool] = []
        client.on_connection_change(self.losses.append)

    async def continue_work(self) -> None:
        while True:
            self.additions += 1
            assert await self.client.add("count", 1, timeout=60.0) == self.additions


@contextlib.asynccontextmanager
async def bystander(server: Server) -> AsyncIterator[Bystander]:
    async with store.connect(server.url) as client:
        it = Bystander(client)
        going_on = asyncio.create_task(it.continue_work())
        try:
            yield it
            before = it.additions
            while it.additions < before + 10 and not going_on.done():  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
        finally:
            going_on.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await going_on
        assert it.losses == []


async def answer_to(port: int, said: bytes) -> bytes:
    """Return everything that the server sends in answer to these bytes before it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(said)
        return await asyncio.wait_for(reader.read(), 5.0)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def tls_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="store")
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    return outgoing.read()


def hello(version: int = wire.VERSION, *, session: int = 0) -> bytes:
    return wire.encode_opening(wire.Hello(version, session.to_bytes(16, "big"), bytes(16), b""))


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        pytest.param(b"\xff\xfe\xfd\xfc" * 100, "not the protocol", id="garbage"),
        pytest.param(framed(b"\xc1\xc1\xc1"), "not msgpack", id="a frame of garbage"),
        pytest.param(hello(99), "the client version 99: upgrade the server", id="another version"),
        pytest.param(
            framed(b"\x92\xa4rdzv\x92\x02\x80"), "the client version 2: upgrade", id="a later version's shape"
        ),
        pytest.param(tls_hello(), "a TLS hello on a port without TLS", id="a TLS hello"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nHost: store\r\n\r\n", "HTTP on a port", id="HTTP"),
        pytest.param(framed(b"\x93\xa4rdzv\x01\xc0"), "hello is not one of this protocol", id="half a hello"),
        pytest.param(hello() + framed(b"\x93\xa1a\x01\x00"), "does not begin with its id", id="a request of no number"),
        pytest.param(hello() + framed(b"\x93\x05\x00\x91\x02") * 2, "has 2 fields", id="a request without its field"),
        pytest.param(hello() + b"\x7f\xff\xff\xff", "is announced", id="an enormous frame"),
    ],
)
async def test_s7_bad_input_costs_the_connection_and_one_log_line(
    said: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with store.serve() as server, bystander(server):
        answer = await answer_to(server.port, said)
        assert reason in caplog.text
        assert len(caplog.records) == 1
        assert "127.0.0.1:" in caplog.text, "it says who"
        assert reason.encode() in answer, "the offender is told, too"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        pytest.param(b"", "no hello within", id="nothing at all"),
        pytest.param(hello()[:10], "no hello within", id="half a hello"),
        pytest.param(hello() + b"\x00\x00\x01\x00half", "half a frame", id="half a frame"),
    ],
)
async def test_s7_silence_in_the_middle_costs_the_connection_and_one_log_line(
    said: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with store.serve(limits=limits_with(handshake_timeout=0.2, frame_timeout=0.2)) as server, bystander(server):
        await answer_to(server.port, said)
        assert reason in caplog.text
        assert len(caplog.records) == 1


async def test_s7_thousands_of_short_connections_do_not_affect_other_clients(caplog: pytest.LogCaptureFixture) -> None:
    async with store.serve() as server, bystander(server):
        room = asyncio.Semaphore(200)

        async def come_and_go(number: int) -> None:
            async with room:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                if number % 2:
                    writer.transport.abort()
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

        await asyncio.gather(*map(come_and_go, range(2000)))
        assert caplog.records == [], "they have said nothing wrong"
        async with store.connect(server.url) as newcomer:
            while (await newcomer.stats())["connections"] > 2:  # noqa: ASYNC110 - the last ones may be on their way
                await asyncio.sleep(0)


@pytest.mark.parametrize("seed", [7, FRESH])
async def test_s7_random_bytes_from_many_peers_do_not_affect_other_clients(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    async with store.serve(limits=limits_with(handshake_timeout=0.5, frame_timeout=0.3)) as server, bystander(server):
        offences = [
            # distinct sessions, or each peer would replace the one before
            (hello(session=number) if number % 2 else b"")
            + (framed(rng.randbytes(rng.randrange(1, 200))) if number % 3 else rng.randbytes(rng.randrange(1, 5000)))
            for number in range(50)
        ]
        await asyncio.gather(*[answer_to(server.port, offence) for offence in offences])
        assert len(caplog.records) == 50, "each costs one line"
        assert {record.name for record in caplog.records} == {"store.server.accept.connection_table"}


async def test_s7_valid_requests_before_bad_input_are_carried_out() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        put = wire.encode_request(1, 0, store.Put("a", b"done"))
        await answer_to(server.port, hello() + put + b"\xff" * 40)  # no frame is so long
        entry = await client.get("a")
        assert entry is not None
        assert entry.value == b"done"
