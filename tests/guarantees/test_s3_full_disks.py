"""S3, on a disk that is full: deletes are always accepted, and leases expire.

    docs/failures.md: "the disk of a durable store is full: writes fail with `LimitExceeded`; reads and deletes go on"

Each case has a file system of its own, which the test fills.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import store
from store import LimitExceeded
from tests.support.processes import Child, free_port, start

OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
MOUNT = {
    "tmpfs": 'mount -t tmpfs -o size="$4" none "$1"',
    "ext4": 'truncate -s "$4" "$1.img" && mkfs.ext4 -q -m 0 "$1.img" && mount -o loop "$1.img" "$1"',
}
SERVE = 'exec "$2" -m rdzv serve --port "$3" --data-dir "$1/data"'
AT_ONCE = 64


@contextlib.asynccontextmanager
async def serving(directory: Path, kind: str, size: str, port: int) -> AsyncIterator[Child]:
    """A server on a file system of its own."""
    # Only root can mount a loop device; any user can mount a tmpfs in a namespace of their own.
    own = OWN_MOUNTS if kind == "tmpfs" else ("unshare", "--mount")
    arguments = ("sh", str(directory), sys.executable, str(port), size)
    tried = subprocess.run([*own, "sh", "-c", MOUNT[kind], *arguments], capture_output=True, check=False)  # noqa: ASYNC221
    if tried.returncode:
        pytest.skip(f"skipped, this system lets nobody mount a {kind} of their own")
    directory.with_name(f"{directory.name}.img").unlink(missing_ok=True)
    async with start(
        *own, "sh", "-c", f"{MOUNT[kind]} && {SERVE}", *arguments, env={"PYTHONPATH": str(Path(__file__).parents[2])}
    ) as server:
        await server.says("listens on")
        yield server


READER = """import sqlite3, sys, time
reader = sqlite3.connect(sys.argv[1], isolation_level=None)
reader.execute("BEGIN")
reader.execute("SELECT count(*) FROM entries").fetchone()
print("it reads", file=sys.stderr, flush=True)
time.sleep(1000)
"""


@contextlib.asynccontextmanager
async def read_by_another(server: Child, directory: Path) -> AsyncIterator[None]:
    """Let another program read the database all the time, so that its log cannot be emptied."""
    namespaces = ("--mount", "--user", "--preserve-credentials")[: 3 if "--user" in server.name else 1]
    async with start(
        "nsenter",
        "--target",
        str(server.pid),
        *namespaces,
        sys.executable,
        "-c",
        READER,
        str(directory / "data" / "store.sqlite3"),
    ) as reader:
        await reader.says("it reads")
        yield


async def fill(client: store.Client, size: int) -> list[str]:
    """Put values until the store rejects one; return the keys that exist."""
    stored: list[str] = []
    while True:
        keys = [f"k/{len(stored) + number}" for number in range(AT_ONCE if size < 100_000 else 1)]
        done = await asyncio.gather(*(client.put(key, bytes(size)) for key in keys), return_exceptions=True)
        stored += [key for key, how in zip(keys, done, strict=True) if not isinstance(how, BaseException)]
        failed = [how for how in done if isinstance(how, BaseException)]
        assert all(isinstance(how, LimitExceeded) for how in failed), failed
        if failed:
            return stored


@pytest.mark.some_of(2)
@pytest.mark.parametrize(
    ("kind", "size", "read"),
    [
        ("tmpfs", 300, False),
        ("tmpfs", 50_000, False),
        ("tmpfs", 50_000, True),
        ("tmpfs", 8_000_000, False),
        ("ext4", 1_000_000, True),
    ],
)
@pytest.mark.in_ci
async def test_s3_on_a_full_disk_deletes_are_taken_and_leases_lapse(
    tmp_path: Path, kind: str, size: int, read: bool
) -> None:
    port = free_port()
    disk = tmp_path / "disk"
    disk.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(disk, kind, "20M" if size < 1000 else "32M", port))
        client = await stack.enter_async_context(store.connect(f"tcp://127.0.0.1:{port}", timeout=30))
        reading = contextlib.AsyncExitStack()
        await client.put("leased", b"", lease=(lease := await client.grant(4.0)))
        if read:
            await reading.enter_async_context(read_by_another(server, disk))
        async with reading:
            kept = asyncio.create_task(keep(lease))
            stored = await fill(client, size)
            kept.cancel()
            unkept_since = time.monotonic()
            await report(client)
            # First one by one, then many at once. With a log that cannot be emptied, delete only some of them.
            one_by_one = stored[: 20 if read else 100]
            for key in one_by_one:
                assert await until_taken(client, key)
            spread = () if read else stored[len(one_by_one) :: max(len(stored) // 512, 1)][:512]
            if spread:
                deleted = await client.transact(then=[store.Delete(key) for key in spread])
                assert deleted.results == (True,) * len(spread), "also from all over the file"
            many = stored[len(one_by_one) : 2 * len(one_by_one) if read else len(stored)]
            for first in range(0, len(many), 2000):
                there = set(many[first : first + 2000]).difference(spread)
                assert all(await asyncio.gather(*map(client.delete, there)))
            while await client.get("leased") is not None:
                assert time.monotonic() - unkept_since < 5.5, "5 s, and what a busy machine takes"
                await asyncio.sleep(0.1)
        await writes_again(client, min(size, 100_000))
        assert server.returncode is None


START_FULL = (
    'mount -t tmpfs -o size="$4" none "$1" && cp -a --sparse=never "$5" "$1/data"; '
    'dd if=/dev/zero of="$1/hog" bs=4k 2>/dev/null; '
)


async def test_s3_a_server_starts_on_a_full_disk_and_takes_deletes(tmp_path: Path) -> None:
    """It called the store damaged, and advised to move it away, although room is kept back for this."""
    port, disk, data = free_port(), tmp_path / "disk", tmp_path / "data"
    disk.mkdir()
    async with store.serve(data_dir=data) as server, store.connect(server.url) as client:
        await client.put("k/1", bytes(10_000))
        await client.put("k/2", bytes(10_000))
    if subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", disk], check=False).returncode:  # noqa: ASYNC221
        pytest.skip("skipped, this system lets nobody mount a tmpfs of their own")
    arguments = ("sh", str(disk), sys.executable, str(port), "16M", str(data))
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    async with start(*OWN_MOUNTS, "sh", "-c", START_FULL + SERVE, *arguments, env=path) as child:
        await child.says("takes only deletes")
        async with store.connect(f"tcp://127.0.0.1:{port}", timeout=30) as client:
            assert await client.get("k/1") is not None
            with pytest.raises(LimitExceeded, match="takes only deletes"):
                await client.put("k/3", bytes(100_000))
            assert await until_taken(client, "k/1")
            assert await client.count("k/") == 1


async def report(client: store.Client) -> None:
    """Write as a coordinator does, which is taken; and much more often, after which deletes must still be taken."""
    taken = 0
    async with asyncio.timeout(20.0):
        while not taken:
            for number in range(300):
                with contextlib.suppress(LimitExceeded):
                    taken += await client.put("/rdzv/job/head/progress", bytes(1000 + number)) > 0
            await asyncio.sleep(0.1)


async def until_taken(client: store.Client, key: str) -> bool:
    """Delete a key. For a moment after a failure the server rejects all writes."""
    async with asyncio.timeout(2.0):
        while True:
            with contextlib.suppress(LimitExceeded):
                return await client.delete(key)
            await asyncio.sleep(0.05)


async def keep(lease: store.Lease) -> None:
    while True:
        await lease.keep_alive()
        await asyncio.sleep(0.5)


async def writes_again(client: store.Client, size: int) -> None:
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(LimitExceeded):
                await client.put("again", bytes(size))
                return
            await asyncio.sleep(0.1)
