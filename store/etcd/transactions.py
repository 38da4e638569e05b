"""A write as one etcd transaction that can be repeated, and its result.

etcd does not recognize a repeated request. So every write is one transaction that also writes a *receipt*, a key of
this client, if this key is unchanged. A second copy of the write finds the receipt changed, and does nothing.

    if the receipt has its known revision, and the conditions hold:  write the receipt, and do the operations
    else:                                                            read the receipt, and the keys that decide

etcd's conditions have no "or". So a write is first sent for the expected case: its conditions hold, and the keys of
`VALUE_IF_ANY` conditions and of `Create` operations exist. In other cases etcd changes nothing, and answers with the
deciding keys. From them, `plan_write` makes a plan that writes only if they are unchanged. A write with `Add` or
`Append`, or of `Create`s alone, reads these keys first.

After a lost answer, the client sends a fence, which writes only the receipt. If the fence finds the receipt changed,
the write was done, at the receipt's revision, and `result_reads` reads its results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from store.errors import LimitExceeded, StoreUsageError
from store.etcd.codec import (
    OPERATIONS_MAX,
    TOO_MANY,
    compare,
    condition_error,
    key_spans,
    one_entry,
    range_of,
    read_for_condition,
)
from store.etcd.leases import check_lease_id, check_ttls
from store.messages import (
    Add,
    Added,
    Append,
    CompareAndSet,
    CompareAndSetResult,
    Condition,
    Counted,
    Create,
    Delete,
    DeletePrefix,
    Entry,
    Get,
    Operation,
    Put,
    Request,
    Response,
    Target,
    Transact,
    TransactionResult,
    Written,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from store.etcd.codec import Fields
    from store.etcd.rpc import etcd_pb2 as pb

DONE, FENCED = b"done", b"fenced"  # the values of a receipt: its write was done, or cannot be done any more

Known: TypeAlias = "Mapping[str, Entry | None]"  # by key: the entries that decide a write's plan

Operations: TypeAlias = "tuple[Operation | DeletePrefix, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A key of this client, with its last known revision (0: never written) and its lease."""

    key: str
    revision: int
    lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A write in its normal form: `when` decides between `then` and `otherwise`; a false `guard` raises an error."""

    guard: tuple[Condition, ...] = ()
    when: tuple[Condition, ...] = ()
    then: Operations = ()
    otherwise: Operations = ()

    @property
    def can_skip_reads(self) -> bool:
        """True if the write can be sent before a read of its keys."""
        return _surely_writes(self.then) and not any(isinstance(each, Add | Append) for each in self.then)

    def needed_reads(self) -> dict[str, Fields]:
        """Return the reads, by key, that the write's plan or its answer depends on."""
        needed: dict[str, Fields] = {}
        for condition in (*self.guard, *self.when):
            look = read_for_condition(condition)
            if not look["keys_only"] or condition.key not in needed:
                needed[condition.key] = look
        for operations in (self.then, self.otherwise):
            kinds = (Add, Append, Create) if _surely_writes(operations) else (Add, Append, Create, Get)
            needed |= {each.key: range_of(each.key) for each in operations if isinstance(each, kinds)}
        return needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The operations that etcd is to do for a write, if the conditions `rests_on` hold."""

    operations: Operations
    rests_on: tuple[Condition, ...]
    succeeded: bool  # True: `then` is done; False: `otherwise`
    sums: Mapping[int, int] = field(default_factory=dict)  # result of each `Add` and `Append`, by index of its put
    assumed: frozenset[int] = frozenset()  # leases of `Create`s that write nothing: their keys exist, or are assumed to

    @property
    def changes_keys(self) -> bool:
        """True if the plan changes any key."""
        return _surely_writes(self.operations)

    @property
    def only_deletes(self) -> bool:
        """True if the plan puts no key, so it only frees space."""
        return not any(isinstance(operation, Put) for operation in self.operations)

    @property
    def leases(self) -> frozenset[int]:
        """The leases on which the plan puts keys."""
        return frozenset(each.lease for each in self.operations if isinstance(each, Put) and each.lease)


def as_write(request: Request[Any], guard: tuple[Condition, ...]) -> Write:
    """Return a write in its normal form, or raise `StoreUsageError` or `LimitExceeded`."""
    match request:
        case Transact(when=when, then=then, otherwise=otherwise):
            if max(map(len, (when, then, otherwise))) > OPERATIONS_MAX:
                raise LimitExceeded(TOO_MANY.format(name="etcd"))
            _check_operations(then)
            _check_operations(otherwise)
            return Write(guard=guard, when=when, then=then, otherwise=otherwise)
        case CompareAndSet(key=key, value=value, expected_revision=revision, expected_value=before):
            expected = _revision_condition(key, revision or 0)
            if before is not None:
                expected = Condition(key=key, target=Target.VALUE, expected=before)
            put = Put(key, value, ttl=request.ttl, lease=request.lease)
            _check_operations((put,))
            return Write(guard=guard, when=(expected,), then=(put, Get(key)), otherwise=(Get(key),))
        case Put() | Delete() | Add() | Append():
            _check_operations((request,))
            return Write(guard=guard, then=(request,))
        case DeletePrefix():
            return Write(guard=guard, then=(request,))
        case _:
            raise StoreUsageError(f"{type(request).__name__} is no request that this store takes")


def _check_operations(operations: Sequence[Operation]) -> None:
    """Raise the built-in server's errors for invalid operations."""
    written = set()
    for operation in operations:
        if isinstance(operation, Get):
            continue
        if not operation.key:
            raise StoreUsageError("a key has at least one character")
        if operation.key in written:
            raise StoreUsageError(f"a transaction writes {operation.key!r} twice; it may do so once")
        written.add(operation.key)
        if isinstance(operation, Put) and operation.ttl is not None:
            if operation.lease is not None:
                raise StoreUsageError(f"a put of {operation.key!r} takes ttl or lease, not both")
            check_ttls(ttl=operation.ttl)


def _surely_writes(operations: Operations) -> bool:
    return any(not isinstance(operation, Get | Create) for operation in operations)


def _revision_condition(key: str, revision: int) -> Condition:
    return Condition(key=key, target=Target.MOD_REVISION, expected=revision)


def plan_write(write: Write, known: Known | None) -> Plan:
    """Return a write's plan from `known`, the results of its `needed_reads`; if None, assume the expected case."""
    if known is not None and not all(condition.holds(known[condition.key]) for condition in write.guard):
        raise condition_error(write.guard)
    rests_on = [_condition_for_etcd(condition, known) for condition in write.guard]
    for condition in write.when:
        entry = known[condition.key] if known is not None else None
        if known is not None and not condition.holds(entry):
            rests_on.append(_revision_condition(condition.key, entry.mod_revision if entry else 0))
            return _plan_operations(write.otherwise, rests_on, known, succeeded=False)
    rests_on += [_condition_for_etcd(condition, known) for condition in write.when]
    return _plan_operations(write.then, rests_on, known, succeeded=True)


def _condition_for_etcd(condition: Condition, known: Known | None) -> Condition:
    """Replace `VALUE_IF_ANY`, which etcd lacks: by absence if the key is known to be missing, else by its value."""
    if condition.target is not Target.VALUE_IF_ANY:
        return condition
    if known is not None and known[condition.key] is None:
        return Condition(key=condition.key, target=Target.EXISTS, expected=False)
    return Condition(key=condition.key, target=Target.VALUE, expected=condition.expected)


def _plan_operations(asked: Operations, rests_on: list[Condition], known: Known | None, *, succeeded: bool) -> Plan:
    operations: list[Operation | DeletePrefix] = []
    sums: dict[int, int] = {}
    assumed = set()
    for place, operation in enumerate(asked):
        if not isinstance(operation, Create | Add | Append):
            if isinstance(operation, Put):
                check_lease_id(operation.lease)
            operations.append(operation)
            continue
        key = operation.key
        entry = known[key] if known is not None else None
        if isinstance(operation, Create) and (known is None or entry is not None):
            rests_on.append(Condition(key=key, target=Target.EXISTS, expected=True))
            operations.append(Get(key))
            assumed.add(operation.lease or 0)
            continue
        if isinstance(operation, Create):
            value = operation.value
        elif isinstance(operation, Add):
            sums[place] = operation.total(entry)
            value = b"%d" % sums[place]
        else:
            value = (entry.value if entry else b"") + operation.value
            sums[place] = len(value)
        if entry is None:  # only a new key gets the operation's lease
            check_lease_id(operation.lease)
        operations.append(Put(key, value, lease=entry.lease if entry else operation.lease))
        rests_on.append(_revision_condition(key, entry.mod_revision if entry else 0))
    return Plan(
        operations=tuple(operations),
        rests_on=tuple(rests_on),
        succeeded=succeeded,
        sums=sums,
        assumed=frozenset(assumed),
    )


def transaction(plan: Plan, receipt: Receipt | None, needed: Iterable[Fields], *, hidden: str) -> Fields:
    """Return a plan as a transaction; deletions spare `hidden` keys. Without a receipt, send it only once."""
    body: Fields = {
        "compare": list(map(compare, plan.rests_on)),
        "success": [request for operation in plan.operations for request in _operation_requests(operation, hidden)],
        "failure": _read_ops(needed),
    }
    return body if receipt is None else _with_receipt(body, receipt, DONE)


def fence_op(receipt: Receipt, needed: Iterable[Fields]) -> Fields:
    """Return the transaction for a lost answer: it changes the receipt, so that late copies of the write do nothing."""
    return _with_receipt({"compare": [], "success": _read_ops(needed), "failure": _read_ops(needed)}, receipt, FENCED)


def _with_receipt(body: Fields, receipt: Receipt, says: bytes) -> Fields:
    put = {"key": receipt.key.encode(), "value": says, "lease": receipt.lease}
    return {
        "compare": [compare(_revision_condition(receipt.key, receipt.revision)), *body["compare"]],
        "success": [{"request_put": put}, *body["success"]],
        "failure": [{"request_range": range_of(receipt.key)}, *body["failure"]],
    }


def _read_ops(needed: Iterable[Fields]) -> list[Fields]:
    """Return reads for a transaction; none if they are too many for etcd."""
    reads = [{"request_range": look} for look in needed]
    return reads if len(reads) <= OPERATIONS_MAX else []


def _operation_requests(operation: Operation | DeletePrefix, hidden: str) -> list[Fields]:
    match operation:
        case Put(key=key, value=value, lease=lease):
            return [{"request_put": {"key": key.encode(), "value": value, "lease": lease or 0}}]
        case Get(key=key):
            return [{"request_range": range_of(key)}]
        case Delete(key=key):
            return [{"request_delete_range": range_of(key)}]
        case DeletePrefix(prefix=prefix):
            return [{"request_delete_range": range_of(span)} for span in key_spans(prefix, hidden)]
        case _:
            raise AssertionError("it has been decided what these come to")


def result_of(plan: Plan, responses: Sequence[pb.ResponseOp], revision: int, *, hidden: str) -> TransactionResult:
    """Return the result of a plan, from the `responses` to its operations."""
    raw = iter(responses)
    results: list[Any] = []
    for place, operation in enumerate(plan.operations):
        each = [next(raw) for _ in _operation_requests(operation, hidden)]
        match operation:
            case Get():
                results.append(one_entry(each[0].response_range))
            case Put():
                results.append(plan.sums.get(place, revision))
            case _:  # a deletion, or the count that `result_reads` reads instead
                count = sum(it.response_delete_range.deleted + it.response_range.count for it in each)
                results.append(count > 0 if isinstance(operation, Delete) else count)
    return TransactionResult(plan.succeeded, tuple(results), revision)


def result_reads(plan: Plan, revision: int, *, hidden: str) -> Fields:
    """Return the reads that replace the lost answers to a plan that was done at this revision."""
    reads = []
    written = set()
    for operation in plan.operations:
        at = revision - 1  # the plan read and deleted keys as of the revision before its own
        if isinstance(operation, Put):
            written.add(operation.key)
            at = 0  # the present, never compacted: this read only takes the put's place among the results
        elif isinstance(operation, Get) and operation.key in written:
            at = revision
        for request in _operation_requests(operation, hidden):
            (asked,) = request.values()
            span = {name: asked[name] for name in ("key", "range_end") if name in asked}
            reads.append({"request_range": {**span, "revision": at, "count_only": not isinstance(operation, Get)}})
    return {"success": reads}


def answer(request: Request[Any], done: TransactionResult) -> Response:
    """Return a request's response, made from the write's result."""
    results: tuple[Any, ...] = done.results
    revision = done.revision
    match request:
        case Put():
            return Written(revision=revision)
        case Delete() | DeletePrefix():
            return Counted(count=int(results[0]), revision=revision)
        case Add() | Append():
            return Added(value=results[0], revision=revision)
        case CompareAndSet():
            return CompareAndSetResult(succeeded=done.succeeded, entry=results[-1])
        case _:
            return done
