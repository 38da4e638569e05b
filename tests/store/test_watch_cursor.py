"""A watch is opened as requested, and reopened after its last event."""

import pytest

from store.errors import StoreUsageError
from store.messages import Event, Watch
from store.watch_cursor import WatchCursor


def put(revision: int) -> tuple[Event, ...]:
    return (Event(kind="put", revision=revision, key="a"),)


def synced(revision: int) -> tuple[Event, ...]:
    return (Event(kind="synced", revision=revision),)


def resumable(cursor: WatchCursor) -> bool:
    return cursor.is_resumable


def test_a_watch_is_opened_as_it_was_asked_for() -> None:
    assert WatchCursor("a", start_revision=None, snapshot=False).opening_request() == (Watch(prefix="a"), None)
    assert WatchCursor("a", start_revision=5, snapshot=False).opening_request() == (
        Watch(prefix="a", start_revision=5),
        None,
    )
    assert WatchCursor("a", start_revision=None, snapshot=True).opening_request() == (
        Watch(prefix="a", snapshot=True),
        None,
    )
    with pytest.raises(StoreUsageError, match="not both"):
        WatchCursor("a", start_revision=5, snapshot=True)


def test_a_watch_resumes_after_the_last_revision_seen() -> None:
    cursor = WatchCursor("a", start_revision=None, snapshot=False)
    assert not resumable(cursor)
    cursor.note_opened(7)
    assert resumable(cursor)
    assert cursor.opening_request() == (Watch(prefix="a", start_revision=8), None)
    cursor.note_delivered(put(9))
    assert cursor.opening_request() == (Watch(prefix="a", start_revision=10), None)


def test_a_watch_with_a_start_has_not_seen_the_events_that_the_server_will_send() -> None:
    cursor = WatchCursor("a", start_revision=3, snapshot=False)
    cursor.note_opened(7)
    assert cursor.opening_request() == (Watch(prefix="a", start_revision=3), None)


def test_a_snapshot_is_begun_again_until_it_was_seen_whole() -> None:
    cursor = WatchCursor("a", start_revision=None, snapshot=True)
    cursor.note_opened(7)
    assert not resumable(cursor)
    cursor.note_delivered(put(3))
    cursor.note_progress(7)
    reset = Event(kind="reset", revision=0)
    assert cursor.opening_request() == (Watch(prefix="a", snapshot=True), reset)
    assert cursor.opening_request() == (Watch(prefix="a", snapshot=True), None)  # its reader has been notified
    cursor.note_delivered(synced(9))
    assert resumable(cursor)
    assert cursor.opening_request() == (Watch(prefix="a", start_revision=10), None)


def test_an_answer_from_a_later_revision_advances_a_watch_without_events() -> None:
    cursor = WatchCursor("a", start_revision=None, snapshot=False)
    cursor.note_opened(7)
    cursor.note_progress(20)
    cursor.note_progress(15)
    assert cursor.opening_request() == (Watch(prefix="a", start_revision=21), None)


def test_a_watch_whose_past_is_gone_ends_unless_it_began_with_a_snapshot() -> None:
    plain = WatchCursor("a", start_revision=None, snapshot=False)
    plain.note_opened(7)
    assert not plain.note_compacted()
    resetting = WatchCursor("a", start_revision=None, snapshot=True)
    resetting.note_delivered(synced(7))
    assert resetting.note_compacted()
    assert resetting.opening_request() == (Watch(prefix="a", snapshot=True), Event(kind="reset", revision=0))
