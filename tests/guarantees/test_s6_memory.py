"""S6: a slow reader loses its watch, instead of filling the server's memory, as the system measures a real server's.

`RDZV_DEAF_MIB` sets how much data a client leaves unread: 256 by default; `.ci/run` sets 1,024.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import store
from tests.rdzv.cli.test_serve import Files
from tests.support.processes import start_python
from tests.support.spoken import Lagged, Ping, Wait, Watch
from tests.support.stores import Peer

DEAF_MIB = int(os.environ.get("RDZV_DEAF_MIB", "256"))
MIB = 2**20
OUTBOX = 64 * MIB
VALUE = 256 * 1024
SMALL = 12 * 1024  # each reader has its own copy of such a value; larger ones are shared, and count once

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="skipped, only Linux tells what a process has used"),
    pytest.mark.some_here(2),
]


def most_memory(pid: int) -> int:
    """Return the largest amount of memory that a process has had so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@contextlib.asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[int, int]]:
    """Start a server; yield its port and process id."""
    async with start_python("-m", "rdzv", "serve", "--port", "0", *arguments) as child:
        line = await child.says("listens on")
        yield int(line.partition("listens on ")[2].partition(",")[0].rpartition(":")[2]), child.pid


@contextlib.asynccontextmanager
async def watchers(port: int, count: int, *, deaf: bool = True) -> AsyncIterator[list[Peer]]:
    """Connect peers that watch. If they are `deaf`, they read nothing from now on."""
    peers: list[Peer] = []
    try:
        for _ in range(count):
            _, peer = await asyncio.get_running_loop().create_connection(Peer, "127.0.0.1", port)
            peers.append(peer)
            await peer.until(lambda peer=peer: peer.connection.welcomed)  # type: ignore[misc]
            await peer.answer(*peer.ask(Watch(prefix="")))
            if deaf:
                peer.transport.pause_reading()
        yield peers
    finally:
        for peer in peers:
            peer.transport.abort()
            await peer.lost.wait()


async def pass_by(client: store.Client, mib: int, *, size: int = VALUE) -> None:
    """Send so much data to all watchers, in values of this size."""
    for first in range(0, mib * MIB // size, 8):
        await asyncio.gather(*[client.put(f"k{first + number}", bytes(size)) for number in range(8)])
        await client.delete_prefix("k")


async def memory_without_them(client: store.Client, port: int, pid: int) -> int:
    """Return the server's memory after the same traffic to a client that does read."""
    async with watchers(port, 1, deaf=False):
        for _ in range(2):
            await pass_by(client, 64)
    return most_memory(pid)


@pytest.mark.in_ci
async def test_s6_a_client_that_reads_nothing_costs_less_than_its_outbox_limit() -> None:
    """The server spends less on it than its outbox limit while 1 GB of events passes."""
    limits = ("--limit", f"outbox_bytes_max={OUTBOX}", "--limit", f"history_bytes_max={4 * MIB}")
    async with serving(*limits) as (port, pid), store.connect(f"tcp://127.0.0.1:{port}") as client:
        before = await memory_without_them(client, port, pid)
        async with watchers(port, 1) as (deaf,):
            await pass_by(client, DEAF_MIB)
            cost = most_memory(pid) - before
            print(f"{DEAF_MIB} MiB of events passed; the client that read nothing cost {cost / MIB:.1f} MiB")
            assert cost < OUTBOX
            deaf.transport.resume_reading()
            await deaf.until(lambda: any(isinstance(said, Lagged) for said in deaf.said))


@pytest.mark.in_ci
async def test_s6_many_clients_that_read_nothing_cost_less_than_the_limit_of_all_memory() -> None:
    """Eight of them, each below its own limit, together meet the limit of all memory."""
    most = 2 * OUTBOX
    limits = (
        "--limit",
        f"memory_bytes_max={most}",
        "--limit",
        f"frame_bytes_max={40 * MIB}",
        "--limit",
        f"history_bytes_max={4 * MIB}",
    )
    async with serving(*limits) as (port, pid), store.connect(f"tcp://127.0.0.1:{port}") as client:
        before = await memory_without_them(client, port, pid)
        async with watchers(port, 8):
            await pass_by(client, 48, size=SMALL)
            cost = most_memory(pid) - before
            print(f"eight of them cost {cost / MIB:.1f} MiB")
            assert cost < most
            assert (await client.stats())["connections"] < 9, "some were hung up on"


async def test_s6_many_clients_that_do_not_read_the_same_large_values_share_them() -> None:
    """Eight of them held 384 MiB for 48 MiB of values."""
    limits = ("--limit", f"memory_bytes_max={4 * OUTBOX}", "--limit", f"history_bytes_max={4 * MIB}")
    async with serving(*limits) as (port, pid), store.connect(f"tcp://127.0.0.1:{port}") as client:
        before = await memory_without_them(client, port, pid)
        async with watchers(port, 8):
            await pass_by(client, 48)
            cost = most_memory(pid) - before
            print(f"eight of them that share what they are told cost {cost / MIB:.1f} MiB")
            assert cost < 2 * OUTBOX
            assert (await client.stats())["connections"] == 9, "nobody was hung up on"


class Waiting(Peer):
    """A client that waits for a large value, and only counts the bytes that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = False
        self.got = 0

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self.counts:
            self.got += len(data)
            self._notify()
        else:
            super().data_received(data)


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.in_ci)], ids=["tcp", "tls"])
@pytest.mark.parametrize("awaited", [Wait(keys=("go",)), Watch(prefix="go")], ids=["wait", "watch"])
async def test_s6_a_large_value_that_many_clients_wait_for_is_held_once(
    awaited: Wait | Watch, secure: bool, tmp_path: Path
) -> None:
    """60 clients that waited for 30 MB took 1,950 MiB, and some were hung up on. Here 20 read nothing at first."""
    size, loop = 30_000_000, asyncio.get_running_loop()
    limits = ("--limit", f"value_bytes_max={size}", "--limit", f"frame_bytes_max={40 * MIB}")
    files = Files(tmp_path) if secure else None
    tls = None if files is None else files.client()
    async with (
        serving(*limits, *(() if files is None else files.arguments)) as (port, pid),
        store.connect(f"{'tcps' if secure else 'tcp'}://127.0.0.1:{port}", tls=tls) as client,
    ):
        await client.put("as large", bytes(size))
        before = most_memory(pid)
        peers = [(await loop.create_connection(Waiting, "127.0.0.1", port, ssl=tls))[1] for _ in range(60)]
        for peer in peers:
            await peer.until(lambda peer=peer: peer.connection.welcomed)  # type: ignore[misc]
            peer.ask(awaited)
            await peer.answer(*peer.ask(Ping()))
            peer.counts = True
        for peer in peers[:20]:
            peer.transport.pause_reading()
        await client.put("go", bytes(size), timeout=60)
        for peer in peers[20:]:
            await peer.until(lambda peer=peer: peer.got > size)  # type: ignore[misc]
        cost = most_memory(pid) - before
        print(f"a value of {size / 1e6:.0f} MB, for which 60 clients wait, cost {cost / 1e6:.0f} MB")
        assert cost < (150_000_000 if secure else 100_000_000) + size, "the value is stored, too"
        assert (await client.stats())["connections"] == 61, "nobody was hung up on"
        for peer in peers[:20]:
            peer.transport.resume_reading()
            await peer.until(lambda peer=peer: peer.got > size)  # type: ignore[misc]
        for peer in peers:
            peer.transport.abort()
            await peer.lost.wait()
