"""A write as one transaction, and its result: cases that the answers of a real etcd do not show."""

from typing import Any

import pytest

from store import when
from store.errors import ConditionFailed, StoreUsageError
from store.etcd.codec import range_of
from store.etcd.rpc import etcd_pb2 as pb
from store.etcd.transactions import (
    Plan,
    Receipt,
    Write,
    as_write,
    fence_op,
    plan_write,
    result_of,
    result_reads,
    transaction,
)
from store.messages import Add, Append, Create, Delete, DeletePrefix, Entry, Get, Put, Transact

RECEIPT = Receipt(key="rec/1", revision=9, lease=77)
HIDDEN = "rec/"
NEW = when.mod_revision("c") == 0


def there(key: str, value: bytes = b"", at: int = 3, lease: int | None = None) -> Entry:
    return Entry(key=key, value=value, create_revision=1, mod_revision=at, lease=lease)


@pytest.mark.parametrize(
    ("write", "known", "operations", "rests_on"),
    [
        ({"then": (Put("a", b""),), "guard": (when.exists("g"),)}, None, (Put("a", b""),), (when.exists("g"),)),
        ({"then": (Delete("a"),), "when": (when.value_if_any("s") == b"x",)}, None, ..., (when.value("s") == b"x",)),
        ({"then": (Delete("a"),), "when": (when.value_if_any("s") == b"x",)}, {"s": None}, ..., (when.missing("s"),)),
        ({"then": (Create("c", b"1", lease=5),)}, None, (Get("c"),), (when.exists("c"),)),
        ({"then": (Create("c", b"1", lease=5),)}, {"c": there("c")}, (Get("c"),), (when.exists("c"),)),
        ({"then": (Create("c", b"", lease=5),)}, {"c": None}, (Put("c", b"", lease=5),), (NEW,)),
        (
            {"then": (Add("n", 2, lease=5), Append("s", b"c", lease=5))},
            {"n": there("n", b"40", lease=8), "s": None},
            (Put("n", b"42", lease=8), Put("s", b"c", lease=5)),
            (when.mod_revision("n") == 3, when.mod_revision("s") == 0),
        ),
        (
            {"when": (when.exists("a"), when.missing("b")), "then": (), "otherwise": (Put("c", b""),)},
            {"a": there("a"), "b": there("b", at=7)},
            (Put("c", b""),),
            (when.mod_revision("b") == 7,),
        ),
    ],
)  # fmt: skip
def test_the_present_keys_decide_which_writes_are_made(
    write: dict[str, Any], known: dict[str, Entry | None] | None, operations: Any, rests_on: Any
) -> None:
    plan = plan_write(Write(**write), known)
    assert plan.operations == (write["then"] if operations is ... else operations)
    assert plan.rests_on == rests_on
    assert plan.succeeded is ("otherwise" not in write)


def test_a_guard_that_does_not_hold_is_an_error() -> None:
    with pytest.raises(ConditionFailed):
        plan_write(Write(guard=(when.exists("g"),), then=(Put("a", b""),)), {"g": None})


def test_reads_of_a_transaction_include_the_value_where_it_is_needed() -> None:
    write = Write(
        guard=(when.value("g") == b"", when.exists("g")), when=(when.exists("w"),), then=(Put("a", b""), Get("b")),
        otherwise=(Get("c"),),
    )  # fmt: skip
    wanted = {key: not look.get("keys_only") for key, look in write.needed_reads().items()}
    assert wanted == {"g": True, "w": False, "c": True}
    assert write.can_skip_reads
    assert not Write(then=(Get("a"),)).can_skip_reads
    assert not Write(then=(Put("a", b""), Add("n", 1))).can_skip_reads


def test_a_write_and_its_fence_rest_on_the_receipt_and_leave_it_changed() -> None:
    plan = plan_write(as_write(Put("b", b""), (when.exists("a"),)), None)
    for body, conditions in (
        (transaction(plan, RECEIPT, [range_of("a")], hidden=HIDDEN), 2),
        (fence_op(RECEIPT, [range_of("a")]), 1),
    ):
        assert body["compare"][0] == {"key": b"rec/1", "target": "MOD", "result": "EQUAL", "mod_revision": 9}
        assert len(body["compare"]) == conditions
        put = body["success"][0]["request_put"]
        assert (put["key"], put["lease"]) == (b"rec/1", 77)
        assert [each["request_range"]["key"] for each in body["failure"]] == [b"rec/1", b"a"]
    assert not any("request_put" in each for each in body["success"][1:])


def test_a_deletion_of_everything_leaves_receipts_alone() -> None:
    body = transaction(plan_write(as_write(DeletePrefix(prefix=""), ()), None), RECEIPT, [], hidden=HIDDEN)
    spans = [(each["key"], each["range_end"]) for each in (it["request_delete_range"] for it in body["success"][1:])]
    assert spans == [(b"\0", b"rec/"), (b"rec0", b"\0")]


def test_a_lost_answer_is_rebuilt_from_the_store_at_that_revision() -> None:
    """A key that the write wrote has the write's revision; one that it deleted or only read, the revision before."""
    operations = (Get("a"), Delete("a"), Put("b", b"1"), Get("b"), DeletePrefix(prefix="p/"))
    plan = Plan(operations=operations, rests_on=(), succeeded=True)
    asked = [request["request_range"] for request in result_reads(plan, 50, hidden=HIDDEN)["success"]]
    assert [(each["key"], each["revision"]) for each in asked] == [
        (b"a", 49),
        (b"a", 49),
        (b"b", 0),
        (b"b", 50),
        (b"p/", 49),
    ]
    kv = pb.KeyValue(key=b"a", value=b"0", create_revision=4, mod_revision=4)
    found = [pb.RangeResponse(kvs=[kv]), *(pb.RangeResponse(count=count) for count in (1, 1, 0, 3))]
    done = result_of(plan, [pb.ResponseOp(response_range=each) for each in found], 50, hidden=HIDDEN)
    a, deleted, put, b, count = done.results
    assert isinstance(a, Entry)
    assert (a.value, deleted, put, b, count) == (b"0", True, 50, None, 3)


def test_impossible_requests_are_refused() -> None:
    for request in (Get("a"), Transact(when=(), then=(Put("a", b""), Delete("a"))), Put("", b"")):
        with pytest.raises(StoreUsageError):
            as_write(request, ())
