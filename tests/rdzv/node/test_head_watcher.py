"""A node's copy of its run's head, and its behaviour on a reset of the watch."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Self, cast

import anyio
import pytest

from rdzv.core.decision import EndJoining, Joiner, JoinerWaits, act_of_joiner
from rdzv.core.keys import Keys
from rdzv.core.round import Round
from rdzv.core.state import NAMED_MOST, Closed, Head, Phase, Progress
from rdzv.core.stuck.step_log import StepLog
from rdzv.membership import Membership
from rdzv.node.link.head_watcher import HeadWatcher
from rdzv.node.link.wakeup import Wakeup
from store import ConnectionLost, StoreTimeoutError
from store.messages import Event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from store import Store, StoreError

pytestmark = pytest.mark.virtual_time

KEYS = Keys("/rdzv", "job")
ROUND = Round(number=3, term=7, size=2, buckets=1, host="a", port=1)
CLOSED = Closed(reason="over", by="a")
PROGRESS = Progress(phase=Phase.GATHERING, joined=1, needed=2)


class ScriptedStore:
    """A store whose watch sends scripted events."""

    failure: StoreError | None = None

    def __init__(self) -> None:
        self.script: deque[list[Event] | Exception] = deque()
        self.news = asyncio.Event()

    def say(self, *said: list[Event] | Exception) -> None:
        self.script.extend(said)
        self.news.set()

    def watch(self, prefix: str, *, snapshot: bool) -> Self:
        assert (prefix, snapshot) == ("/rdzv/job/head/", True)
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def batches(self) -> AsyncIterator[list[Event]]:
        while True:
            while self.script:
                said = self.script.popleft()
                if isinstance(said, Exception):
                    raise said
                yield said
            self.news.clear()
            await self.news.wait()

    def time(self) -> float:
        return asyncio.get_running_loop().time()


def put(key: str, value: bytes, revision: int) -> Event:
    return Event(kind="put", key=key, value=value, revision=revision, create_revision=revision)


SYNCED = Event(kind="synced", revision=20)
RESET = Event(kind="reset", revision=0)
SNAPSHOT = [
    put(KEYS.coordinator, b"a", 7),
    put(KEYS.round, ROUND.pack(), 8),
    put(KEYS.progress, PROGRESS.pack(), 9),
    put(KEYS.closed, CLOSED.pack(), 10),
    put(f"{KEYS.head}of_a_later_release", b"1", 11),
]


async def follow_head(store: ScriptedStore, *said: list[Event] | Exception) -> tuple[HeadWatcher, asyncio.Task[None]]:
    follower = HeadWatcher(cast("Store", store), KEYS)
    task = asyncio.create_task(follower.run())
    store.say(*said)
    await asyncio.sleep(0.1)
    return follower, task


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_the_first_progress_of_a_run_that_moves_counts_as_that_before_the_move() -> None:
    """Regression: a snapshot, in the order of keys, has the progress later, and members that moved counted as gone."""
    keys = Keys("/rdzv", "job", has_successors=True)
    later = put(KEYS.progress, PROGRESS.replace(departed=1).pack(), 21)
    follower, task = await follow_head(ScriptedStore(), [put(keys.moving, b"", 7), SNAPSHOT[2], SYNCED], [later])
    assert follower.head.moves_over == PROGRESS
    await ended(task)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_spare_that_reads_the_close_with_the_departures_still_ends_as_a_spare(
    at_once: bool, reset: bool
) -> None:
    store, spare = ScriptedStore(), Joiner(arrival=15, node_id="c", known_round=3)
    full = PROGRESS.replace(phase=Phase.TRAINING, joined=1, live=2, capacity=2, spares=1, spares_after=12)
    room = full.replace(phase=Phase.CLOSED, live=0, spares=0, spares_after=None)
    follower, task = await follow_head(store, [*SNAPSHOT[:2], put(KEYS.progress, full.pack(), 16), SYNCED])
    assert isinstance(act_of_joiner(spare, follower.head, now=0.0), JoinerWaits)
    closing, left = put(KEYS.closed, CLOSED.pack(), 21), put(KEYS.progress, room.pack(), 22)
    if reset:
        store.say([RESET, *SNAPSHOT[:2], closing, left, SYNCED])
    else:
        store.say(*([[closing, left]] if at_once else [[closing], [left]]))
    await asyncio.sleep(0.1)
    refused = act_of_joiner(spare, follower.head, now=0.0)
    assert isinstance(refused, EndJoining)
    assert refused.spare
    await ended(task)


async def test_the_head_follows_from_the_events() -> None:
    store = ScriptedStore()
    follower, task = await follow_head(store, SNAPSHOT)
    assert not follower.synced.is_set()
    store.say([SYNCED])
    await asyncio.sleep(0.1)
    assert follower.synced.is_set()
    head = follower.head
    assert head.coordinator is not None
    assert (head.coordinator.node_id, head.coordinator.term) == ("a", 7)
    assert head.round is not None
    assert (head.round.number, head.round.revision) == (3, 8)
    assert (head.closed, head.progress) == (CLOSED, PROGRESS)
    assert follower.round_at is None, "the snapshot has no time of the round"
    store.say(
        [
            Event(kind="delete", key=key, revision=21)
            for key in (KEYS.coordinator, KEYS.closed, KEYS.progress, KEYS.round, f"{KEYS.head}later")
        ]
    )
    await asyncio.sleep(0.1)
    assert follower.head == Head(round=head.round, progress_at=follower.head.progress_at)
    await ended(task)


async def test_the_old_head_is_kept_until_the_snapshot_after_a_reset_is_complete() -> None:
    """Regression: between reset and snapshot a closed run looked open, and the coordinator's role free."""
    store = ScriptedStore()
    follower, task = await follow_head(store, [*SNAPSHOT, SYNCED])
    before = follower.head
    store.say([RESET], SNAPSHOT[:1])
    await asyncio.sleep(0.1)
    assert follower.head == before
    later = Round(number=4, term=7, size=1, buckets=1, host="a", port=1)
    store.say([put(KEYS.round, later.pack(), 30)])
    await asyncio.sleep(0.1)
    assert follower.head.round is not None
    assert follower.head.round.number == 4, "rounds only go up, so a later one counts at once"
    times = [follower.round_at]
    store.say([SYNCED])
    await asyncio.sleep(0.1)
    assert follower.head.closed is None, "the snapshot does not have it"
    assert follower.head.progress is None
    assert follower.head.coordinator == before.coordinator
    assert follower.head.round.number == 4
    store.say([put(KEYS.round, later.replace(number=5).pack(), 31)])
    await asyncio.sleep(0.1)
    times.append(follower.round_at)
    assert times == [None, follower.heard_at]
    await ended(task)


async def test_a_round_or_close_that_the_node_wrote_itself_wakes_listeners() -> None:
    store = ScriptedStore()
    follower, task = await follow_head(store, [SYNCED])
    wakeup = Wakeup()
    with follower.listeners.subscribed(wakeup):
        follower.note_round(Round.unpack(ROUND.pack(), revision=8))
        assert await wakeup.sleep_until(anyio.current_time() + 1)
        follower.note_round(Round.unpack(ROUND.pack(), revision=5))
        assert not await wakeup.sleep_until(anyio.current_time() + 1), "an earlier one is no news"
        follower.note_run_closed(CLOSED)
        follower.note_run_closed(Closed(reason="second"))
        assert await wakeup.sleep_until(anyio.current_time() + 1)
    assert follower.head.closed == CLOSED
    await ended(task)


class BusyStore(ScriptedStore):
    """A store that is too busy, or disconnected, and does not open a watch within a call's time."""

    def __init__(self, *errors: StoreError) -> None:
        super().__init__()
        self.errors = deque(errors)
        self.failure: StoreError | None = None

    async def __aenter__(self) -> Self:
        if self.errors:
            await anyio.sleep(30)
            raise self.errors.popleft()
        return self


async def test_a_store_that_is_too_busy_to_answer_in_time_is_asked_again() -> None:
    """Regression: of 10,000 nodes that came to a busy machine, some failed after 30 s whatever join_timeout."""
    late = StoreTimeoutError("no answer to Watch within 30 s", maybe_applied=False)
    store = BusyStore(late, ConnectionLost("the connection is lost", maybe_applied=False))
    follower, task = await follow_head(store, [*SNAPSHOT, SYNCED])
    await anyio.sleep(31)
    assert follower.unanswered is late
    with anyio.fail_after(60):
        await follower.synced.wait()
    assert follower.error is None
    assert follower.head.closed == CLOSED
    await ended(task)


async def test_a_closed_client_is_not_asked_again() -> None:
    lost = ConnectionLost("the client is closed", maybe_applied=False)
    store = BusyStore(lost)
    store.failure = lost
    follower, task = await follow_head(store)
    await anyio.sleep(31)
    assert follower.error is lost
    assert follower.synced.is_set()
    await ended(task)


@pytest.mark.parametrize("begun", [True, False])
async def test_the_error_that_ends_the_watch_is_kept_and_wakes_listeners_and_waiters(begun: bool) -> None:
    store = ScriptedStore()
    follower, task = await follow_head(store, *([[SYNCED]] if begun else []))
    wakeup = Wakeup()
    with follower.listeners.subscribed(wakeup):
        store.say(ConnectionLost("gone", maybe_applied=False))
        assert await wakeup.sleep_until(anyio.current_time() + 1)
    await task
    assert follower.synced.is_set()
    assert isinstance(follower.error, ConnectionLost)


async def test_a_member_hears_that_it_is_lost_though_later_reports_in_one_read_name_other_members() -> None:
    """Regression: of over 64 lost members, an expelled one was named by one report only, which the next replaced."""
    told = PROGRESS.replace(round=3, lost=NAMED_MOST, lost_ids=tuple(f"n{number}" for number in range(NAMED_MOST)))
    expelled = told.after_expulsion("me", address="", why="it stood still")
    store = ScriptedStore()
    follower = HeadWatcher(cast("Store", store), KEYS, node_id="me")
    round = ROUND.replace(revision=8)
    membership = Membership(round=round, rank=0, arrival=3, node_id="me", beats=StepLog(3, store.time))
    follower.on_change = lambda: membership.update(follower.head)
    later = told.replace(lost=NAMED_MOST + 1)
    task = asyncio.create_task(follower.run())
    store.say([*SNAPSHOT, SYNCED], [put(KEYS.progress, expelled.pack(), 21), put(KEYS.progress, later.pack(), 22)])
    await asyncio.sleep(0.1)
    assert (membership.over, membership.dropped, membership.expelled) == ("it stood still", True, True)
    store.say([put(KEYS.progress, PROGRESS.replace(round=4).pack(), 23)])
    await asyncio.sleep(0.1)
    assert follower.head.progress is not None
    assert follower.head.progress.lost_ids == ()
    await ended(task)
