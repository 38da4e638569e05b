"""The note of a keep-alive is kept with its lease. The notes of all keys under a prefix are listed page by page."""

import pytest

from store.engine.requests import NOTES_AT_ONCE
from store.messages import Grant, Granted, KeepAlive, ListNotes, Note, NotePage, Put
from tests.support.by_hand import Desk


def granted(desk: Desk) -> int:
    answer = desk.ask(Grant(ttl=10.0))
    assert isinstance(answer, Granted)
    return answer.lease


def notes(desk: Desk, prefix: str, after: str = "") -> NotePage:
    answer = desk.ask(ListNotes(prefix=prefix, after=after))
    assert isinstance(answer, NotePage)
    return answer


def test_the_last_note_of_a_lease_is_listed_with_its_age() -> None:
    desk = Desk()
    lease = granted(desk)
    desk.ask(Put("nodes/a", b"", lease=lease))
    desk.ask(Put("nodes/b", b""))
    desk.ask(Put("others/c", b"", lease=lease))
    assert notes(desk, "nodes/").notes == (
        Note(key="nodes/a", note=b"", age=0.0),
        Note(key="nodes/b", note=b"", age=0.0),
    )
    desk.ask(KeepAlive(lease=lease, note=b"one"))
    desk.ask(KeepAlive(lease=lease, note=b"two"))
    desk.now += 0.2
    desk.ask(KeepAlive(lease=lease))
    first, second = notes(desk, "nodes/").notes
    assert (first.note, second.note) == (b"two", b"")
    assert first.age == pytest.approx(0.2)


def test_they_come_in_pages() -> None:
    desk = Desk()
    lease = granted(desk)
    for number in range(NOTES_AT_ONCE + 2):
        desk.ask(Put(f"nodes/{number:06d}", b"", lease=lease))
    first = notes(desk, "nodes/")
    assert (len(first.notes), first.more) == (NOTES_AT_ONCE, True)
    rest = notes(desk, "nodes/", first.notes[-1].key)
    assert ([one.key for one in rest.notes], rest.more) == (
        [f"nodes/{NOTES_AT_ONCE + one:06d}" for one in (0, 1)],
        False,
    )


def test_a_page_after_a_key_before_the_prefix_contains_no_foreign_keys() -> None:
    """Regression: the client also got the keys between the two."""
    desk = Desk()
    for key in ("b", "m", "nodes/a", "z"):
        desk.ask(Put(key, b""))
    for after in ("", "a", "b", "n"):
        assert [one.key for one in notes(desk, "nodes/", after).notes] == ["nodes/a"], after
    assert notes(desk, "nodes/", "x").notes == ()
