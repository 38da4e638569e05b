"""A listing read in parts shows the store as at the request, whatever is written meanwhile. Its memory is counted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.engine import keyspace, requests, snapshots
from store.limits import Limits
from store.messages import Delete, GetMany, List, ListingPart, Put, Written
from tests.support.by_hand import Desk

KEYS = st.sampled_from([f"{first}/{second}" for first in "ab" for second in range(8)])
STEPS = st.one_of(
    st.builds(Put, KEYS, st.binary(max_size=2)),
    st.builds(Put, KEYS, st.binary(max_size=2)),
    st.builds(Delete, KEYS),
    st.builds(List, prefix=st.sampled_from(["", "a/", "b/", "b/3", "c"])),
    st.builds(GetMany, keys=st.lists(KEYS, min_size=3, max_size=8).map(tuple)),
    st.integers(0, 3),  # that one goes on
)


class Reading:
    """A listing that is read in parts, and its expected result."""

    def __init__(self, desk: Desk, request: List | GetMany, peer: int) -> None:
        self.desk, self.peer = desk, peer
        entries = desk.engine._keys.entries
        if isinstance(request, List):
            self.expected = [entries[key] for key in sorted(entries) if key.startswith(request.prefix)]
        else:
            self.expected = [entries.get(key) for key in request.keys]  # type: ignore[misc]
        self.found: list[Any] = []
        desk.connect(peer)
        self._take(desk.engine.apply(request, peer=peer, request_id=1, acknowledged=0, now=desk.now))

    def continue_long_request(self) -> None:
        if self.work is not None:
            self._take(self.desk.engine.continue_long_request(self.work))

    def _take(self, applied: Any) -> None:
        self.work = applied.work
        self.found += applied.response.entries
        assert (self.work is not None) == isinstance(applied.response, ListingPart)
        assert self.work is not None or self.found == self.expected


@given(st.lists(STEPS, max_size=60))
def test_a_listing_in_parts_is_of_one_revision(steps: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyspace, "CHUNK_MAX", 4)
        for room in (snapshots, requests):
            patch.setattr(room, "STEP_KEYS", 2)
        desk, readings = Desk(), list[Reading]()
        for number in range(8):
            desk.ask(Put(f"a/{number}", b"old"))
        for step in steps:
            if isinstance(step, List | GetMany):
                readings.append(Reading(desk, step, peer=2 + len(readings)))
            elif isinstance(step, int):
                for reading in readings[step : step + 1]:
                    reading.continue_long_request()
            else:
                desk.ask(step)
        for number, reading in enumerate(readings):
            if number % 3 == 0:
                desk.disconnect(reading.peer)
            while number % 3 and reading.work is not None:
                reading.continue_long_request()
        assert desk.engine.state.snapshots.held_bytes == 0
        assert not desk.engine._snapshots.unread


def test_memory_kept_only_for_an_unread_listing_counts_until_it_is_read_or_given_up() -> None:
    """Regression: it counted nowhere: a server held 1,018 MB and reported 112."""
    desk = Desk()
    for number in range(3000):
        desk.ask(Put(f"k/{number:04}", bytes(1000)))
    work: Any = None
    for peer in (2, 3):
        desk.connect(peer)
        work = desk.engine.apply(List(prefix="k/"), peer=peer, request_id=1, acknowledged=0, now=desk.now).work
        assert work is not None
    before = desk.engine.state.memory_bytes
    assert desk.engine.state.snapshots.held_bytes == 0, "it is all the store's own"
    for _ in range(3):
        for number in range(3000):
            desk.ask(Put(f"k/{number:04}", bytes(1000)))
    unread = desk.engine.state.snapshots.held_bytes
    assert 3_000_000 < unread < 5_000_000, "each entry once, for both of them, and not the later ones"
    history = desk.engine.figures()["history_bytes"]
    assert desk.engine.state.memory_bytes - before > unread
    assert history <= Limits().history_bytes_max
    desk.disconnect(2)
    assert desk.engine.state.snapshots.held_bytes == unread
    oldest = desk.engine.state.snapshots.oldest_snapshot
    assert oldest is not None
    assert oldest.reader == 3
    while work is not None:
        work = desk.engine.continue_long_request(work).work
    assert desk.engine.state.snapshots.held_bytes == 0


def test_memory_kept_for_an_unread_listing_does_not_refuse_a_write() -> None:
    """The client that leaves the listing unread loses it. Otherwise a few such clients would block all writes."""
    mib = 2**20
    desk = Desk(
        value_bytes_max=mib // 2,
        frame_bytes_max=mib,
        outbox_bytes_max=mib,
        history_bytes_max=mib // 10,
        memory_bytes_max=8 * mib,
    )
    for number in range(3000):
        desk.ask(Put(f"k/{number:04}", bytes(1000)))
    desk.connect(2)
    work = desk.engine.apply(List(prefix="k/"), peer=2, request_id=1, acknowledged=0, now=desk.now).work
    assert work is not None
    for number in range(3000):
        desk.ask(Put(f"k/{number:04}", bytes(1000)))
    assert desk.engine.state.snapshots.held_bytes > 3 * mib
    assert isinstance(desk.ask(Put("one more", bytes(1000))), Written)


def test_a_write_beside_an_unread_listing_copies_only_the_changed_keys() -> None:
    """All keys near a changed one were copied with it: 1,950 puts over a million keys took 280 ms."""
    desk = Desk()
    for number in range(3000):
        desk.ask(Put(f"k/{number:04}", b""))
    desk.connect(2)
    desk.engine.apply(List(prefix="k/"), peer=2, request_id=1, acknowledged=0, now=desk.now)
    for number in range(0, 3000, 1000):
        desk.ask(Put(f"k/{number:04}", b"new"))
    assert [key for _, key in desk.engine.state.past._order] == ["k/0000", "k/1000", "k/2000"]
    chunks = desk.engine._keys.index._chunks
    assert not any(chunk.born for chunk in chunks), "the index is the same as long as no key comes or goes"
    desk.disconnect(2)
    assert not desk.engine.state.past


def test_the_names_that_an_unread_answer_is_about_are_counted() -> None:
    """Regression: they counted nowhere: 30 MB for each client that asked for many long keys and read no answer."""
    desk = Desk()
    keys = tuple(f"{number:04}".ljust(2000, "k") for number in range(3000))
    for key in keys:
        desk.ask(Put(key, bytes(200)))
    desk.connect(2)
    before = desk.engine.state.memory_bytes
    work = desk.engine.apply(GetMany(keys=keys), peer=2, request_id=1, acknowledged=0, now=desk.now).work
    assert work is not None
    assert desk.engine.state.memory_bytes - before >= 6_000_000
    desk.disconnect(2)
    assert desk.engine.state.memory_bytes == before
