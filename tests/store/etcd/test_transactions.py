"""A write as one transaction, and what came of it: what a real etcd's answers do not show by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from store import when
from store.errors import StoreUsageError
from store.etcd.rpc import etcd_pb2 as pb
from store.etcd.transactions import (
    Branch,
    Receipt,
    Write,
    normal,
    outcome,
    recovered,
    recovery,
    resolved,
    rests_on,
    transaction,
)
from store.messages import Add, Append, Create, Delete, DeletePrefix, Entry, Get, Put, Transact

RECEIPT = Receipt(key="rec/1", revision=9, lease=77)
HIDDEN = "rec/"


def marks(body: Any) -> list[bytes]:
    """What every receipt in a transaction would say."""
    if isinstance(body, dict):
        put = body.get("request_put")
        if put is not None and put["key"] == RECEIPT.key.encode():
            return [put["value"]]
        return [mark for value in body.values() for mark in marks(value)]
    if isinstance(body, list):
        return [mark for value in body for mark in marks(value)]
    return []


def test_a_branch_that_only_reads_leaves_a_receipt_only_once_an_answer_was_lost() -> None:
    write = normal(Transact(when=(when.exists("a"),), then=(Put("b", b""),), otherwise=(Get("a"),)), ())
    assert marks(transaction(write, RECEIPT, hidden=HIDDEN)) == [b"then"]
    assert marks(transaction(write, RECEIPT, hidden=HIDDEN, fence=True)) == [b"then", b"otherwise"]


def test_a_guard_leaves_a_receipt_once_an_answer_was_lost() -> None:
    write = normal(Put("b", b""), (when.exists("a"),))
    assert marks(transaction(write, RECEIPT, hidden=HIDDEN)) == [b"then"]
    assert sorted(marks(transaction(write, RECEIPT, hidden=HIDDEN, fence=True))) == sorted([b"then", b"guard"])


def test_a_write_rests_on_its_receipt() -> None:
    body = transaction(normal(Put("b", b""), ()), RECEIPT, hidden=HIDDEN)
    assert body["compare"] == [{"key": b"rec/1", "target": "MOD", "result": "EQUAL", "mod_revision": 9}]
    assert body["failure"] == [{"request_range": {"key": b"rec/1"}}]
    assert "compare" not in transaction(normal(Delete("b"), ()), None, hidden=HIDDEN)


def test_a_deletion_of_everything_leaves_receipts_alone() -> None:
    body = transaction(normal(DeletePrefix(prefix=""), ()), RECEIPT, hidden=HIDDEN)
    deletions = [request["request_delete_range"] for request in body["success"] if "request_delete_range" in request]
    assert [(each["key"], each["range_end"]) for each in deletions] == [
        (b"\0", b"rec/"),
        (b"rec0", b"\0"),
    ]


def test_what_is_added_rests_on_what_was_read_and_keeps_its_lease() -> None:
    write = normal(Transact(when=(), then=(Add("n", 2, lease=5), Append("s", b"c", lease=5))), ())
    assert rests_on(write.then) == ["n", "s"]
    there = Entry(key="n", value=b"40", create_revision=1, mod_revision=3, lease=8)
    branch = resolved(write.then, {"n": there, "s": None})
    assert branch.operations == (Put("n", b"42", lease=8), Put("s", b"c", lease=5))
    assert branch.rests_on == (when.mod_revision("n") == 3, when.mod_revision("s") == 0)
    assert branch.sums == {0: 42, 1: 1}


def test_what_was_lost_is_made_up_from_the_store_as_it_was_then() -> None:
    """A read of what the write wrote is of its revision; what it deleted or only read, of the one before."""
    operations = (Get("a"), Delete("a"), Put("b", b"1"), Get("b"), DeletePrefix(prefix="p/"))
    write = Write(then=Branch(operations=operations))
    found = Entry(key="rec/1", value=b"then", create_revision=2, mod_revision=50)
    asked = [request["request_range"] for request in recovery(write, found, hidden=HIDDEN)["success"]]
    assert [(each["key"], each["revision"]) for each in asked] == [
        (b"a", 49),
        (b"a", 49),
        (b"b", 50),
        (b"p/", 49),
    ]
    kv = pb.KeyValue(key=b"a", value=b"0", create_revision=4, mod_revision=4)
    reads = [pb.RangeResponse(kvs=[kv]), pb.RangeResponse(count=1), pb.RangeResponse(), pb.RangeResponse(count=3)]
    reply = pb.TxnResponse(responses=[pb.ResponseOp(response_range=each) for each in reads])
    done = recovered(write, found, reply, hidden=HIDDEN)
    a, deleted, put, b, count = done.results
    assert (a.value, deleted, put, b, count) == (b"0", True, 50, None, 3)
    assert (done.succeeded, done.revision, done.receipt) == (True, 50, 50)


def test_an_outcome_without_anything_in_it_is_still_one() -> None:
    write = normal(Transact(when=(when.exists("a"),), then=()), ())
    nested = pb.ResponseOp(response_txn=pb.TxnResponse())
    reply = pb.TxnResponse(header=pb.ResponseHeader(revision=12), succeeded=True, responses=[nested])
    done = outcome(write, RECEIPT, reply, hidden=HIDDEN)
    assert (done.succeeded, done.stale, done.refused, done.results, done.receipt) == (False, False, False, (), 9)


def test_a_key_that_was_created_is_told_from_one_that_was_there_after_a_lost_answer() -> None:
    write = Write(then=Branch(operations=(Create("mine", b"1"), Create("theirs", b"1"))))
    found = Entry(key="rec/1", value=b"then", create_revision=2, mod_revision=50)
    asked = [request["request_range"] for request in recovery(write, found, hidden=HIDDEN)["success"]]
    assert [(each["key"], each["revision"]) for each in asked] == [(b"mine", 50), (b"theirs", 50)]
    kvs = [pb.KeyValue(key=key, value=b"0", mod_revision=at) for key, at in ((b"mine", 50), (b"theirs", 7))]
    ranges = [pb.RangeResponse(kvs=[kv]) for kv in kvs]
    reply = pb.TxnResponse(responses=[pb.ResponseOp(response_range=each) for each in ranges])
    mine, theirs = recovered(write, found, reply, hidden=HIDDEN).results
    assert (mine, theirs.mod_revision) == (50, 7)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(StoreUsageError, match="Get cannot be asked"):
        normal(Get("a"), ())
    assert Write(then=normal(Delete("a"), ()).then).only_deletes
    assert not normal(Put("a", b""), ()).only_deletes
