"""The messages of the store: one record per request, response and event, with the meaning of its fields.

A request's type names its response: `Put` is a `Request[Written]`, so `call(Put(...))` returns a `Written`. The terms
are etcd's. The *revision* of the store increases by one per change. The `create_revision` and `mod_revision` of a key
are those of its creation and last change. Keys on a *lease* are deleted when it ends. Times are durations in seconds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from store import errors
from store.records import Record, UnfitError, brief

CHOSEN_LEASE_LEAST = 2**62  # the least lease id that a client may choose; a server's are below
GONE_TTL = 0.1  # default seconds that a lease outlives its process; a living process reconnects in a few ms


def key_size(key: str) -> int:
    """Return an upper bound of a key's bytes, in memory and in UTF-8."""
    return len(key) if key.isascii() else 4 * len(key)


class Entry(Record, kw_only=True):
    """The current state of a key."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int | None = None

    @property
    def event(self) -> Event:
        """The event of the change that wrote this entry."""
        return Event(
            kind="put",
            revision=self.mod_revision,
            key=self.key,
            value=self.value,
            create_revision=self.create_revision,
            lease=self.lease,
        )


EventKind = Literal["put", "delete", "synced", "reset"]

Cause = Literal["", "silent", "disconnected", "gone"]
"""Why a key was deleted: by a request (""), or because its lease was not renewed for its TTL, its keeper's connection
closed, or its keeper's process died. Also "" if the store does not say (an etcd cluster).
"""


class Event(Record, kw_only=True):
    """One change seen by a watch.

    `synced` ends a snapshot, which replaces every change up to `revision`. `reset` says that changes were lost: the
    reader must forget everything seen so far, and a new snapshot follows.
    """

    kind: EventKind
    revision: int
    key: str = ""
    value: bytes = b""
    create_revision: int = 0
    lease: int | None = None
    cause: Cause = ""

    @property
    def entry(self) -> Entry:
        """The entry that a `put` wrote."""
        assert self.kind == "put", "only a put leaves an entry"
        return Entry(
            key=self.key,
            value=self.value,
            create_revision=self.create_revision,
            mod_revision=self.revision,
            lease=self.lease,
        )


class Target(IntEnum):
    """The property of a key that a condition compares. A missing key has revisions 0 and no value."""

    MOD_REVISION = 0
    CREATE_REVISION = 1
    VALUE = 2
    EXISTS = 3
    VALUE_IF_ANY = 4


# Variables, as looking up an enum's member would take as long as the rest of a comparison.
_MOD_REVISION, _CREATE_REVISION, _VALUE, _EXISTS, _VALUE_IF_ANY = Target
_EXPECTED: tuple[type, ...] = (int, int, bytes, bool, bytes)


class Condition(Record, kw_only=True):
    """The condition that `target` of `key` equals `expected`.

    `expected` is an `int` for a revision, `bytes` for a value, a `bool` for existence. `VALUE_IF_ANY` also holds for a
    missing key.
    """

    key: str
    target: Target
    expected: int | bytes | bool

    def why_invalid(self) -> str | None:
        """Return an error if the key is empty, or `expected` has another type than the target."""
        if not self.key:
            return "has no key; a key has at least one character"
        return None if type(self.expected) is _EXPECTED[self.target] else f"cannot have expected={brief(self.expected)}"

    def holds(self, entry: Entry | None) -> bool:
        """Return True if the condition holds for a key's entry."""
        target = self.target
        if target is _MOD_REVISION:  # compared first: one transaction may have thousands of these conditions
            return (entry.mod_revision if entry else 0) == self.expected
        if target is _CREATE_REVISION:
            return (entry.create_revision if entry else 0) == self.expected
        if target is _VALUE:
            return entry is not None and entry.value == self.expected
        if target is _EXISTS:
            return (entry is not None) == self.expected
        assert target is _VALUE_IF_ANY, f"no condition is about {target}"
        return entry is None or entry.value == self.expected

    @property
    def failure_message(self) -> str:
        """The error message if the condition does not hold."""
        return f"{self.target.name.lower()} of {brief(self.key)} is no longer {brief(self.expected)}"


class Response(Record):
    """Base of the server's responses."""


class Written(Response, code=64):
    """The revision of a write."""

    revision: int


class Found(Response, code=65):
    """The entry of a key, or None."""

    entry: Entry | None


class Listing(Response, code=66):
    """Entries at one revision, in the requested order; None for missing keys."""

    entries: tuple[Entry | None, ...]
    revision: int


class ListingPart(Response, code=78):
    """Some entries of a long listing; more follow under the same request id, the last ones in a `Listing`."""

    entries: tuple[Entry | None, ...]


class Counted(Response, code=67, kw_only=True):
    """The number of keys found or deleted."""

    count: int
    revision: int


class CompareAndSetResult(Response, code=68):
    """Whether the write happened, and the current entry."""

    succeeded: bool
    entry: Entry | None


class Added(Response, code=69, kw_only=True):
    """The sum after an `Add`, or the length in bytes after an `Append`."""

    value: int
    revision: int


class TransactionResult(Response, code=70):
    """The executed branch of a transaction, and one result per operation, in order.

    The result of a `Put` is the revision; of a `Get`, an `Entry` or None; of a `Delete`, whether the key existed; of an
    `Add`, the sum; of an `Append`, the length; of a `Create`, the revision, or the existing `Entry`.
    """

    succeeded: bool
    results: tuple[int | bool | Entry | None, ...]
    revision: int


class Granted(Response, code=71, kw_only=True):
    """A lease, and its TTL, which may be longer than requested."""

    lease: int
    ttl: float


class LeaseState(Response, code=72, kw_only=True):
    """The remaining seconds of a lease, its TTL, and its sorted keys."""

    remaining: float
    ttl: float
    keys: tuple[str, ...]


class Watching(Response, code=73, kw_only=True):
    """A watch was opened when the store was at `revision`; its events follow."""

    revision: int


class Done(Response, code=74, kw_only=True):
    """The request was carried out."""


class Pong(Response, code=75, kw_only=True):
    """The server's revision."""

    revision: int


class Figures(Response, code=76, kw_only=True):
    """The figures of `stats()`: plain names, and numbers or strings."""

    figures: Annotated[dict[str, Any], dict[str, int | float | str | bool]]


class KeyGroup(Record, kw_only=True):
    """The keys that begin with `name`; `age`: seconds since the group's first key, or the server's start."""

    name: str
    keys: int
    bytes: int
    age: float


class KeyGroupsPage(Response, code=79, kw_only=True):
    """Some groups of keys by name, and whether more follow."""

    groups: tuple[KeyGroup, ...]
    more: bool


class Note(Record, kw_only=True):
    """The last note of a key's lease, `age` seconds old; empty if none."""

    key: str
    note: bytes
    age: float


class DeletedOlder(Response, code=81, kw_only=True):
    """The number of deleted keys, the highest mod_revision to delete, and the key to continue after ("" at the end)."""

    count: int
    revision: int
    after: str


class NotePage(Response, code=80, kw_only=True):
    """Some notes in the order of their keys, and whether more follow."""

    notes: tuple[Note, ...]
    more: bool


NOTE_BYTES_MAX = 128  # bytes of a keep-alive's note


class FailureKind(IntEnum):
    """The error that a refused request raises at the client."""

    USAGE = 0
    LIMIT = 1
    LEASE = 2
    CONDITION = 3
    COMPACTED = 4
    FORGOTTEN = 5  # the request was applied, but its reply is not kept: `ConnectionLost(maybe_applied=True)`
    UNSUPPORTED = 6  # unknown to the server
    OTHER = 255  # never sent; stands for any kind that only later releases know


ERRORS: dict[FailureKind, type[errors.StoreError]] = {
    FailureKind.USAGE: errors.StoreUsageError,
    FailureKind.LIMIT: errors.LimitExceeded,
    FailureKind.LEASE: errors.LeaseNotFound,
    FailureKind.CONDITION: errors.ConditionFailed,
    FailureKind.COMPACTED: errors.WatchCompacted,
    FailureKind.UNSUPPORTED: errors.Unsupported,
    FailureKind.OTHER: errors.StoreError,
}


class Failed(Response, code=77, kw_only=True):
    """A refused request, which changed nothing (except for `FORGOTTEN`); `message` is for people."""

    kind: FailureKind
    message: str


R_co = TypeVar("R_co", bound=Response, covariant=True)


class Request(Record, Generic[R_co]):
    """Base of requests; the type parameter is the response."""


class Put(Request[Written], code=1):
    """Write a key. Without `ttl` and `lease` the key leaves its lease, and stays until it is deleted."""

    key: str
    value: bytes
    ttl: float | None = None
    lease: int | None = None


class Get(Request[Found], code=2):
    """Read a key."""

    key: str


class Delete(Request[Counted], code=3):
    """Delete a key."""

    key: str


class Add(Request[Added], code=4):
    """Add to a key's decimal number. A missing key counts from 0 and is put on `lease`; existing keys keep theirs."""

    key: str
    amount: int
    lease: int | None = None

    def total(self, entry: Entry | None) -> int:
        """Return the sum for a key's entry; `StoreUsageError` if it is no number, or the sum has more than 64 bits."""
        held = b"0" if entry is None else entry.value
        digits = held.removeprefix(b"-")
        # Check the digits, as Python's int() also accepts underscores and blanks.
        if not digits.isdigit() or len(digits) > 20:
            raise errors.StoreUsageError(f"{brief(self.key)} holds {brief(held)}, which is no decimal number to add to")
        total = int(held) + self.amount
        if abs(total) >= 2**63:  # the range of torch.distributed.Store
            adding = f"adding {self.amount} to {brief(self.key)}"
            raise errors.StoreUsageError(f"{adding} gives a number of more than 64 bits")
        return total


class Append(Request[Added], code=5):
    """Append bytes to a key. A missing key counts as empty and is put on `lease`; existing keys keep theirs."""

    key: str
    value: bytes
    lease: int | None = None


class Create(Request[Written], code=23):
    """In a transaction: write a key, if it does not exist."""

    key: str
    value: bytes
    lease: int | None = None


Operation = Put | Get | Delete | Add | Append | Create


class GetMany(Request[Listing], code=6, kw_only=True):
    """Read several keys at one revision."""

    keys: tuple[str, ...]


class List(Request[Listing], code=7, kw_only=True):
    """Read all keys that start with `prefix`, sorted; with `keys_only`, their values are empty."""

    prefix: str
    keys_only: bool = False


class Count(Request[Counted], code=8, kw_only=True):
    """Count the keys that start with `prefix`."""

    prefix: str


class DeletePrefix(Request[Counted], code=9, kw_only=True):
    """Delete all keys that start with `prefix`, or up to `at_most`, at one revision."""

    prefix: str
    at_most: int | None = None


class DeleteOlder(Request[DeletedOlder], code=25, kw_only=True):
    """Delete some keys that start with `prefix`, sort after `after`, and have a mod_revision up to `revision`."""

    prefix: str
    after: str = ""
    revision: int | None = None  # None: the present revision


class CompareAndSet(Request[CompareAndSetResult], code=10, kw_only=True):
    """Write a key if it has the expected mod_revision (0: no such key) or value."""

    key: str
    value: bytes
    expected_revision: int | None = None
    expected_value: bytes | None = None
    ttl: float | None = None
    lease: int | None = None

    def why_invalid(self) -> str | None:
        """Return an error unless exactly one expectation is given."""
        if (self.expected_revision is None) == (self.expected_value is None):
            return f"of {brief(self.key)} takes exactly one of expected_revision and expected_value"
        return None


Write = Put | CompareAndSet | Create | Add | Append


class Grant(Request[Granted], code=14, kw_only=True):
    """Grant a lease of `ttl` seconds.

    With `disconnect_ttl` the lease lapses at most that many seconds after the connection that last renewed it has
    closed, unless another connection renews it. With `gone_ttl` the lease lapses at most that many seconds after the
    last connection of its process has closed, if the process seems dead and does not reconnect.
    """

    ttl: float
    disconnect_ttl: float | None = None
    gone_ttl: float | None = None
    id: int | None = None  # only in a transaction's `grants`: at least `CHOSEN_LEASE_LEAST`


class Transact(Request[TransactionResult], code=11, kw_only=True):
    """If all of `when` hold, do `then`, else `otherwise`, at one revision. Each branch may write a key once."""

    when: tuple[Condition, ...]
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...] = ()
    grants: tuple[Grant, ...] = ()  # see `Calls.transact`


class Wait(Request[Listing], code=12, kw_only=True):
    """Wait until all keys exist, and return their entries."""

    keys: tuple[str, ...]


Guardable = Operation | GetMany | List | Count | DeletePrefix | DeleteOlder | CompareAndSet | Wait


class Guarded(Request[R_co], code=13):
    """Do `request` if all conditions in `when` hold, else fail; a guarded `Wait` fails once a condition is false."""

    when: tuple[Condition, ...]
    request: Annotated[Request[R_co], Guardable]


class KeepAlive(Request[Granted], code=15, kw_only=True):
    """Renew a lease, and tie it to this connection. A non-empty `note` replaces the lease's note."""

    lease: int
    note: bytes = b""


class Revoke(Request[Done], code=16, kw_only=True):
    """End a lease, and delete its keys."""

    lease: int


class TimeToLive(Request[LeaseState], code=17, kw_only=True):
    """Read the remaining time of a lease."""

    lease: int


class Watch(Request[Watching], code=18, kw_only=True):
    """Watch all keys that start with `prefix`; events have this request's id. `Store.watch` explains the arguments."""

    prefix: str
    start_revision: int | None = None
    snapshot: bool = False


class Cancel(Request[Done], code=19, kw_only=True):
    """End the watch or the wait whose request, on this connection, has the id `target`."""

    target: int


class Ping(Request[Pong], code=20, kw_only=True):
    """Check that the server answers."""


class Stats(Request[Figures], code=21, kw_only=True):
    """Read the server's counters."""


class ListGroups(Request[KeyGroupsPage], code=22, kw_only=True):
    """List the groups of keys whose names sort after `after`."""

    after: str


class ListNotes(Request[NotePage], code=24, kw_only=True):
    """List a page of notes: for each key with `prefix`, sorted after the key `after`, its lease's note."""

    prefix: str
    after: str = ""


class TooLargeRequest(Request[Failed]):
    """Stands for an undecoded request of more than `elements_max` elements; never sent."""

    elements_max: int


class UndecodableRequest(Request[Failed]):
    """Stands for a request that this release does not know, in whole or in part."""

    what: str


REQUESTS: dict[int, type[Request[Any]]] = {
    kind.code: kind for kind in Request.__subclasses__() if kind.code is not None
}
RESPONSES: dict[int, type[Response]] = {kind.code: kind for kind in Response.__subclasses__() if kind.code is not None}
"""All responses and requests, by code."""


def validate_request(request: Request[Any]) -> Request[Any]:
    """Return a request ready to be sent; raise `StoreUsageError` if it is no request, or a field is invalid."""
    if REQUESTS.get(getattr(request, "code", 0)) is not type(request):
        raise errors.StoreUsageError(f"{brief(request)} is no request")
    try:
        return type(request).read(request)
    except UnfitError as error:
        raise errors.StoreUsageError(str(error)) from None


# The server keeps the replies to these requests until acknowledged, as a repeated request must not be applied twice.
MUTATIONS = frozenset((Put, Delete, Add, Append, DeletePrefix, DeleteOlder, CompareAndSet, Transact, Grant, Revoke))
TAKE_AWAY = (Get, Delete, DeletePrefix, DeleteOlder, Revoke)


def mutates(request: Request[Any]) -> bool:
    """Return True if a request changes the store."""
    inner = request.request if type(request) is Guarded else request
    if type(inner) is Transact:
        return any(type(operation) is not Get for operation in operations_of(inner))
    return type(inner) in MUTATIONS


def operations_of(request: Request[Any]) -> tuple[Any, ...]:
    """Return the operations of both branches of a transaction, or the request itself, without its guard."""
    inner = request.request if type(request) is Guarded else request
    return (*inner.then, *inner.otherwise) if type(inner) is Transact else (inner,)


def waits(request: Request[Any]) -> bool:
    """Return True if a request is a `Wait`, guarded or not: its answer may take any time."""
    return type(request) is Wait or (type(request) is Guarded and type(request.request) is Wait)
