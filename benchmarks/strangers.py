"""The latency of a call, alone and beside a process that sends the server only garbage.

    python -m benchmarks.strangers

The server, the well-behaved client, and the sender of garbage have a process each. The sender opens a connection for
each input: random bytes, TLS, HTTP, frames of garbage before and after a good hello, frames that claim gigabytes, and
frames full of empty arrays, which cost most to decode. There is no peer: PyTorch's TCPStore does not authenticate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import time
from typing import TYPE_CHECKING

import anyio

import store
from benchmarks import support
from benchmarks.support import ms
from store.net.address import Address
from store.protocol import wire

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PATIENCE = 60.0
AT_ONCE = 20  # connections of one sender


def bad_input(rng: random.Random) -> tuple[bytes, bytes]:
    """Return invalid input, and before it perhaps a valid hello."""
    hello = wire.encode_opening(wire.Hello(wire.VERSION, rng.randbytes(16), rng.randbytes(16), b""))
    garbage = rng.randbytes(rng.randrange(1, 300))
    framed = len(garbage).to_bytes(4, "big") + garbage
    arrays = b"\x94\x06\x01\x00\xdd\x00\x00\xf0\x00" + b"\x90" * 0xF000
    return rng.choice(
        [
            (b"", garbage),
            (b"", b"\x16\x03\x01" + garbage),
            (b"", b"GET / HTTP/1.1\r\n\r\n"),
            (b"", framed),
            (hello, framed),
            (hello, b"\x7f\xff\xff\xff" + garbage),
            (hello, len(arrays).to_bytes(4, "big") + arrays),
        ]
    )


def serve_quietly(pipe: Connection) -> None:
    """Serve a store without logging; the promised line per input would be too many here."""
    logging.getLogger("store").setLevel(logging.ERROR)

    async def main() -> None:
        async with store.serve() as server:
            pipe.send(server.url)
            await asyncio.Event().wait()

    support.run(main())


def sender(pipe: Connection, url: str, seed: int, rate: float) -> None:
    """Send bad input until told to stop, `rate` per second or unlimited for 0; report the number."""
    address = Address.parse(url)

    async def send(rng: random.Random) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                before, said = bad_input(rng)
                with anyio.fail_after(5.0):
                    await reader.read(65536)  # the greeting
                    if before:
                        writer.write(before)
                        await reader.read(65536)
                    writer.write(said)
                    writer.write_eof()
                    while await reader.read(65536):
                        pass
            finally:
                writer.transport.abort()

    async def main() -> None:
        rng = random.Random(seed)
        sent = 0
        stop = asyncio.create_task(support.hear(pipe))

        async def go_on() -> None:
            nonlocal sent
            while not stop.done():
                began = time.monotonic()
                await send(rng)
                sent += 1
                if rate:
                    await anyio.sleep(max(0.0, AT_ONCE / rate - (time.monotonic() - began)))

        pipe.send("sending")
        await asyncio.gather(*[go_on() for _ in range(AT_ONCE)])
        pipe.send(sent)

    support.run(main())


def caller(pipe: Connection, url: str, seconds: float) -> None:
    """Call repeatedly for `seconds`; report the latencies."""

    async def main() -> None:
        times = []
        async with store.connect(url) as client:
            losses: list[bool] = []
            client.on_connection_change(losses.append)
            pipe.send("connected")
            until = await support.hear(pipe) + seconds
            while time.monotonic() < until:
                began = time.monotonic()
                await client.add("count", 1)
                times.append(time.monotonic() - began)
            assert not losses, "it was disconnected"
            assert await client.add("count", 0) == len(times)
        pipe.send(times)

    support.run(main())


def measure(senders: int, rate: float, seconds: float) -> tuple[list[float], int]:
    """Return the latencies, and the number of bad inputs meanwhile."""
    with support.workers((serve_quietly,)) as (server,):
        url = server.hear(PATIENCE)
        with support.workers(*[(sender, url, seed, rate) for seed in range(senders)]) as strangers:
            for stranger in strangers:
                assert stranger.hear(PATIENCE) == "sending"
            with support.workers((caller, url, seconds)) as (good,):
                assert good.hear(PATIENCE) == "connected"
                times = good.ask(time.monotonic(), PATIENCE + seconds)
            return times, sum(stranger.ask("stop", PATIENCE) for stranger in strangers)


def quantile(times: list[float], share: float) -> float:
    """Return the quantile of the times."""
    return sorted(times)[min(int(len(times) * share), len(times) - 1)]


def main() -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strangers", description=summary)
    parser.add_argument("--seconds", type=float, default=5.0, help="of calls, for each row")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[100, 500, 0], help="bad inputs a second; 0: all it can"
    )
    options = parser.parse_args()
    print(support.describe_machine())
    rows = []
    for senders, rate in [(0, 0.0), *[(1, rate) for rate in options.rates], (0, 0.0)]:
        times, inputs = measure(senders, rate, options.seconds)
        said = (
            "nobody"
            if not senders
            else f"{inputs / options.seconds:.0f} inputs a second" + ("" if rate else ", all it can")
        )
        rows.append((said, str(len(times)), *(ms(quantile(times, share)) for share in (0.5, 0.99, 1.0))))
    support.table("One call of a client that behaves", ("beside it", "calls", "median, ms", "p99", "worst"), rows)


if __name__ == "__main__":
    main()
