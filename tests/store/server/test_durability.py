"""Waits for the disk, with a journal that the test controls: real ones are in `tests/guarantees/test_s3_*`."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from store.engine.changeset import ChangeSet, SavedStore
from store.engine.engine import Engine
from store.errors import StoreUsageError
from store.messages import Append, Failed, Get, Put, Transact
from store.server.durability import SMALL_BYTES, SMALL_OPERATIONS, TRY_AGAIN_AFTER, Durability, _is_small_write
from store.server.journal import Journal
from tests.support.limits import limits_with
from tests.support.virtual_time import passes

pytestmark = pytest.mark.virtual_time

EMPTY = SavedStore(store_id="it")


class ByHand:
    """A journal that writes, or fails, when the test says so."""

    def __init__(self) -> None:
        self.appended = 0
        self.starts = 0
        self.in_doubt = self.only_deletes = self.answered = False
        self.stops = True
        self.takes = True
        self.unreadable: StoreUsageError | None = None
        self.tried = 0
        self.free = 2**40

    def append(self, facts: ChangeSet) -> int:  # noqa: ARG002
        self.appended += 1
        return self.appended

    def start(self, *, on_durable: Callable[[int], None], on_failure: Callable[[str], None]) -> None:
        self.starts += 1
        self.durable, self.fail = on_durable, on_failure

    def stop(self, *, within: float) -> bool:  # noqa: ARG002
        return self.stops

    def load(self) -> SavedStore:
        if self.unreadable is not None:
            raise self.unreadable
        return EMPTY

    def try_to_recover(self) -> bool:
        self.tried += 1
        return self.takes

    def try_to_accept_writes(self) -> None:
        self.only_deletes = False

    def write_bytes_max(self) -> int:
        return self.free

    def coordination_byte_rate(self) -> int:
        return 40_000


async def at_once(work: Callable[[], Any]) -> Any:
    """Call it here: this stands in for the thread in which the server waits for the disk."""
    return work()


class Store:
    """An engine whose journal is written by hand."""

    def __init__(self, journal: ByHand | None, **limits: Any) -> None:
        self.said: list[Any] = []
        self.engine = Engine(store_id="it", limits=limits_with(**limits), durable=True)
        self.engine.connect(1, session_id=b"s" * 16, now=0.0)
        self.engine.take_changeset()
        self.asked = 0
        self.durability = Durability(
            self.engine,
            cast("Journal | None", journal),
            clock=asyncio.get_running_loop().time,
            in_thread=at_once,
            on_durable=self.said.append,
            on_restored=lambda _: self.said.append("restored"),
            close_all=lambda: self.said.append("cut"),
            ended=lambda task: self.said.append(task.cancelled() or task.exception()),
        )
        self.durability.start()

    def put(self, value: bytes = b"") -> None:
        self.asked += 1
        self.engine.apply(Put("k", value), peer=1, request_id=self.asked, acknowledged=0, now=0.0)
        self.durability.record_changes()


async def test_without_a_journal_nothing_waits() -> None:
    one = Store(None)
    one.put()
    assert not one.durability.is_overloaded
    assert one.durability.pending_commits.appended == one.durability.pending_commits.durable == 0
    assert one.durability.client_refusal_reason() is None
    await one.durability.stop()
    assert one.said == []


async def test_changes_wait_for_the_journal_up_to_a_limit() -> None:
    journal = ByHand()
    one = Store(journal, journal_bytes_max=1000)
    one.put()
    one.durability.record_changes()  # there is no change since then
    assert (one.durability.pending_commits.appended, one.durability.is_overloaded) == (1, False)
    one.put(bytes(2000))
    assert one.durability.is_overloaded
    journal.durable(2)
    assert one.said == [], "it is said in the loop, not in the journal's thread"
    await passes()
    assert one.said == [2]
    assert (one.durability.pending_commits.durable, one.durability.is_overloaded) == (2, False)


async def test_a_failing_disk_costs_the_unwritten_changes_and_is_retried_until_it_works() -> None:
    journal = ByHand()
    journal.takes = False
    one = Store(journal)
    one.put()
    journal.fail("no room")
    await passes()
    await passes()
    assert one.said == ["cut", "restored"]
    engine = one.durability.engine
    assert engine is not one.engine
    assert (engine.revision, engine.read_only) == (0, "the disk does not take it (no room)")
    assert one.durability.client_refusal_reason() is None, "reading goes on"
    await passes(3 * TRY_AGAIN_AFTER)
    assert (journal.tried >= 2, journal.starts) == (True, 1)
    journal.takes = journal.only_deletes = True
    await passes(TRY_AGAIN_AFTER)
    assert (engine.store_id, engine.read_only) == ("it", None)
    assert engine.state.why_only_deletes == "the disk does not take it (no room)"
    engine.connect(1, session_id=b"s" * 16, now=0.0)
    for key, size, taken in [("head/x", 500, True), ("kept/x", 1, False), ("nodes/x", 9, True), ("head/x", 9, False)]:
        put = Transact(when=(), then=(Put(f"/rdzv/1/{key}", bytes(size)),), otherwise=(Get("k"),))
        one.asked += 1
        answer = engine.apply(put, peer=1, request_id=one.asked, acknowledged=0, now=0.0).response
        assert isinstance(answer, Failed) is not taken, "there is a little room for keys that steer"
    journal.free = 1000
    await passes(2 * TRY_AGAIN_AFTER)
    assert [engine.state.writable_bytes, journal.starts] == [1000, 2], "of a large write it is known that it would fail"
    journal.free = 2**40
    await passes(2 * TRY_AGAIN_AFTER)
    assert engine.state.why_only_deletes is None


async def test_a_second_failure_ends_the_wait_for_room_after_the_first() -> None:
    journal, before = ByHand(), asyncio.all_tasks()
    one = Store(journal)
    journal.free = 0
    for why in ("no room", "no room again"):
        journal.fail(why)
        await passes(3 * TRY_AGAIN_AFTER)
    assert journal.starts == 3
    assert len(asyncio.all_tasks() - before) == 1
    await one.durability.stop()
    assert asyncio.all_tasks() == before


async def test_while_the_disk_is_in_doubt_no_client_is_accepted_and_its_own_replies_do_not_wait() -> None:
    journal = ByHand()
    one = Store(journal)
    journal.in_doubt = True
    assert "its contents are in doubt" in str(one.durability.client_refusal_reason())
    journal.in_doubt, journal.answered = False, True
    journal.fail("too large a row")
    await passes()
    await passes()
    assert (journal.starts, journal.tried) == (2, 0)
    assert one.durability.engine.read_only is None


async def test_a_disk_that_cannot_be_read_back_ends_the_service() -> None:
    journal = ByHand()
    journal.unreadable = StoreUsageError("damaged")
    one = Store(journal)
    journal.fail("an error")
    await passes()
    assert "the store is read from its disk again" in str(one.durability.client_refusal_reason())
    await passes()
    await passes()
    assert journal.unreadable in one.said


async def test_leaving_ends_the_retries_and_cuts_all_peers_off_if_the_disk_hangs() -> None:
    journal = ByHand()
    journal.takes = journal.stops = False
    one = Store(journal)
    journal.fail("no room")
    await passes()
    await one.durability.stop()
    assert one.said[-1] == "cut"
    assert True in one.said, "the trying was cancelled"
    one.put()
    assert one.durability.pending_commits.appended == 0, "nothing more is taken on"
    journal.fail("once more")
    await passes()
    assert one.said[-1] == "cut"


@pytest.mark.parametrize(
    ("request_", "is_small"),
    [
        (Put("a", bytes(SMALL_BYTES)), True),
        (Put("a", bytes(SMALL_BYTES + 1)), False),
        (Transact(when=(), then=(Put("a", b""),) * SMALL_OPERATIONS), True),
        (Transact(when=(), then=(Put("a", b""),) * (SMALL_OPERATIONS + 1)), False),
        (Transact(when=(), then=(Put("a", bytes(SMALL_BYTES)), Get("a"))), True),
        (Transact(when=(), then=(Put("a", bytes(SMALL_BYTES)), Put("b", b"1"))), False),
        (Append("a", b""), False),
    ],
)
def test_which_writes_need_not_wait_for_large_ones(request_: Any, is_small: bool) -> None:
    assert _is_small_write(request_) is is_small
