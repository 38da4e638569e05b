"""The nouns: what cannot be changed stays as it is, and what changes the store is known to."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from store import messages
from store.messages import MUTATIONS, Entry, Event, Put, Request, Response

KINDS: list[type[Any]] = [
    kind
    for kind in map(messages.__dict__.__getitem__, messages.__all__)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_noun_is_frozen_and_has_no_room_for_more(kind: type[Any]) -> None:
    assert kind.__dataclass_params__.frozen
    assert not hasattr(kind, "__weakref__") or "__slots__" in vars(kind)


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
