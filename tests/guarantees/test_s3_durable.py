"""S3: Durable, if asked.

With a data directory, acknowledged changes survive `kill -9` and power loss, also those of sessions and leases. No
reply, read or watch event that shows a revision leaves the server before that revision is on disk: outboxes are held,
in order. A store without a data directory says so at start.

`RDZV_KILLS` sets how often the server is killed; `RDZV_SEED` when.
"""

import asyncio
import contextlib
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import store
from store import Client, ConnectionLost, Event, LeaseNotFound, LimitExceeded, StoreUsageError
from tests.support.processes import Child, free_port, start, start_python
from tests.support.spoken import TimeToLive

pytestmark = pytest.mark.some_here(3)

KILLS = int(os.environ.get("RDZV_KILLS", "5"))
SEED = int(os.environ.get("RDZV_SEED", "7"))
FILE = "store.sqlite3"
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
WRITERS = 4  # clients, each of which has a caller of every sort below


def serving(directory: Path, port: int, *more: str) -> contextlib.AbstractAsyncContextManager[Child]:
    arguments = ("--port", str(port), "--data-dir", str(directory), *more)
    return start_python("-m", "rdzv", "serve", *arguments)


class Load:
    """Callers that remember all replies, and check later replies against them."""

    def __init__(self) -> None:
        self.answers = 0
        self.done = False
        self.sums: dict[str, int] = {}
        self.puts: dict[str, tuple[bytes, int]] = {}
        self.heard = asyncio.Event()  # set at each answer

    def _answered(self) -> None:
        self.answers += 1
        self.heard.set()

    async def add(self, client: Client, key: str) -> None:
        """Count; every sum is one more than the last, or an addition was lost or made twice."""
        while not self.done:
            self.sums[key] = self.sums.get(key, 0) + 1
            assert await client.add(key, 1) == self.sums[key], f"the sum of {key} is not what was added"
            self._answered()

    async def add_together(self, client: Client) -> None:
        """Count together with all other callers; only the final sum can be checked."""
        while not self.done:
            await client.add("together", 1)
            self.sums["together"] = self.sums.get("together", 0) + 1
            self._answered()

    async def put(self, client: Client, prefix: str) -> None:
        """Write new keys; an acknowledged one must be found, at its acknowledged revision."""
        number = 0
        while not self.done:
            key, value = f"{prefix}/{number}", b"%d" % number * (number % 50)
            self.puts[key] = (value, await client.put(key, value))
            self._answered()
            number += 1

    async def replace(self, client: Client, key: str) -> None:
        """Replace the value of the last write. The server rejects this if that write was lost, or made twice."""
        revision = 0
        while not self.done:
            result = await client.compare_and_set(key, b"%d" % revision, expected_revision=revision)
            assert result.succeeded, f"{key} is at {result.entry}, and revision {revision} was acknowledged"
            assert result.entry is not None
            assert result.entry.mod_revision > revision, "revisions go on"
            revision = result.entry.mod_revision
            self._answered()

    async def next_answers(self, count: int) -> None:
        until = self.answers + count
        while self.answers < until:
            self.heard.clear()
            await self.heard.wait()


async def watch_all(client: Client) -> list[Event]:
    """Watch everything from the first revision on, up to the key `last`."""
    events: list[Event] = []
    async with client.watch("", start_revision=1) as changes:
        async for event in changes:
            events.append(event)
            if event.key == "last":
                break
    return events


async def kill_at_random(directory: Path, port: int, load: Load, *, rng: random.Random) -> None:
    """Start the server and kill it, again and again: mostly under load, sometimes before it is ready."""
    for _ in range(KILLS):
        async with serving(directory, port) as server:
            if rng.random() < 0.8:
                await load.next_answers(1 + rng.randrange(100))
            await asyncio.sleep(rng.uniform(0, 0.05))
            server.kill()


@pytest.mark.in_ci
async def test_s3_acknowledged_changes_survive_kill_9(tmp_path: Path) -> None:
    """Acknowledged changes survive `kill -9`: the effect of each answered request is there once (S2), in the same store
    (S10), and a watch reports each of them without a gap or a double (S4).
    """
    load, port = Load(), free_port()
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as background:
        killing = background.create_task(kill_at_random(tmp_path, port, load, rng=random.Random(SEED)))
        connecting = [store.connect(f"tcp://127.0.0.1:{port}", timeout=60) for _ in range(WRITERS + 1)]
        watcher, *writers = [await stack.enter_async_context(client) for client in connecting]
        store_id = watcher.store_id
        watching = background.create_task(watch_all(watcher))
        async with asyncio.TaskGroup() as callers:
            for number, client in enumerate(writers):
                callers.create_task(load.add(client, f"sum{number}"))
                callers.create_task(load.add_together(client))
                callers.create_task(load.put(client, f"put{number}"))
                callers.create_task(load.replace(client, f"replaced{number}"))
            await killing
            await stack.enter_async_context(serving(tmp_path, port))
            await load.next_answers(1)
            load.done = True
        client = writers[0]
        last = await client.put("last", b"")
        entries = {entry.key: entry for entry in await client.list("")}
        events = await watching
    assert {client.store_id for client in [watcher, *writers]} == {store_id}
    for key, (value, revision) in load.puts.items():
        assert (entries[key].value, entries[key].mod_revision) == (value, revision), f"{key} was acknowledged"
    assert {key: int(entries[key].value) for key in load.sums} == load.sums
    assert sum(key.startswith("put") for key in entries) == len(load.puts)
    assert [event.revision for event in events] == list(range(1, last + 1))
    assert {event.key: event.entry for event in events} == entries


async def test_s3_leases_survive_kill_9_with_their_full_ttl(tmp_path: Path) -> None:
    """ "sessions and leases included"; S5: "After a restart every lease gets its full TTL again", and "`disconnect_ttl`
    is off until a lease's first keep-alive".
    """
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        leaving = await stack.enter_async_context(contextlib.AsyncExitStack())
        async with serving(tmp_path, port) as server:
            keeper = await leaving.enter_async_context(store.connect(url, timeout=30))
            lease = await keeper.grant(10.0, disconnect_ttl=0.1)
            await keeper.put("held", b"", lease=lease)
            await keeper.put("alone", b"", ttl=10.0)
            while await lease.time_to_live() > 8.5:
                await keeper.ping()
            server.kill()
        server = await stack.enter_async_context(serving(tmp_path, port))
        await server.says("listens on")
        other = await stack.enter_async_context(store.connect(url, timeout=30))
        left = (await other.call(TimeToLive(lease=lease.id))).remaining
        assert left > 9.0, "counted from the restart"
        assert await other.get("alone") is not None
        await keeper.ping()
        await leaving.aclose()
        while (await other.stats())["connections"] > 1:
            await other.ping()
        left = (await other.call(TimeToLive(lease=lease.id))).remaining
        assert left > 0.2, "nobody has kept it since the restart, so nobody's leaving shortens it"
        async with other.watch("held") as changes:
            async with store.connect(url) as again:
                await store.Lease(again, id=lease.id, ttl=lease.ttl).keep_alive()
            async with asyncio.timeout(60):
                assert [(await anext(aiter(changes))).kind] == ["delete"]
        with pytest.raises(LeaseNotFound):
            await other.call(TimeToLive(lease=lease.id))


def can_mount() -> bool:
    try:
        return subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode == 0
    except OSError:
        return False


class FileLimit:
    """The system lets no file of the server's grow any more, and then does again."""

    async def serve(self, stack: contextlib.AsyncExitStack, directory: Path, port: int) -> None:
        self._server = await stack.enter_async_context(serving(directory, port, "-v"))
        self._directory = directory

    def fill(self) -> None:
        size = max(path.stat().st_size for path in self._directory.iterdir() if path.name != "reserve")
        resource.prlimit(self._server.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def empty(self) -> None:
        resource.prlimit(self._server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    async def says(self, what: str) -> None:
        await self._server.says(what)


class SmallDisk:
    """A file system of its own, in memory, that is filled up, and emptied again."""

    async def serve(self, stack: contextlib.AsyncExitStack, directory: Path, port: int) -> None:
        if not can_mount():
            pytest.skip("skipped, this system lets nobody mount a file system of their own")
        script = 'mount -t tmpfs -o size=24m none "$1" && exec "$2" -m rdzv serve -v --port "$3" --data-dir "$1/data"'
        here = str(Path(__file__).parents[2])
        self._server = await stack.enter_async_context(
            start(
                *(*OWN_MOUNTS, "sh", "-c", script, "sh"),
                *(str(directory), sys.executable, str(port)),
                env={"PYTHONPATH": here},
            )
        )
        self._ballast = Path(f"/proc/{self._server.pid}/root{directory}/ballast")

    def fill(self) -> None:
        with contextlib.suppress(OSError), open(self._ballast, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def empty(self) -> None:
        self._ballast.unlink()

    async def says(self, what: str) -> None:
        await self._server.says(what)


@pytest.mark.parametrize("disk", [FileLimit, SmallDisk])
async def test_s3_a_full_disk_refuses_writes_and_nothing_else(
    tmp_path: Path, disk: Callable[[], FileLimit | SmallDisk]
) -> None:
    full, port = disk(), free_port()
    async with contextlib.AsyncExitStack() as stack:
        await full.serve(stack, tmp_path, port)
        client = await stack.enter_async_context(store.connect(f"tcp://127.0.0.1:{port}", timeout=30))
        kept, unkept = await client.grant(1.0), await client.grant(1.5)
        await client.put("kept", b"1", lease=kept)
        await client.put("unkept", b"1", lease=unkept)
        changes = aiter(await stack.enter_async_context(client.watch("unkept")))

        full.fill()
        with pytest.raises(LimitExceeded):
            await client.put("large", bytes(1_000_000))
        await full.says("cannot write")
        with pytest.raises(LimitExceeded):
            await client.add("sum", 1)
        with pytest.raises(LimitExceeded):
            await client.grant(1.0)
        await kept.keep_alive()
        assert await client.get("kept") is not None, "reading goes on"

        full.empty()
        async with asyncio.timeout(60):
            while True:
                await kept.keep_alive()
                with contextlib.suppress(LimitExceeded):
                    await client.put("large", bytes(1_000_000))
                    break
            await full.says("can write again")
            event = await anext(changes)
            while event.kind != "delete":
                event = await anext(changes)
        assert event.key == "unkept", "its time was over long ago"
        await kept.keep_alive()
        entry = await client.get("kept")
        assert entry is not None
        assert (entry.value, entry.mod_revision) == (b"1", 1)
        assert await client.add("sum", 1) == 1, "what was refused was not done"


async def test_s3_changes_in_doubt_after_a_failed_fsync_are_not_announced_and_a_crash_contradicts_no_reply(
    tmp_path: Path,
) -> None:
    """No client is told of a change before it is on disk.

    Data that is written and not synced is in the file, and a server that starts on it after a crash finds it. A server
    that went on without it told its readers that the change was not there, and its writer that it was not applied.
    """
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    arguments = ("serve", "--port", str(port), "--data-dir", str(tmp_path))
    async with contextlib.AsyncExitStack() as stack:
        async with start_python("-m", "tests.support.failing_syncs", *arguments) as server:
            await server.says("listens on")
            writer = await stack.enter_async_context(store.connect(url, timeout=30.0))
            reader = await stack.enter_async_context(store.connect(url, timeout=30.0))
            assert await writer.put("kept", b"1") == 1
            server._signal(signal.SIGUSR1)
            said = await server.says("syncs ")
            if "cannot" in said:
                pytest.skip(f"skipped, {said}")
            adding = asyncio.create_task(writer.add("doubtful", 5))
            await server.says("accepts no client, as the disk's contents are in doubt")
            with pytest.raises(ConnectionLost):
                async with store.connect(url, timeout=0.5):
                    raise AssertionError("it was told something")
            reading = asyncio.create_task(reader.get("doubtful"))
            await asyncio.sleep(0.1)
            assert not adding.done(), "nor is it told that nothing was done"
            assert not reading.done()
            server.kill()
        async with serving(tmp_path, port):
            assert await adding == 5
            assert await writer.add("doubtful", 1) == 6, "once, whether it was on disk or not"
            entry = await reading
            assert entry is None or entry.value in (b"5", b"6")
            entry = await reader.get("kept")
            assert entry is not None
            assert entry.mod_revision == 1


async def test_s3_without_a_directory_the_store_says_that_it_is_memory_only(tmp_path: Path) -> None:
    async with start_python("-m", "rdzv", "serve", "--port", "0") as server:
        await server.says("in memory only: it ends with this process")
    async with start_python("-m", "rdzv", "serve", "--port", "0", "--data-dir", str(tmp_path)) as server:
        assert "memory" not in await server.says("listens on")
        await server.says(f"kept in {tmp_path}")


async def killed_after(directory: Path, writes: int) -> None:
    """Create a store in which so many writes were acknowledged, one after the other, before it was killed."""
    port = free_port()
    async with serving(directory, port) as server, store.connect(f"tcp://127.0.0.1:{port}") as client:
        for number in range(writes):
            await client.put(f"key {number}", b"v" * 40)
        server.kill()


def data_in(directory: Path) -> dict[str, bytes]:
    """Return the files that hold data, without the index that SQLite makes of its log."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.name.startswith(FILE) and not path.name.endswith("-shm") and path.stat().st_size
    }


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["early in the log", "in its last write", "the log cut off", "the log taken away"])
async def test_s3_damage_that_costs_acknowledged_writes_is_never_passed_over(tmp_path: Path, damage: str) -> None:
    """Acknowledged changes survive: one flipped byte in SQLite's log lost all of them silently."""
    await killed_after(tmp_path, 40)
    log = tmp_path / "store.sqlite3-wal"
    match damage:
        case "early in the log":
            flip(log, 32 + 24 + 100)
        case "in its last write":
            flip(log, log.stat().st_size - 100)
        case "the log cut off":
            os.truncate(log, log.stat().st_size - 100)
        case _:
            log.unlink()
    before = data_in(tmp_path)
    with pytest.raises(StoreUsageError, match=r"has lost changes that were acknowledged.*rdzv restore"):
        async with store.serve(data_dir=tmp_path):
            raise AssertionError("it serves what is left of the store")
    assert data_in(tmp_path) == before, "nothing was changed"


async def test_s3_a_store_that_was_killed_and_is_whole_goes_on(tmp_path: Path) -> None:
    """The same without damage: there is no false alarm, also after several starts."""
    for count in (3, 1, 30):
        await killed_after(tmp_path, count)
    async with store.serve(data_dir=tmp_path) as server, store.connect(server.url) as client:
        assert await client.count("key ") == 30


async def test_s3_a_reader_that_holds_sqlites_lock_costs_time_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A backup tool that held it for 5 s ended all connections."""
    async with store.serve(data_dir=tmp_path) as server, store.connect(server.url, timeout=60.0) as client:
        await client.put("k", b"1")
        with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            writing = asyncio.create_task(client.put("k", b"2"))
            await asyncio.sleep(2.5)  # of SQLite's own real time: longer than one of its waits for a lock
            assert not writing.done()
            other.execute("ROLLBACK")
        assert await writing == 2
        assert "cannot write" not in caplog.text, "nor did the server hang up on anybody"
