"""Each write to a disk with each of its errors: no acknowledged change is lost, and no refused one is made.

The errors are raised where SQLite raises them, by a journal that really writes before and after.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import store
from store import LimitExceeded
from store.engine.changeset import ChangeSet
from store.server import journal as journals
from store.server.journal import Journal

ERRORS = {
    "ENOSPC": sqlite3.SQLITE_FULL,
    "EDQUOT": sqlite3.SQLITE_IOERR_WRITE,
    "EFBIG": sqlite3.SQLITE_IOERR_WRITE,
    "EIO of a write": sqlite3.SQLITE_IOERR_WRITE,
    "EIO of a sync": sqlite3.SQLITE_IOERR_FSYNC,
    "EIO of a read": sqlite3.SQLITE_IOERR_READ,
    "EIO of shared memory": sqlite3.SQLITE_IOERR_SHMSIZE,
    "EROFS": sqlite3.SQLITE_READONLY,
    "EMFILE": sqlite3.SQLITE_CANTOPEN,
}
"""By the error code of SQLite."""


class Failing(Journal):
    """A journal that fails so many times at a place of its writing.

    Attributes:
        code: The error code of SQLite.
        left: The failures that are left, by place: "begin" of a group, its "end", the "log" being emptied, a "probe".
    """

    code = sqlite3.SQLITE_FULL
    left: dict[str, int]

    def _fail(self, place: str) -> None:
        if self.left.get(place, 0):
            self.left[place] -= 1
            error = sqlite3.OperationalError(f"at the {place}")
            error.sqlite_errorcode = self.code
            raise error

    def _commit(self, group: list[ChangeSet]) -> None:
        self._fail("begin")
        super()._commit(group)

    def _check_disk_room(self, beside: int) -> None:
        self._fail("end")
        super()._check_disk_room(beside)

    def _probe_disk(self) -> bool:
        with contextlib.suppress(sqlite3.OperationalError):
            self._fail("probe")
            return super()._probe_disk()
        return False

    def _checkpoint_wal(self) -> bool:
        with contextlib.suppress(sqlite3.OperationalError):
            self._fail("log")
            return super()._checkpoint_wal()
        return False


async def delete(client: store.Client) -> None:
    assert await client.delete("there")


async def add(client: store.Client) -> None:
    await client.add("sum", 1)


async def lapse(client: store.Client) -> None:
    """Let a lease expire, in any state of the disk."""
    async with asyncio.timeout(20):
        async with client.watch("leased", snapshot=True) as watch:
            async for event in watch:
                if event.kind == "delete":
                    return


async def come(client: store.Client) -> None:
    """Let a client connect; its session is made durable before its welcome."""
    async with store.connect(str(client.name), timeout=20) as other:
        await other.get("there")


WRITES: dict[str, Callable[[store.Client], Awaitable[None]]] = {
    "a write": add,
    "a delete": delete,
    "a lapse": lapse,
    "a session": come,
}


@pytest.mark.some_of(16)
@pytest.mark.parametrize("places", [{"begin": 1}, {"end": 2}, {"begin": 3, "log": 2, "probe": 2}])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("error", ERRORS)
async def test_a_disk_that_fails_at_any_write_costs_only_the_unwritten_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, write: str, places: dict[str, int]
) -> None:
    Failing.code, Failing.left = ERRORS[error], {}
    monkeypatch.setattr(journals, "Journal", Failing)
    monkeypatch.setattr("store.server.durability.TRY_AGAIN_AFTER", 0.05)
    async with store.serve(data_dir=tmp_path) as server, store.connect(server.url, timeout=20) as client:
        await client.put("there", b"1")
        await client.put("leased", b"", lease=await client.grant(0.5))
        Failing.left = dict(places)
        refused = False
        try:
            await WRITES[write](client)
        except LimitExceeded:
            refused = True
        assert not (refused and write == "a lapse")
        Failing.left = {}
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(LimitExceeded):
                    await client.put("again", b"")
                    break
                await asyncio.sleep(0.02)
        total = await client.get("sum")
        assert (total is not None) == (write == "a write" and not refused), "refused is not done, and done is once"
        assert (await client.get("there") is None) == (write == "a delete" and not refused)
        done = {entry.key: entry.value for entry in await client.list("") if entry.key != "leased"}
    async with store.serve(data_dir=tmp_path) as server, store.connect(server.url) as client:
        left = {entry.key: entry.value for entry in await client.list("") if entry.key != "leased"}
        assert left == done


async def test_a_directory_that_is_moved_while_it_is_served_is_written_to_all_the_same(tmp_path: Path) -> None:
    async with store.serve(data_dir=tmp_path / "data") as server, store.connect(server.url) as client:
        await client.put("a", b"1")
        os.rename(tmp_path / "data", tmp_path / "moved")
        await client.put("b", bytes(1_000_000))
        await client.delete("a")
    async with store.serve(data_dir=tmp_path / "moved") as server, store.connect(server.url) as client:
        assert [entry.key for entry in await client.list("")] == ["b"]
