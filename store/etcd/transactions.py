"""Pure: a write as one etcd transaction that can be sent again, and what came of it.

etcd keeps no replies, so every write is one transaction that also writes a *receipt*, a key of this client's own, and
rests on that receipt being as this client last knew it.

    if the receipt is as I know it          once: a second copy finds the receipt changed, and does nothing
      if the guard holds                    `Guarded`, where there is one
        if `when` holds                     the request's own conditions, where it has some
          if what was read still holds      for an `Add` or `Append`, which rest on a value
            write the receipt, and do what was asked

Each `if` is a transaction that is nested in the one above, and so is a `Create`: if the key is missing, write it. etcd
knows no "or", so that a value which may also be missing takes two, one within the other.

The receipt says which of the branches was taken, and its revision is that of the write, so an answer that was lost is
made up from the store as it was then (`recovery`). A branch that only reads leaves no receipt at the first attempt,
since doing it again does no harm; after an answer was lost every branch leaves one, so that the earlier copy, should it
still be on its way, finds the receipt changed, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from store.errors import StoreUsageError
from store.etcd.codec import compare, entry_in, range_of, spans
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
    from collections.abc import Mapping, Sequence

    from store.etcd.codec import Fields
    from store.etcd.rpc import etcd_pb2 as pb

__all__ = [
    "Branch",
    "Outcome",
    "Receipt",
    "Write",
    "answer",
    "nested",
    "normal",
    "outcome",
    "recovered",
    "recovery",
    "resolved",
    "rests_on",
    "transaction",
    "unnested",
]

ADD_MAX: Final = 2**63 - 1
"""What the embedded store, and PyTorch's, counts in."""

# ---------------------------------------------------------------------------------------------------- writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A key of this client's, for one write at a time.

    Attributes:
        key: Its name.
        revision: When it was last written, as far as is known; 0: never.
        lease: What it goes with, should this client go.
    """

    key: str
    revision: int
    lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What is done in one case.

    Attributes:
        operations: Puts, gets and deletions.
        rests_on: What was read beforehand, and must still be so.
        sums: What adding and appending came to, by the place of the put that writes it.
    """

    operations: tuple[Operation | DeletePrefix, ...] = ()
    rests_on: tuple[Condition, ...] = ()
    sums: Mapping[int, int] = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        """Whether it changes anything."""
        return any(not isinstance(operation, Get) for operation in self.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A write in its normal form: if `when` holds `then`, else `otherwise`; all of it only if `guard` holds."""

    guard: tuple[Condition, ...] = ()
    when: tuple[Condition, ...] = ()
    then: Branch = Branch()
    otherwise: Branch = Branch()

    @property
    def only_deletes(self) -> bool:
        """Whether it makes room rather than taking it."""
        operations = (*self.then.operations, *self.otherwise.operations)
        return not any(isinstance(operation, Put | Create) for operation in operations)


class _Mark:
    """What a receipt says: which way the write went."""

    THEN, OTHERWISE, STALE, GUARD = b"then", b"otherwise", b"stale", b"guard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Which way a write went.

    Attributes:
        mark: Which way; None: nothing was done, since the receipt had changed.
        results: One per operation of the branch.
        revision: That of the store.
        receipt: The receipt's revision now.
        found: What the receipt was found to be, if it had changed.
        reread: What was found in place of what was read beforehand, if that had changed.
    """

    mark: bytes | None
    results: tuple[Any, ...] = ()
    revision: int = 0
    receipt: int = 0
    found: Entry | None = None
    reread: Mapping[str, Entry | None] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Whether the conditions held."""
        return self.mark == _Mark.THEN

    @property
    def stale(self) -> bool:
        """Whether what was read beforehand had changed."""
        return self.mark == _Mark.STALE

    @property
    def refused(self) -> bool:
        """Whether the guard did not hold."""
        return self.mark == _Mark.GUARD


def normal(request: Request[Any], guard: tuple[Condition, ...]) -> Write:
    """A write in its normal form; what it adds and appends is still to be resolved.

    Raises:
        StoreUsageError: It makes no sense.
    """
    match request:
        case Transact(when=when, then=then, otherwise=otherwise):
            for operations in (then, otherwise):
                _check(operations)
            return Write(guard=guard, when=when, then=Branch(operations=then), otherwise=Branch(operations=otherwise))
        case CompareAndSet(key=key, value=value):
            if (request.expected_revision is None) == (request.expected_value is None):
                raise StoreUsageError(
                    f"compare_and_set of {key!r} takes exactly one expectation: expected_revision or expected_value"
                )
            if request.expected_value is not None:
                expected = Condition(key=key, target=Target.VALUE, expected=request.expected_value)
            else:
                revision = request.expected_revision or 0
                expected = Condition(key=key, target=Target.MOD_REVISION, expected=revision)
            put = Put(key, value, ttl=request.ttl, lease=request.lease)
            _check((put,))
            return Write(
                guard=guard,
                when=(expected,),
                then=Branch(operations=(put, Get(key))),
                otherwise=Branch(operations=(Get(key),)),
            )
        case Put() | Delete() | Add() | Append():
            _check((request,))
            return Write(guard=guard, then=Branch(operations=(request,)))
        case DeletePrefix():
            return Write(guard=guard, then=Branch(operations=(request,)))
        case _:
            raise StoreUsageError(f"{type(request).__name__} cannot be asked of this store")


def _check(operations: Sequence[Operation]) -> None:
    """Refuse what the embedded store would, and in its words, before anything is sent."""
    written = set()
    for operation in operations:
        if isinstance(operation, Get):
            continue
        if not operation.key:
            raise StoreUsageError("a key has at least one character")
        if operation.key in written:
            raise StoreUsageError(f"a transaction writes {operation.key!r} twice; once is what it may")
        written.add(operation.key)
        if isinstance(operation, Put) and operation.ttl is not None:
            if operation.lease is not None:
                raise StoreUsageError(f"a put of {operation.key!r} takes ttl or lease, not both")
            if not operation.ttl > 0:
                raise StoreUsageError(f"ttl is {operation.ttl:g} s; it must be above 0")


def rests_on(branch: Branch) -> list[str]:
    """Return the keys whose values must be read before a branch can be sent: what it adds or appends to."""
    return [operation.key for operation in branch.operations if isinstance(operation, Add | Append)]


def resolved(branch: Branch, entries: Mapping[str, Entry | None]) -> Branch:
    """The branch with every addition worked out, resting on what was read.

    Raises:
        StoreUsageError: What is there is no number.
    """
    operations: list[Operation | DeletePrefix] = []
    conditions: list[Condition] = []
    sums: dict[int, int] = {}
    for place, operation in enumerate(branch.operations):
        if not isinstance(operation, Add | Append):
            operations.append(operation)
            continue
        entry = entries[operation.key]
        if isinstance(operation, Add):
            sums[place] = _sum(operation, entry)
            value = b"%d" % sums[place]
        else:
            value = (entry.value if entry else b"") + operation.value
            sums[place] = len(value)
        # A key that is there keeps its lease; a new one goes on the lease that was asked for.
        operations.append(Put(operation.key, value, lease=entry.lease if entry else operation.lease))
        revision = entry.mod_revision if entry else 0
        conditions.append(Condition(key=operation.key, target=Target.MOD_REVISION, expected=revision))
    return Branch(operations=tuple(operations), rests_on=tuple(conditions), sums=sums)


def _sum(request: Add, entry: Entry | None) -> int:
    number = 0
    if entry is not None:
        digits = entry.value.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > 20:
            raise StoreUsageError(f"{request.key!r} holds {entry.value[:40]!r}, which is no decimal number to add to")
        number = int(entry.value)
    total = number + request.amount
    if abs(total) > ADD_MAX:
        raise StoreUsageError(f"adding {request.amount} to {request.key!r} passes 64 bits")
    return total


def transaction(write: Write, receipt: Receipt | None, *, hidden: str, fence: bool = False) -> Fields:
    """A write as one transaction.

    Args:
        write: What to do.
        receipt: What it rests on, and what it leaves; None: nothing, so that sending it again may do it again.
        hidden: What receipts start with, for deletions of prefixes to leave alone.
        fence: Whether every branch must leave a receipt: an earlier copy may still be on its way.
    """

    def leaf(branch: Branch, mark: bytes) -> list[Fields]:
        requests = [request for operation in branch.operations for request in _requests(operation, hidden)]
        if receipt is not None and (fence or branch.writes):
            mark_it = Put(receipt.key, mark, lease=receipt.lease)
            requests[:0] = _requests(mark_it, hidden)
        return requests

    def case(branch: Branch, mark: bytes) -> list[Fields]:
        if not branch.rests_on:
            return leaf(branch, mark)
        look = Branch(operations=tuple(Get(condition.key) for condition in branch.rests_on))
        return nested(branch.rests_on, leaf(branch, mark), leaf(look, _Mark.STALE))

    requests = case(write.then, _Mark.THEN)
    if write.when:
        requests = nested(write.when, requests, case(write.otherwise, _Mark.OTHERWISE))
    if write.guard:
        requests = nested(write.guard, requests, leaf(Branch(), _Mark.GUARD))
    if receipt is None:
        return {"success": requests}
    as_known = Condition(key=receipt.key, target=Target.MOD_REVISION, expected=receipt.revision)
    return {
        "compare": [compare(as_known)],
        "success": requests,
        "failure": [{"request_range": range_of(receipt.key)}],
    }


def nested(conditions: Sequence[Condition], success: list[Fields], failure: list[Fields]) -> list[Fields]:
    """The transaction, within another one, that does this if all conditions hold and else that; see `unnested`."""
    plain, if_any = _by_kind(conditions)
    for one in if_any:
        there = Condition(key=one.key, target=Target.EXISTS, expected=True)
        is_so = Condition(key=one.key, target=Target.VALUE, expected=one.expected)
        success = _if((there,), _if((is_so,), success, failure), success)
    return _if(plain, success, failure)


def _if(conditions: Sequence[Condition], success: list[Fields], failure: list[Fields]) -> list[Fields]:
    return [{"request_txn": {"compare": list(map(compare, conditions)), "success": success, "failure": failure}}]


def _by_kind(conditions: Sequence[Condition]) -> tuple[list[Condition], list[Condition]]:
    """Those that etcd has a word for, and the others."""
    if_any = [condition for condition in conditions if condition.target is Target.VALUE_IF_ANY]
    return [condition for condition in conditions if condition not in if_any], if_any


def _requests(operation: Operation | DeletePrefix, hidden: str) -> list[Fields]:
    match operation:
        case Put(key=key, value=value, lease=lease):
            return [{"request_put": {"key": key.encode(), "value": value, "lease": lease or 0}}]
        case Get(key=key):
            return [{"request_range": range_of(key)}]
        case Delete(key=key):
            return [{"request_delete_range": {"key": key.encode()}}]
        case DeletePrefix(prefix=prefix):
            return [{"request_delete_range": range_of(span)} for span in spans(prefix, hidden)]
        case Create(key=key, value=value, lease=lease):
            missing = Condition(key=key, target=Target.EXISTS, expected=False)
            return _if((missing,), _requests(Put(key, value, lease=lease), hidden), _requests(Get(key), hidden))
        case Add() | Append():
            raise AssertionError("what is added has been resolved")


def outcome(
    write: Write, receipt: Receipt | None, reply: pb.TxnResponse, *, hidden: str, fence: bool = False
) -> Outcome:
    """Return what came of a transaction that `transaction` made of the same arguments."""
    revision = reply.header.revision
    responses: Sequence[pb.ResponseOp] = reply.responses
    if receipt is not None and not reply.succeeded:
        found = entry_in(responses[0].response_range)
        return Outcome(mark=None, revision=revision, found=found)
    branch, mark = write.then, _Mark.THEN
    reread: list[str] = []
    if write.guard:
        held, responses = unnested(write.guard, responses)
        if not held:
            branch, mark = Branch(), _Mark.GUARD
    if write.when and mark == _Mark.THEN:
        held, responses = unnested(write.when, responses)
        if not held:
            branch, mark = write.otherwise, _Mark.OTHERWISE
    if branch.rests_on:
        held, responses = unnested(branch.rests_on, responses)
        if not held:
            reread = [condition.key for condition in branch.rests_on]
            branch, mark = Branch(operations=tuple(map(Get, reread))), _Mark.STALE
    left_receipt = receipt is not None and (fence or branch.writes)
    read = responses[1:] if left_receipt else responses
    raw = iter(read)
    results = tuple(
        _result(place, operation, branch, [next(raw) for _ in _requests(operation, hidden)], revision)
        for place, operation in enumerate(branch.operations)
    )
    before = receipt.revision if receipt is not None else 0
    return Outcome(
        mark=mark,
        results=results,
        revision=revision,
        receipt=revision if left_receipt else before,
        reread={key: entry_in(each.response_range) for key, each in zip(reread, read, strict=False)},
    )


def unnested(
    conditions: Sequence[Condition], responses: Sequence[pb.ResponseOp]
) -> tuple[bool, Sequence[pb.ResponseOp]]:
    """Whether the conditions of `nested` held, and what was answered to what was done then."""
    inner = responses[0].response_txn
    if not inner.succeeded:
        return False, inner.responses
    for _ in _by_kind(conditions)[1]:
        inner = inner.responses[0].response_txn
        if inner.succeeded:  # it is there, and is it so?
            inner = inner.responses[0].response_txn
            if not inner.succeeded:
                return False, inner.responses
    return True, inner.responses


def _result(
    place: int, operation: Operation | DeletePrefix, branch: Branch, raw: Sequence[pb.ResponseOp], revision: int
) -> int | bool | Entry | None:
    match operation:
        case Get():
            return entry_in(raw[0].response_range)
        case Create():
            created = raw[0].response_txn
            return revision if created.succeeded else entry_in(created.responses[0].response_range)
        case Delete():
            return raw[0].response_delete_range.deleted > 0
        case DeletePrefix():
            return sum(each.response_delete_range.deleted for each in raw)
        case _:
            return branch.sums.get(place, revision)


def answer(request: Request[Any], outcome: Outcome) -> Response:
    """Return the response to a request, given its outcome."""
    results, revision = outcome.results, outcome.revision
    match request:
        case Put():
            return Written(revision=revision)
        case Delete() | DeletePrefix():
            return Counted(count=int(results[0]), revision=revision)
        case Add() | Append():
            return Added(value=results[0], revision=revision)
        case CompareAndSet():
            return CompareAndSetResult(succeeded=outcome.succeeded, entry=results[-1])
        case _:
            return TransactionResult(succeeded=outcome.succeeded, results=results, revision=revision)


# ---------------------------------------------------------------------------------- an answer that was lost


def recovery(write: Write, found: Entry, *, hidden: str) -> Fields:
    """The reads that show what a write, which was done and left this receipt, must have answered."""
    branch = _branch(write, found.value)
    requests = []
    for place, operation in enumerate(branch.operations):
        # What it deleted was there just before. What it read was so just before, too, or it wrote it itself.
        written = any(isinstance(it, Put) and it.key == _key_of(operation) for it in branch.operations[:place])
        revision = found.mod_revision if written else found.mod_revision - 1
        for request in _requests(operation, hidden):
            if "request_range" in request:
                requests.append({"request_range": {**request["request_range"], "revision": revision}})
            elif isinstance(operation, Create):
                requests.append({"request_range": range_of(operation.key, revision=found.mod_revision)})
            elif "request_delete_range" in request:
                counted = {**request["request_delete_range"], "revision": revision, "count_only": True}
                requests.append({"request_range": counted})
    return {"success": requests}


def recovered(write: Write, found: Entry, reply: pb.TxnResponse, *, hidden: str) -> Outcome:
    """Return what came of that write."""
    branch = _branch(write, found.value)
    raw = iter(reply.responses)
    results: list[Any] = []
    for place, operation in enumerate(branch.operations):
        match operation:
            case Get():
                results.append(entry_in(next(raw).response_range))
            case Create():
                there = entry_in(next(raw).response_range)
                assert there is not None, "it was there, or was written"
                results.append(there if there.mod_revision < found.mod_revision else found.mod_revision)
            case Delete():
                results.append(next(raw).response_range.count > 0)
            case DeletePrefix():
                reads = [next(raw).response_range for _ in _requests(operation, hidden)]
                results.append(sum(read.count for read in reads))
            case _:
                results.append(branch.sums.get(place, found.mod_revision))
    return Outcome(mark=found.value, results=tuple(results), revision=found.mod_revision, receipt=found.mod_revision)


def _branch(write: Write, mark: bytes) -> Branch:
    return {_Mark.THEN: write.then, _Mark.OTHERWISE: write.otherwise}.get(mark, Branch())


def _key_of(operation: Operation | DeletePrefix) -> str | None:
    return None if isinstance(operation, DeletePrefix) else operation.key
