"""Check, backup and restore: beside a running server, of a whole store only, and never silently."""

import asyncio
import contextlib
import os
import stat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import store
from rdzv.cli.main import main
from store.disk import copies
from store.disk.directory import FILE, MARK, UNFINISHED, serving_process
from store.disk.verification import open_read_only
from store.errors import StoreReplaced, StoreUsageError
from store.server.journal import Journal
from tests.store.server.test_journal_refusals import leave_behind
from tests.support.facts import saved_in


async def test_a_store_is_checked_copied_and_restored_beside_its_running_server(tmp_path: Path) -> None:
    data, copy, other = tmp_path / "data", tmp_path / "copy", tmp_path / "other"
    async with store.serve(data_dir=data) as server, store.connect(server.url) as client:
        lease = await client.grant(60.0)
        for number in range(20):
            await client.put(f"k{number}", b"v" * 100, lease=lease)
        writing = asyncio.create_task(keep_writing(client))
        report = await asyncio.to_thread(copies.check, data)
        assert report.served_by == str(os.getpid())
        assert report.saved.store_id == server.store_id
        taken = await asyncio.to_thread(copies.back_up, data, copy)
        writing.cancel()
        assert taken.saved.revision >= report.saved.revision >= 20
        assert len(taken.saved.leases) == 1
        before = taken.saved.revision
        await client.put("after the copy", b"")
    assert stat.S_IMODE((copy).stat().st_mode) == 0o600
    restored = await asyncio.to_thread(copies.restore, copy, other, new_id="new")
    assert (restored.saved.store_id, restored.saved.revision, restored.saved.sessions) == ("new", before, ())
    async with store.serve(data_dir=other) as server, store.connect(server.url) as client:
        assert server.store_id == "new"
        assert await client.get("k19") is not None
        assert await client.get("after the copy") is None


async def keep_writing(client: store.Client) -> None:
    while True:
        await client.put("busy", bytes(10_000))


async def test_a_client_of_the_old_store_gets_store_replaced(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with store.serve(data_dir=tmp_path / "data") as server:
            port = server.port
            client = await stack.enter_async_context(store.connect(server.url))
            await client.put("k", b"1")
            await asyncio.to_thread(copies.back_up, tmp_path / "data", tmp_path / "copy")
            await client.put("k", b"2")
        await asyncio.to_thread(copies.restore, tmp_path / "copy", tmp_path / "other", new_id="new")
        async with store.serve(port=port, data_dir=tmp_path / "other"):
            with pytest.raises(StoreReplaced):
                await client.get("k", timeout=20.0)


def test_a_copy_put_into_the_place_of_its_store_by_hand_is_refused(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    leave_behind(data, count=10)
    copies.back_up(data, copy)
    before = saved_in(data).revision
    leave_more_behind(data)
    for name in (f"{FILE}-wal", f"{FILE}-shm"):
        (data / name).unlink(missing_ok=True)
    copy.replace(data / FILE)
    with pytest.raises(StoreUsageError, match="has lost changes that were acknowledged"):
        saved_in(data)
    assert copies.restore(data / FILE, tmp_path / "other", new_id="new").saved.revision == before, (
        "what is left can be had"
    )


def leave_more_behind(directory: Path) -> None:
    from tests.support.facts import change, put

    journal = Journal(directory, new_id="id")
    journal._commit([change(put(journal.load().revision + 1, "more"))])
    journal.close()


def test_damage_is_reported_by_check_and_backup_and_nothing_is_left_of_the_copy(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    leave_behind(data)
    saved_in(data)  # all of it is in the file now
    assert len(copies.check(data).saved.entries) == 50
    (data / FILE).write_bytes(
        (data / FILE).read_bytes().replace(b"7777777777777777", b"7777777777777776")
    )  # in a value
    with pytest.raises(StoreUsageError, match="damaged"):
        copies.check(data)
    with pytest.raises(StoreUsageError, match="damaged"):
        copies.back_up(data, copy)
    assert not copy.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_two_copies_to_one_file_and_checks_are_made_at_once_and_leave_other_files_alone(tmp_path: Path) -> None:
    """Both copies failed, and blamed the disk; a server said that a dead process served the store."""
    data, copy, made = tmp_path / "data", tmp_path / "copy", list[int]()
    leave_behind(data)
    copy.with_name("copy.new").write_bytes(b"of the user")
    with serving_process(data) as process, serving_process(data) as again:
        assert (process, again) == (None, None)
        with pytest.raises(StoreUsageError, match="is read by rdzv check or backup: start the server when that is"):
            Journal(data, new_id="new")

    def copied_at_once(*given: Any) -> Any:
        made.append(1)
        if len(made) == 1:  # while the first copy is made
            copies._copy_database(data / FILE, copy)
        return open_read_only(*given)

    with mock.patch.object(copies, "open_read_only", copied_at_once):
        assert len(copies.back_up(data, copy).saved.entries) == 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "copy.new", "data"]
    kept = copy.rename(data / f"{UNFINISHED}-monday")
    (data / FILE).unlink()
    with pytest.raises(StoreUsageError, match="has an unfinished store's name"):
        copies.restore(kept, data, new_id="new")
    assert kept.exists()


@pytest.mark.parametrize("coming", ["founded", "restored"])
def test_the_log_of_a_store_that_was_moved_away_is_not_laid_over_the_next_one(tmp_path: Path, coming: str) -> None:
    """The new store had the old one's identity, and its keys."""
    data, copy, elsewhere = tmp_path / "data", tmp_path / "copy", tmp_path / "elsewhere"
    leave_behind(tmp_path / "third", count=10)
    copies.back_up(tmp_path / "third", copy)
    leave_behind(data)
    (data / FILE).rename(elsewhere)
    with pytest.raises(StoreUsageError, match=rf"is gone, and {data / MARK} says .* or move {data / MARK} away, too"):
        Journal(data, new_id="new")
    (data / MARK).unlink()
    if coming == "restored":
        copies.restore(copy, data, new_id="new")
    journal = Journal(data, new_id="new")
    saved = journal.load()
    journal.close()
    assert (saved.store_id, saved.revision) == ("new", 10 if coming == "restored" else 0)
    (data / f"{FILE}-wal.left-1").rename(tmp_path / "elsewhere-wal")
    back = tmp_path / "back"
    assert len(copies.restore(elsewhere, back, new_id="old").saved.entries) == 50, "and nothing of the old one is lost"


def test_impossible_copies_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, copy, other = (str(tmp_path / name) for name in ("data", "copy", "other"))
    assert main(["check", data]) == 1
    assert "there is no store in" in capsys.readouterr().err
    leave_behind(tmp_path / "data")
    assert main(["check", data]) == 0
    assert "is whole: revision" in capsys.readouterr().out
    assert main(["backup", data, copy]) == 0
    assert main(["backup", data, copy]) == 1
    assert "exists: name a file that does not" in capsys.readouterr().err
    assert main(["restore", copy, data]) == 1
    assert "holds a store: restore into another directory" in capsys.readouterr().err
    assert main(["restore", str(tmp_path / "nowhere"), other]) == 1
    assert "is no file" in capsys.readouterr().err
    assert main(["restore", copy, other]) == 0
    assert main(["check", other]) == 0
    (tmp_path / "copy").write_bytes(b"this is a shopping list")
    assert main(["restore", copy, str(tmp_path / "third")]) == 1
    assert "is damaged" in capsys.readouterr().err
