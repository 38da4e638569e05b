"""Our requests in etcd's terms: URLs, ranges, conditions, events, refusals."""

import pytest

from store import when
from store.errors import AuthenticationError, LeaseNotFound, LimitExceeded, StoreError, StoreUsageError
from store.etcd.codec import (
    Endpoints,
    FailureKind,
    NoSpace,
    classify_error,
    entry_of,
    events_by_revision,
    key_spans,
    prefix_span,
)
from store.etcd.rpc import etcd_pb2 as pb
from store.messages import Condition


def test_a_url_names_every_member_of_a_cluster() -> None:
    cluster = Endpoints.parse("etcd://a,b:1234,[::1]:5/")
    assert cluster.hosts == (("a", 2379), ("b", 1234), ("::1", 5))
    assert cluster.targets == ("a:2379", "b:1234", "[::1]:5")
    assert str(cluster) == "etcd://a:2379,b:1234,[::1]:5"
    assert (cluster.secure, Endpoints.parse("etcds://a").secure) == (False, True)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("tcp://a", "etcd:// or etcds://"),
        ("etcd:a", "etcd:// or etcds://"),
        ("etcd://", "names no host"),
        ("etcd://a,,b", "names no host"),
        ("etcd://a:port", "no URL of a cluster"),
        ("etcd://a/run", "has more than"),
        ("etcd://a?x=1", "has more than"),
    ],
)
def test_an_invalid_url_of_a_cluster_is_refused_in_one_sentence(url: str, words: str) -> None:
    with pytest.raises(StoreUsageError, match=words):
        Endpoints.parse(url)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(StoreUsageError) as caught:
        Endpoints.parse("etcd://me:s3cret@a")
    assert "s3cret" not in str(caught.value)
    assert "password=" in str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "inside", "outside"),
    [("a/", ["a/", "a/\x00", "a/\U0010ffff"], ["a", "a0", "b"]), ("ä", ["ä", "ä\U0010ffff"], ["ã", "å", "z"])],
)
def test_a_span_holds_exactly_the_keys_with_its_prefix(prefix: str, inside: list[str], outside: list[str]) -> None:
    first, last = prefix_span(prefix)
    assert [key for key in [*inside, *outside] if first <= key.encode() < last] == inside


def test_hidden_keys_are_left_out_of_a_span_around_them_only() -> None:
    assert key_spans("r", "rec/") == ((b"r", b"rec/"), (b"rec0", b"s"))
    assert key_spans("", "rec/") == ((b"\0", b"rec/"), (b"rec0", b"\0"))
    assert key_spans("rec/1", "rec/") == ((b"rec/1", b"rec/2"),)
    assert key_spans("other", "rec/") == ((b"other", b"othes"),)


@pytest.mark.parametrize(
    ("condition", "of"),
    [
        (when.exists("k"), "there"),
        (when.missing("k"), "gone"),
        (when.mod_revision("k") == 7, "there"),
        (when.mod_revision("k") == 0, "gone"),
        (when.create_revision("k") == 2, "there"),
        (when.create_revision("k") == 0, "gone"),
        (when.value("k") == b"v", "there"),
        (when.value("k") == b"other", ""),
        (when.value_if_any("k") == b"v", "there gone"),
        (when.value_if_any("k") == b"other", "gone"),
    ],
)
def test_whether_a_condition_holds_of_a_key(condition: Condition, of: str) -> None:
    there = entry_of(pb.KeyValue(key=b"k", value=b"v", create_revision=2, mod_revision=7))
    assert [name for name, entry in (("there", there), ("gone", None)) if condition.holds(entry)] == of.split()


def test_fields_that_etcd_leaves_out_are_zero_or_empty() -> None:
    entry = entry_of(pb.KeyValue(key=b"k", create_revision=2, mod_revision=3))
    assert (entry.value, entry.lease) == (b"", None)
    assert entry_of(pb.KeyValue(key=b"k", lease=9007199254740993)).lease == 9007199254740993
    assert entry_of(pb.KeyValue(key=b"\xff")).key == "\udcff", "keys of others need not be text"


def change(key: str, revision: int, type: pb.Event.EventType = pb.Event.PUT) -> pb.Event:
    return pb.Event(type=type, kv=pb.KeyValue(key=key.encode(), mod_revision=revision))


def test_events_come_one_list_per_revision_and_without_hidden_keys() -> None:
    changes = [change("a", 5), change("b", 5, pb.Event.DELETE), change("rec/x", 6), change("c", 7)]
    batches = events_by_revision(pb.WatchResponse(events=changes), "rec/")
    assert [[(event.kind, event.key, event.revision) for event in batch] for batch in batches] == [
        [("put", "a", 5), ("delete", "b", 5)],
        [("put", "c", 7)],
    ]
    assert events_by_revision(pb.WatchResponse(), "rec/") == []


@pytest.mark.parametrize(
    ("code", "message", "verdict"),
    [
        (14, "etcdserver: no leader", FailureKind.UNDONE),
        (8, "etcdserver: too many requests", FailureKind.UNDONE),
        (2, "raft proposal dropped", FailureKind.UNDONE),
        (14, "etcdserver: request timed out, possibly due to previous leader failure", FailureKind.DOUBT),
        (14, "etcdserver: leader changed", FailureKind.DOUBT),
        (13, "something new", FailureKind.DOUBT),
        (16, "etcdserver: invalid auth token", FailureKind.TOKEN),
        (16, "anything", FailureKind.TOKEN),
        (3, "etcdserver: revision of auth store is old", FailureKind.TOKEN),
        (2, "auth: revision in header is old", FailureKind.TOKEN),
        (3, "etcdserver: user name is empty", FailureKind.TOKEN),
        (9, "etcdserver: authentication is not enabled", FailureKind.NO_AUTHENTICATION),
        (9, "etcdserver: lease already exists", FailureKind.LEASE_EXISTS),
        (11, "etcdserver: mvcc: required revision has been compacted", FailureKind.COMPACTED),
        (5, "etcdserver: requested lease not found", LeaseNotFound),
        (8, "etcdserver: mvcc: database space exceeded", NoSpace),
        (3, "etcdserver: too many operations in txn request", LimitExceeded),
        (3, "etcdserver: request is too large", LimitExceeded),
        (8, "grpc: received message larger than max (3600010 vs. 2097152)", LimitExceeded),
        (3, "etcdserver: authentication failed, invalid user ID or password", AuthenticationError),
        (7, "etcdserver: permission denied", AuthenticationError),
        (3, "etcdserver: duplicate key given in txn request", StoreUsageError),
    ],
)
def test_every_refusal_is_an_error_for_the_caller_or_something_the_client_deals_with(
    code: int, message: str, verdict: FailureKind | type[StoreError]
) -> None:
    found = classify_error(code, message, name="etcd://a:2379")
    if isinstance(verdict, FailureKind):
        assert found is verdict
    else:
        assert type(found) is verdict
        assert "etcd://a:2379" in str(found)
