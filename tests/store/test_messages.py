"""The messages: which of them change the store, and the entry after a put."""

import pytest

from store.messages import MUTATIONS, Entry, Event, Request


def test_a_put_event_leaves_an_entry_and_no_other_does() -> None:
    event = Event(kind="put", revision=7, key="a", value=b"1", create_revision=3, lease=5)
    assert event.entry == Entry(key="a", value=b"1", create_revision=3, mod_revision=7, lease=5)
    with pytest.raises(AssertionError, match="only a put"):
        _ = Event(kind="delete", revision=7, key="a").entry


def test_reads_are_no_mutations_and_renewals_may_be_repeated() -> None:
    # without those of other tests
    ours = {kind for kind in Request.__subclasses__() if kind.__module__ == Request.__module__}
    harmless = {kind.__name__ for kind in ours - MUTATIONS}
    asks = "Get GetMany List Count Wait Guarded KeepAlive TimeToLive Watch Cancel Ping Stats ListGroups ListNotes"
    assert harmless == {*asks.split(), "TooLargeRequest", "UndecodableRequest", "Create"}, (
        "Create is carried out in transactions only"
    )
