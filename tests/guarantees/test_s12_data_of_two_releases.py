"""Promise S12: "A data directory of an older release is carried over. Else one sentence says which side is older."

The next release is this tree with the patches of `test_s12_rolling_upgrade`, and another format on the disk: one more
column, and answers with one more field.
"""

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import store
from tests.guarantees.test_s12_rolling_upgrade import LATER_RDZV, SAME_FORMAT
from tests.guarantees.test_s12_two_releases import patched
from tests.support.processes import ROOT, Child, free_port, start_python

NOW = int(re.findall(r"^FORMAT = (\d+) ", (ROOT / "store/disk/rows.py").read_text(), re.MULTILINE)[0])

CARRY_OVER = """
def _add_mood(database: sqlite3.Connection) -> None:
    leases = database.execute("SELECT id, ttl, disconnect_ttl, gone_ttl, anonymous FROM leases").fetchall()
    database.execute("DROP TABLE leases")
    for line in SCHEMA.split(";"):
        if "TABLE leases" in line:
            database.execute(line)
    sealed = [with_checksum(*lease, "carried") for lease in leases]
    database.executemany("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", sealed)


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {FORMAT - 1: _add_mood}
"""

LATER_FORMAT = {
    "store/disk/rows.py": [
        (f"FORMAT = {NOW} ", f"FORMAT = {NOW + 1} "),
        ("anonymous INTEGER, seal INTEGER", "anonymous INTEGER, mood TEXT, seal INTEGER"),
        ("int(lease.anonymous),\n", 'int(lease.anonymous),\n            "new",\n'),
        ("gone_ttl, anonymous in rows", "gone_ttl, anonymous, _ in rows"),
        ("MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}\n", CARRY_OVER),
    ]
}


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of the next release, which keeps data in another format."""
    return patched(tmp_path_factory.mktemp("later"), SAME_FORMAT, LATER_RDZV, LATER_FORMAT)


@contextlib.asynccontextmanager
async def serving(tree: Path, data_dir: Path, port: int) -> AsyncIterator[Child]:
    environment = {"PYTHONPATH": str(tree)}
    words = ("-m", "rdzv", "serve", "--port", str(port), "--data-dir", str(data_dir))
    async with start_python(*words, env=environment, cwd=tree) as server:
        yield server


async def carried_out(*words: str | Path) -> None:
    """Run a command, which must succeed."""
    async with start_python("-m", "rdzv", *map(str, words)) as command:
        assert await command.wait() == 0, command.written()


@pytest.mark.in_ci
async def test_s12_a_data_directory_is_carried_over_and_a_backup_brings_it_back(tmp_path: Path, later: Path) -> None:
    """One client goes on through the upgrade, with its session and its lease; a backup leads the way back."""
    data_dir, copy, port = tmp_path / "data", tmp_path / "copy", free_port()
    async with contextlib.AsyncExitStack() as stack:
        async with serving(ROOT, data_dir, port) as server:
            await server.says("listens on")
            client = await stack.enter_async_context(store.connect(f"tcp://127.0.0.1:{port}", timeout=60.0))
            lease = await client.grant(600.0)
            await client.put("leased", b"1", lease=lease)
            assert await client.add("count", 1) == 1
            server.terminate()
            assert await server.wait() == 0
        await carried_out("backup", data_dir, copy)
        async with serving(later, data_dir, port) as server:
            await server.says(f"was carried over from format {NOW} to {NOW + 1}")
            entry = await client.get("leased")
            assert entry is not None
            assert entry.lease == lease.id
            await lease.keep_alive()
            assert await client.add("count", 1) == 2
            async with client.watch("count", start_revision=1) as watch:  # the history was carried over, too
                events = aiter(watch)
                assert [(await anext(events)).value for _ in range(2)] == [b"1", b"2"]
            server.kill()
            await server.wait()
        async with serving(later, data_dir, port) as server:  # its own format now
            await server.says("listens on")
            assert await client.add("count", 1) == 3
            server.kill()
            await server.wait()
        before = (data_dir / "store.sqlite3").read_bytes()
        async with serving(ROOT, data_dir, port) as server:
            assert await server.wait() == 2
            (line,) = server.output
            assert f"has format {NOW + 1}, and this release, which is older than the one that wrote it" in line
        assert (data_dir / "store.sqlite3").read_bytes() == before
        older = tmp_path / "older"
        await carried_out("restore", copy, older)
        async with serving(ROOT, older, port) as server:
            await server.says("listens on")
            with pytest.raises(store.StoreReplaced):
                await client.get("count")
            async with store.connect(f"tcp://127.0.0.1:{port}", timeout=60.0) as another:
                assert await another.add("count", 1) == 2, "what was written since the upgrade is lost"
