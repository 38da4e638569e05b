"""The nouns: what cannot be changed stays as it is, and what changes the store is known to."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from store import messages
from store.messages import MUTATIONS, Entry, Event, Put, Request, Response
from store.records import Record

KINDS: list[type[Any]] = [
    kind
    for kind in map(messages.__dict__.__getitem__, messages.__all__)
    if isinstance(kind, type) and issubclass(kind, Record) and kind not in (Request, Response)
]


def test_a_put_event_leaves_an_entry_and_no_other_does() -> None:
    event = Event(kind="put", revision=7, key="a", value=b"1", create_revision=3, lease=5)
    assert event.entry == Entry(key="a", value=b"1", create_revision=3, mod_revision=7, lease=5)
    with pytest.raises(AssertionError, match="only a put"):
        _ = Event(kind="delete", revision=7, key="a").entry


def test_requests_compare_by_what_they_ask() -> None:
    assert Put("a", b"1") == Put("a", b"1", ttl=None)
    assert Put("a", b"1") != Put("a", b"2")


def test_what_only_reads_is_no_mutation_and_what_renews_may_be_repeated() -> None:
    requests = {kind for kind in KINDS if issubclass(kind, Request)}
    assert set(MUTATIONS) < requests
    harmless = {kind.__name__ for kind in requests - set(MUTATIONS)}
    asks = "Get GetMany List Count Wait Guarded KeepAlive TimeToLive Watch Cancel Ping Stats ListGroups ListNotes"
    assert harmless == {*asks.split(), "Excessive", "Unknown", "Create"}, "Create is carried out in transactions only"


def test_every_request_knows_its_response() -> None:
    for kind in KINDS:
        if issubclass(kind, Request) and kind is not Request:
            (response,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
            assert kind.__name__ == "Guarded" or issubclass(response, Response)
