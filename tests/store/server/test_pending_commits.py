"""Pending commits: a reply waits only for the changes that it shows to be on disk (S3)."""

from typing import Any

import pytest

from store import when
from store.engine.changeset import ChangeSet, SavedLease
from store.messages import (
    Count,
    Counted,
    Event,
    Failed,
    FailureKind,
    Found,
    Get,
    GetMany,
    Granted,
    Guarded,
    KeepAlive,
    List,
    Listing,
    Ping,
    Pong,
    Put,
    Request,
    Response,
    Watch,
    Watching,
    Written,
)
from store.server.pending_commits import PendingCommits

FOUND = Found(entry=None)
EMPTY = Listing(entries=(), revision=7)


def with_a_change() -> PendingCommits:
    """The disk has up to revision 5; revision 6 has changed `a/1`, 7 has changed `b`, and lease 3 is new."""
    pending_commits = PendingCommits(durable=10, revision=5)
    pending_commits.append(11, ChangeSet(revisions=[(Event(kind="put", revision=6, key="a/1"),)]))
    lease = SavedLease(id=3, ttl=1.0, disconnect_ttl=None, anonymous=False)
    pending_commits.append(12, ChangeSet(revisions=[(Event(kind="delete", revision=7, key="b"),)], leases={3: lease}))
    return pending_commits


@pytest.mark.parametrize(
    ("request_", "response", "number"),
    [
        (Get("a/1"), FOUND, 11),
        (Get("b"), FOUND, 12),
        (Get("c"), FOUND, 0),
        (GetMany(keys=("c", "a/1")), EMPTY, 11),
        (GetMany(keys=("c", "d")), EMPTY, 0),
        (List(prefix="a/"), EMPTY, 11),
        (List(prefix=""), EMPTY, 12),
        (Count(prefix="c"), Counted(count=0, revision=7), 0),
        (Ping(), Pong(revision=7), 0),
        (KeepAlive(lease=1), Granted(lease=1, ttl=1.0), 0),
        (KeepAlive(lease=3), Granted(lease=3, ttl=1.0), 12),
        (KeepAlive(lease=2), Failed(kind=FailureKind.LEASE, message="it has lapsed, which is not on disk yet"), 12),
        (Guarded(when=(when.exists("b"),), request=Get("c")), FOUND, 12),
        (Guarded(when=(when.exists("d"),), request=Get("a/1")), FOUND, 11),
        (Put("c", b""), Written(revision=8), 12),
        (Watch(prefix="c"), Watching(revision=7), 12),
    ],
)
def test_a_reply_waits_for_the_changes_that_it_shows(request_: Request[Any], response: Response, number: int) -> None:
    assert with_a_change().step_to_wait_for(request_, response)[0] == number


@pytest.mark.parametrize(
    ("request_", "response"),
    [(GetMany(keys=("c",)), EMPTY), (Ping(), Pong(revision=7)), (Count(prefix="c"), Counted(count=0, revision=7))],
)
def test_a_reply_that_does_not_wait_says_the_revision_that_is_on_disk(
    request_: Request[Any], response: Response
) -> None:
    """Otherwise a client could see a revision that a crash undoes, and take the store for another one (S10)."""
    assert with_a_change().step_to_wait_for(request_, response)[1].revision == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("request_", "response"),
    [
        (GetMany(keys=("a/1",)), EMPTY),
        (List(prefix="a/"), EMPTY),
        (Count(prefix="a/"), Counted(count=1, revision=7)),
        (Guarded(when=(when.exists("a/1"),), request=List(prefix="c")), EMPTY),
    ],
)
def test_a_reply_that_waits_says_a_revision_that_is_on_disk_once_it_goes_out(
    request_: Request[Any], response: Response
) -> None:
    """It is sent once 6 is on disk, while 7, which does not affect it, may never be (S3)."""
    pending_commits = with_a_change()
    number, said = pending_commits.step_to_wait_for(request_, response)
    assert number == 11
    pending_commits.note_written(number)
    assert said.revision == pending_commits.revision == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("prefix", ["a/", "c"])
def test_a_listing_of_an_earlier_revision_keeps_that(prefix: str) -> None:
    """A listing of so many keys that it took several turns does not contain later changes."""
    listing = Listing(entries=(), revision=4)
    assert with_a_change().step_to_wait_for(List(prefix=prefix), listing)[1] is listing


def test_a_step_that_only_grants_changed_is_of_the_revision_before_it() -> None:
    pending_commits = with_a_change()
    pending_commits.append(13, ChangeSet(leases={4: SavedLease(id=4, ttl=1.0)}))
    pending_commits.note_written(13)
    assert pending_commits.revision == 7


def test_replies_do_not_wait_for_changes_on_disk() -> None:
    pending_commits = with_a_change()
    assert pending_commits.bytes > 0
    pending_commits.note_written(11)
    assert pending_commits.step_to_wait_for(Get("a/1"), FOUND)[0] <= pending_commits.durable
    assert pending_commits.step_to_wait_for(Get("b"), FOUND)[0] == 12
    assert pending_commits.revision == 6
    pending_commits.note_written(12)
    assert pending_commits.revision == 7
    assert pending_commits.bytes == 0
    assert pending_commits.step_to_wait_for(GetMany(keys=("b",)), EMPTY) == (12, EMPTY)


def test_a_key_that_has_changed_again_is_waited_for_until_the_later_change_is_on_disk() -> None:
    pending_commits = with_a_change()
    pending_commits.append(13, ChangeSet(revisions=[(Event(kind="put", revision=8, key="a/1"),)]))
    pending_commits.note_written(12)
    assert pending_commits.step_to_wait_for(Get("a/1"), FOUND)[0] == 13


def test_a_lease_that_came_again_is_waited_for_until_the_later_grant_is_on_disk() -> None:
    """A keep-alive of a chosen id was answered while a crash could still undo the lease."""
    pending_commits = with_a_change()
    pending_commits.append(13, ChangeSet(leases={3: None}))
    pending_commits.append(14, ChangeSet(leases={3: SavedLease(id=3, ttl=1.0)}))
    pending_commits.note_written(12)
    assert pending_commits.step_to_wait_for(KeepAlive(lease=3), Granted(lease=3, ttl=1.0))[0] == 14
    pending_commits.note_written(14)
    assert pending_commits.step_to_wait_for(KeepAlive(lease=3), Granted(lease=3, ttl=1.0))[0] <= 14
    assert not pending_commits._changed
