"""Waits for a disk: no new change is announced before it is durable (S3). The journal writes when a test says so."""

import asyncio
import contextlib
import sqlite3
import threading
import time
from pathlib import Path

import pytest

import store
from store import ConnectionLost, Get, Grant, LimitExceeded, Put, TransactionResult
from store.engine.changeset import ChangeSet
from store.messages import (
    CHOSEN_LEASE_LEAST,
    Found,
    Granted,
    KeepAlive,
    List,
    Ping,
    Pong,
    Revoke,
    Transact,
    Watch,
    Watching,
    Written,
)
from store.protocol.wire import Events, Reply
from store.server.journal import (
    GROUP_BYTES,
    GROUP_BYTES_LEAST,
    GROUP_BYTES_MOST,
    GROUP_SECONDS,
    SMALL_GROUP_BYTES,
    Journal,
)
from tests.support.journals import a_peer, held_back, taken
from tests.support.limits import limits_with
from tests.support.stores import until


async def has_done(server: store.Server, requests: int) -> None:
    """Wait until the server has carried out so many requests since it started, and announced the results."""
    await until(lambda: server.figures()["requests"] >= requests)


async def test_nothing_that_reflects_a_revision_leaves_before_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Nothing that reflects a revision, whether reply, read or watch event, leaves the server before that revision is
    durable: outboxes are held, in order."
    """
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        writer, reader = [await a_peer(server, journal) for _ in range(2)]
        reader.ask(Watch(prefix="k"))
        await reader.until(lambda: reader.said)
        reader.said.clear()
        sent = server.figures()["bytes_out"]

        writer.ask(Put("k", b"1"))
        await taken(journal.begun)  # the first group is this put alone
        reader.ask(Get("k"))
        await has_done(server, 3)
        writer.ask(Put("k", b"2"), List(prefix="k"))
        await has_done(server, 5)
        reader.ask(Get("k"), Get("k"))
        await has_done(server, 7)
        assert server.figures()["bytes_out"] == sent, "neither reply, nor read, nor event"
        assert writer.said == reader.said == []

        journal.may_commit.release()
        await taken(journal.begun)  # the second, so that the first is durable
        await reader.until(lambda: len(reader.said) == 2)
        await writer.until(lambda: writer.said)
        event, read = reader.said
        assert isinstance(event, Events)
        assert [change.value for change in event.events] == [b"1"]
        assert isinstance(read, Reply)
        assert isinstance(read.response, Found)
        assert read.response.entry is not None
        assert read.response.entry.value == b"1", "what it was when it was read"
        assert [reply.response for reply in writer.replies()] == [Written(revision=1)]

        journal.may_commit.release()
        await reader.until(lambda: len(reader.said) == 5)
        await writer.until(lambda: len(writer.said) == 3)
        event, *reads = reader.said[2:]
        assert isinstance(event, Events)
        assert [change.value for change in event.events] == [b"2"]
        assert len(reads) == 2
        assert writer.replies()[1].response == Written(revision=2)


async def test_a_session_that_makes_way_is_forgotten_on_disk_before_the_newcomers_welcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.engine.sessions.AWAY_LEAST", 0.0)
    async with held_back(tmp_path, monkeypatch, limits=limits_with(sessions_max=2)) as (server, journal):
        away, _ = [await a_peer(server, journal) for _ in range(2)]
        away.transport.abort()
        await until(lambda: server.connections == 1)
        await a_peer(server, journal)  # this says that its welcome waits for the disk
        ended = [id for facts in journal.groups[-1] for id, number in facts.sessions.items() if number is None]
        assert ended == [away.connection._session_id]


async def test_a_reply_that_waits_for_less_lets_no_earlier_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put was acknowledged too early if its client next read a key that another client had just written."""
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        first, second = await a_peer(server, journal), await a_peer(server, journal)
        (written,) = first.ask(Put("a", b""))
        await taken(journal.begun)
        later, read = second.ask(Put("b", b""), Get("a"))
        await until(lambda: "b" in server._engine._keys.entries)
        journal.may_commit.release()
        await first.answer(written)
        await taken(journal.begun)
        assert all(reply.request_id != later for reply in second.replies())
        journal.may_commit.release(10)
        await second.answer(later)
        await second.answer(read)


async def test_replies_that_show_no_new_change_are_sent_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hung for 9 s dropped every member of every round, since their keep-alives waited for it, too."""
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        writer, keeper = [await a_peer(server, journal) for _ in range(2)]
        granted = keeper.ask(Grant(ttl=10.0))[0]
        await taken(journal.begun)
        journal.may_commit.release()
        lease = await keeper.answer(granted)
        assert isinstance(lease, Granted)
        writer.ask(Put("k", b"1"))
        await taken(journal.begun)  # and there it hangs
        kept, missing, ping = keeper.ask(KeepAlive(lease=lease.lease), Get("other"), Ping())
        assert isinstance(await keeper.answer(kept), Granted)
        assert await keeper.answer(missing) == Found(entry=None)
        assert await keeper.answer(ping) == Pong(revision=0), "what is on disk: a crash may take back the rest"
        late = keeper.ask(Get("k"))[0]
        await keeper.answer(keeper.ask(Get("other"))[0])
        assert late not in [reply.request_id for reply in keeper.replies()]
        journal.may_commit.release()
        await keeper.answer(late)


async def test_one_commit_lets_many_answers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        writer = await a_peer(server, journal)
        writer.ask(Put("first", b""))
        await taken(journal.begun)
        asked = writer.ask(*[Put(f"k{number}", b"") for number in range(1000)])
        await has_done(server, 1001)
        journal.may_commit.release(2)
        await writer.until(lambda: len(writer.said) == 1001)
        assert [reply.request_id for reply in writer.replies()[1:]] == asked
        assert [len(group) for group in journal.groups] == [1, 1, 1000]


async def test_groups_are_as_large_as_is_written_in_time_filled_in_turns_and_open_to_something_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small put waited for everything that 16 other clients had under way: for 0.1 to 1 s."""
    monkeypatch.setattr(Journal, "_adapt_group_size", lambda *_: None)
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        greedy = [await a_peer(server, journal) for _ in range(3)]
        bystander = await a_peer(server, journal)
        journal.group_bytes = most = 10 * weight_of(1000)
        del journal.groups[:]
        asked = [
            peer.ask(*[Put(f"{number}/{n}", bytes(1000)) for n in range(100)]) for number, peer in enumerate(greedy)
        ]
        await taken(journal.begun)
        await until(lambda: server._durability.is_queue_full)
        (put,) = bystander.ask(Put("small", b""))
        (large,) = bystander.ask(Put("large", bytes(1000)))
        await until(lambda: "small" in server._engine._keys.entries)
        assert "large" not in server._engine._keys.entries, "one thing at a time"
        for _ in range(3):
            journal.may_commit.release()
            await taken(journal.begun)
        await bystander.until(bystander.replies)
        assert [reply.request_id for reply in bystander.replies()] == [put], (
            "one group, what is full already, and its own"
        )
        journal.may_commit.release(1000)
        for peer, ids in zip(greedy, asked, strict=True):
            await peer.answer(ids[-1])
            assert [reply.request_id for reply in peer.replies()][:100] == ids
        await bystander.answer(large)
    revisions = [revision for group in journal.groups for facts in group for revision in facts.revisions]
    assert [events[0].revision for events in revisions] == list(range(1, 303)), "a group is the first of what was done"
    assert all(sum(facts.size for facts in group) <= 1.5 * most for group in journal.groups if len(group) > 1)
    firsts = [event.key[0] for (event,) in revisions[:150]]
    assert min(map(firsts.count, "012")) > 20, "each of them has had turns"


async def test_a_small_put_is_on_disk_before_the_next_large_transaction_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside transactions of 2,000 puts it took 140 ms (median): the reply waited until the next one was done."""
    monkeypatch.setattr(Journal, "_adapt_group_size", lambda *_: None)
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        greedy, bystander = await a_peer(server, journal), await a_peer(server, journal)
        journal.group_bytes = 10_000
        keys = server._engine._keys.entries
        asked = greedy.ask(
            *[
                Transact(when=(), then=tuple(Put(f"{number}/{n}", bytes(500)) for n in range(100)))
                for number in range(3)
            ]
        )
        await taken(journal.begun)
        (put,) = bystander.ask(Put("small", b""))
        await until(lambda: "small" in keys)
        journal.may_commit.release()  # the first transaction
        await taken(journal.begun)
        await bystander.answer(*bystander.ask(Ping()))
        assert "1/0" not in keys
        (later,) = bystander.ask(Put("later", b""))  # which holds up no transaction twice
        journal.may_commit.release()  # the small put
        await bystander.answer(put)
        await until(lambda: "1/0" in keys)
        journal.may_commit.release(1000)
        await bystander.answer(later)
        await greedy.answer(asked[-1])


async def test_a_request_that_comes_alone_while_groups_are_full_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was read twice, and the server refused the second one, since ids must count upwards. That ended
    the client.
    """
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        greedy, lone = await a_peer(server, journal), await a_peer(server, journal)
        journal.group_bytes = 10 * weight_of(1000)
        puts = greedy.ask(*[Put(f"k/{number}", bytes(1000)) for number in range(100)])
        await taken(journal.begun)
        await until(lambda: server._durability.is_queue_full)
        lone.ask(Put("first", b""))
        await until(lambda: "first" in server._engine._keys.entries)
        (put,) = lone.ask(Put("second", b""))  # waits, since another change is on the way to the disk
        await until(lambda: len(server._scheduler._for_disk) == 2 or lone.lost.is_set())
        for _ in ("while only the disk is awaited", "once all is answered"):
            for _ in range(100):
                await asyncio.sleep(0)
            assert not server._scheduler._pass_comes, "no pass of the loop follows another"
            journal.may_commit.release(1000)
            await lone.answer(put)
            await greedy.answer(puts[-1])


def weight_of(size: int) -> int:
    """Return roughly the share that a put of so many bytes takes of a group."""
    return size + 800


@pytest.mark.parametrize("took", [0.001, 0.2])
def test_the_time_that_groups_take_tells_how_large_the_next_ones_are(tmp_path: Path, took: float) -> None:
    journal = Journal(tmp_path, new_id="it")
    for _ in range(3):
        journal._adapt_group_size(GROUP_BYTES // 4, took)
    expected = GROUP_BYTES // 8 if took > GROUP_SECONDS else GROUP_BYTES
    assert journal.group_bytes == expected, "one that is not full may be too slow, but not too fast"
    for _ in range(100):
        is_small = journal.group_bytes <= SMALL_GROUP_BYTES
        journal._adapt_group_size(journal.group_bytes, 0.004 if is_small else took)
    if took > GROUP_SECONDS:
        assert GROUP_BYTES_LEAST <= journal.group_bytes <= 2 * SMALL_GROUP_BYTES
    else:
        assert journal.group_bytes == GROUP_BYTES_MOST
    for _ in range(100):
        journal._adapt_group_size(1000, 1.0)
        journal._adapt_group_size(journal.group_bytes, 0.9)
    assert journal.group_bytes == GROUP_BYTES_MOST, "on a slow disk all else would be lost to it"
    journal.close()


async def test_a_lease_of_a_chosen_id_that_ends_and_comes_again_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one commit the lease was lost on the disk, its keys were not, and no server could start on that."""
    lease = CHOSEN_LEASE_LEAST + 7
    again = Transact(when=(), then=(Put("k", b"", lease=lease),), grants=(Grant(ttl=60.0, id=lease),))
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        peer = await a_peer(server, journal)
        peer.ask(Put("first", b""))
        await taken(journal.begun)
        for _ in range(3):
            peer.ask(again, Revoke(lease=lease))
        *_, last = peer.ask(again)
        await has_done(server, 8)
        journal.may_commit.release(1000)
        assert isinstance(await peer.answer(last), TransactionResult)
        assert [len(group) for group in journal.groups[-2:]] == [1, 7]
    monkeypatch.undo()
    async with store.serve(data_dir=tmp_path) as server, store.connect(server.url) as client:
        entry = await client.get("k")
        assert entry is not None
        assert entry.lease == lease
        assert server.figures()["leases"] == 1


async def test_an_expiry_is_announced_when_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        peer = await a_peer(server, journal)
        (watching, _) = peer.ask(Watch(prefix=""), Put("k", b"", ttl=0.05))
        await taken(journal.begun)
        journal.may_commit.release()
        assert isinstance(await peer.answer(watching), Watching)
        await taken(journal.begun)  # the expiry
        assert (server.figures()["leases_lapsed"], server.figures()["revision"]) == (1, 2)
        told = [item.events[0].kind for item in peer.said if isinstance(item, Events)]
        assert told == ["put"]
        journal.may_commit.release()
        await peer.until(lambda: len(peer.said) == 4)
        last = peer.said[-1]
        assert isinstance(last, Events)
        assert last.events[0].kind == "delete"


async def test_pending_changes_are_made_durable_and_announced_when_a_server_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server, journal = await stack.enter_async_context(held_back(tmp_path, monkeypatch))
        peer = await a_peer(server, journal)
        peer.ask(Put("k", b""))
        await taken(journal.begun)
        peer.ask(Put("k2", b""))
        await has_done(server, 2)
        leaving = asyncio.create_task(stack.aclose())
        journal.may_commit.release(2)
        await peer.lost.wait()
        await leaving
        assert [reply.response for reply in peer.replies()] == [Written(revision=1), Written(revision=2)]
        assert type(peer.said[-1]).__name__ == "Bye"


async def test_requests_to_a_leaving_server_are_not_carried_out_and_do_not_delay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a request was appended to a journal whose writer had ended. Its answer, and every farewell behind it,
    was held until the server hung up five seconds later.
    """
    async with contextlib.AsyncExitStack() as stack:
        server, journal = await stack.enter_async_context(held_back(tmp_path, monkeypatch))
        peer = await a_peer(server, journal)
        peer.ask(Put("k", b""))
        await taken(journal.begun)
        leaving = asyncio.create_task(stack.aclose())
        received = server.figures()["bytes_in"]
        await until(lambda: server._durability.leaving)
        peer.ask(Put("too late", b""))
        await until(lambda: server.figures()["bytes_in"] > received)
        journal.may_commit.release()
        async with asyncio.timeout(60):
            await peer.lost.wait()
            await leaving
        assert [reply.response for reply in peer.replies()] == [Written(revision=1)]
        assert type(peer.said[-1]).__name__ == "Bye"
        assert server.figures()["revision"] == 1


async def test_a_server_whose_disk_syncs_again_continues_without_the_changes_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledged changes survive. A client sends its unacknowledged ones again, and each is applied once."""
    monkeypatch.setattr("store.server.journal.Journal", Unsynced)
    monkeypatch.setattr("store.server.durability.TRY_AGAIN_AFTER", 0.05)
    async with store.serve(data_dir=tmp_path) as server, store.connect(server.url, timeout=20.0) as client:
        journal = server._durability.journal
        assert isinstance(journal, Unsynced)
        assert await client.put("kept", b"1") == 1
        journal.fails = True
        adding = asyncio.create_task(client.add("sum", 1))
        await until(lambda: journal.in_doubt)
        with pytest.raises(ConnectionLost):
            async with store.connect(server.url, timeout=0.3):
                raise AssertionError("it was told something")
        assert not adding.done()
        journal.fails = False
        # the disk may work again before the probe; then the error says that nothing was applied
        with contextlib.suppress(LimitExceeded):
            assert await adding == 1
        revision = 1 + (adding.exception() is None)
        assert [entry.key for entry in await client.list("")] == ["kept", "sum"][:revision]
        assert await client.put("after", b"") == revision + 1


class Unsynced(Journal):
    """A journal whose commits can fail at their last step. After a real failure of that kind a process cannot go on."""

    fails = False

    def _commit(self, group: list[ChangeSet]) -> None:
        if self.fails:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        super()._commit(group)

    def try_to_recover(self) -> bool:
        return not self.fails and super().try_to_recover()


class Hanging(Journal):
    """A disk that is full first, and hangs at the next write."""

    hangs = threading.Event()
    may_go_on = threading.Event()

    def _commit(self, group: list[ChangeSet]) -> None:
        if any(facts.revisions for facts in group):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        super()._commit(group)

    def _probe_disk(self) -> bool:
        self.hangs.set()
        self.may_go_on.wait(100.0)
        return super()._probe_disk()


async def test_a_disk_that_hangs_keeps_no_server_from_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("store.server.journal.Journal", Hanging)
    monkeypatch.setattr("store.server.durability.TRY_AGAIN_AFTER", 0.01)
    monkeypatch.setattr("store.server.durability.STOP_WITHIN", 0.3)
    try:
        async with store.serve(data_dir=tmp_path) as server, store.connect(server.url) as client:
            with pytest.raises(LimitExceeded):
                await client.put("k", b"")
            assert await asyncio.to_thread(Hanging.hangs.wait, 60.0)
            journal = server._durability.journal
            assert journal is not None
            started = time.monotonic()
        assert time.monotonic() - started < 60.0
        assert "cannot be written: " in caplog.text, "and the directory is kept, since it is in the disk's hands"
        assert [thread for thread in threading.enumerate() if thread.name == "store work" and not thread.daemon] == []
    finally:
        Hanging.may_go_on.set()
    journal.close()


async def test_while_the_disk_takes_nothing_a_peer_is_read_no_further_than_its_answers_may_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests came one per packet. The limit was only checked after packets of several requests."""
    async with held_back(tmp_path, monkeypatch) as (server, journal):
        peer = await a_peer(server, journal)
        peer.ask(Put("large", bytes(100_000)))
        await taken(journal.begun)
        asked: list[int] = []
        for done in range(1, 21):
            asked += peer.ask(Get("large"))
            for _ in range(20):
                await asyncio.sleep(0)
                if server.figures()["requests"] > done:
                    break
        assert server.figures()["requests"] < 8
        assert server.figures()["outbox_bytes"] < 600_000
        journal.may_commit.release(1000)
        assert isinstance(await peer.answer(asked[-1]), Found)
        peer.transport.abort()
