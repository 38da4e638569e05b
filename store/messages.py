"""The nouns of the store: one record per request, response and event, which says all that is known of its fields.

A request knows its response by its type: `Put` is a `Request[Written]`, so `call(Put(...))` is known to give a
`Written`. Nothing here does anything: clients build these, they travel as they stand, in the frames of `wire`, and
`engine` carries them out. The words are etcd's: a *revision* is the store-wide counter that steps once per change;
`create_revision` and `mod_revision` are the revisions at which a key was made and last changed; keys on a *lease* go
when it lapses.

Seconds everywhere, and always durations: no deadline ever crosses the wire.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from store.errors import (
    ConditionFailed,
    LeaseNotFound,
    LimitExceeded,
    StoreError,
    StoreUsageError,
    Unsupported,
    WatchCompacted,
)
from store.records import Record, Unfit, shown

CHOSEN_LEASE_LEAST = 2**62  # of the ids of leases that clients choose; those that a server chooses are below
GONE_TTL = 0.1  # seconds that a lease outlives its process; a living one is back on a new connection in a few ms


def key_bytes(key: str) -> int:
    """Return the bytes that a key may take: up to four for each character, in memory and in UTF-8; one if ASCII."""
    return len(key) if key.isascii() else 4 * len(key)


class Entry(Record, kw_only=True):
    """A key as it stands: its value, when it was made and last changed, and the lease it goes with, if any."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int | None = None


EventKind = Literal["put", "delete", "synced", "reset"]

Cause = Literal["", "silent", "disconnected", "gone"]
"""Why a key was deleted: by somebody, or as its lease ended: nobody kept it for its TTL; its keeper's connection had
closed; its keeper's process was gone. Empty also where the store does not say (an etcd cluster)."""


class Event(Record, kw_only=True):
    """One change seen by a watch.

    `put` and `delete` are changes of `key` at `revision`. `synced` ends a snapshot, which stands for every change up to
    `revision`. `reset` says that history was lost: forget everything seen so far, a new snapshot follows.
    `cause` says of a `delete` how the key's lease ended, if that is why.
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
        """What a `put` left behind."""
        assert self.kind == "put", "only a put leaves an entry"
        return Entry(
            key=self.key,
            value=self.value,
            create_revision=self.create_revision,
            mod_revision=self.revision,
            lease=self.lease,
        )


class Target(IntEnum):
    """What of a key a condition looks at. A key that does not exist has both revisions 0 and no value."""

    MOD_REVISION = 0
    CREATE_REVISION = 1
    VALUE = 2
    EXISTS = 3
    VALUE_IF_ANY = 4


# To find a member by its name takes as long as all else that a condition takes.
_MOD_REVISION, _CREATE_REVISION, _VALUE, _EXISTS, _VALUE_IF_ANY = Target
_EXPECTED: tuple[type, ...] = (int, int, bytes, bool, bytes)  # by target


class Condition(Record, kw_only=True):
    """`target` of `key` equals `expected`: an `int` for revisions, `bytes` for a value, a `bool` for existence.

    `VALUE_IF_ANY` also holds of a key that does not exist.
    """

    key: str
    target: Target
    expected: int | bytes | bool

    def unfit(self) -> str | None:
        """Say that `expected` is of another type than its target."""
        return None if type(self.expected) is _EXPECTED[self.target] else f"cannot have expected={shown(self.expected)}"

    def holds(self, entry: Entry | None) -> bool:
        """Return whether the condition holds, given what the key holds."""
        target = self.target
        if target is _MOD_REVISION:  # of which one commit of a large round has thousands
            return (entry.mod_revision if entry else 0) == self.expected
        if target is _CREATE_REVISION:
            return (entry.create_revision if entry else 0) == self.expected
        if target is _VALUE:
            return entry is not None and entry.value == self.expected
        if target is _EXISTS:
            return (entry is not None) == self.expected
        assert target is _VALUE_IF_ANY, f"no condition is about {target}"
        return entry is None or entry.value == self.expected


# ---------------------------------------------------------------------------------------------------- responses


class Response(Record):
    """Base of what a server answers with."""


class Written(Response, code=64):
    """The revision that a write made."""

    revision: int


class Found(Response, code=65):
    """What a key holds, or None."""

    entry: Entry | None


class Listing(Response, code=66):
    """Entries, in the order asked for (None where a key is missing), as of one revision."""

    entries: tuple[Entry | None, ...]
    revision: int


class ListingPart(Response, code=78):
    """The first entries of a listing that is long; more come under the same id, and a `Listing` of the last ones."""

    entries: tuple[Entry | None, ...]


class Counted(Response, code=67, kw_only=True):
    """How many keys there were, or were deleted."""

    count: int
    revision: int


class CompareAndSetResult(Response, code=68):
    """Whether the write happened, and what is there now, so that the loser need not read again."""

    succeeded: bool
    entry: Entry | None


class Added(Response, code=69, kw_only=True):
    """The sum after an `Add`, or the length in bytes after an `Append`."""

    value: int
    revision: int


class TransactionResult(Response, code=70):
    """Which branch of a transaction ran, and one result per operation of it, in order.

    A `Put` results in its revision, a `Get` in an `Entry` or None, a `Delete` in whether there was something to
    delete, an `Add` in the sum, an `Append` in the length, a `Create` in its revision or the `Entry` that was there.
    """

    succeeded: bool
    results: tuple[int | bool | Entry | None, ...]
    revision: int


class Granted(Response, code=71, kw_only=True):
    """A lease, and the TTL it was granted for, which may be longer than was asked for."""

    lease: int
    ttl: float


class LeaseState(Response, code=72, kw_only=True):
    """A lease as the server sees it: seconds it has left, seconds it was granted for, and its keys, sorted."""

    remaining: float
    ttl: float
    keys: tuple[str, ...]


class Watching(Response, code=73, kw_only=True):
    """A watch is open; every change after `revision` will come, and those from its start up to it are on their way."""

    revision: int


class Done(Response, code=74, kw_only=True):
    """The request was done."""


class Pong(Response, code=75, kw_only=True):
    """The server is there, at this revision."""

    revision: int


class Figures(Response, code=76, kw_only=True):
    """What `stats()` shows: plain names to plain numbers or strings."""

    figures: Annotated[dict[str, Any], dict[str, int | float | str | bool]]


class KeyGroup(Record, kw_only=True):
    """The keys that begin with `name`, how many there are, and the bytes that they take with their bookkeeping.

    Attributes:
        age: Seconds since the first of them was made, or since the server started if that was later.
    """

    name: str
    keys: int
    bytes: int
    age: float


class GroupPage(Response, code=79, kw_only=True):
    """Some groups of keys by name, and whether there are more after them."""

    groups: tuple[KeyGroup, ...]
    more: bool


class Note(Record, kw_only=True):
    """What came with the last keep-alive of the lease that a key is on.

    Attributes:
        age: Seconds since it came.
    """

    key: str
    note: bytes
    age: float


class DeletedOlder(Response, code=81, kw_only=True):
    """How many keys went, the last change that counted, and the key after which there may be more; "" if not."""

    count: int
    revision: int
    after: str


class NotePage(Response, code=80, kw_only=True):
    """Some notes in the order of their keys, and whether there are more after them."""

    notes: tuple[Note, ...]
    more: bool


NOTE_BYTES_MAX = 128
"""How long the note of a keep-alive may be: each lease keeps one."""


class FailureKind(IntEnum):
    """Which error of `errors` a refused request raises at the client."""

    USAGE = 0
    LIMIT = 1
    LEASE = 2
    CONDITION = 3
    COMPACTED = 4
    FORGOTTEN = 5  # applied once already, but its reply is no longer kept: `ConnectionLost(maybe_applied=True)`
    UNSUPPORTED = 6  # the server does not know this request
    OTHER = 255  # never sent: what stands for a kind that only later releases know


ERRORS: dict[FailureKind, type[StoreError]] = {
    FailureKind.USAGE: StoreUsageError,
    FailureKind.LIMIT: LimitExceeded,
    FailureKind.LEASE: LeaseNotFound,
    FailureKind.CONDITION: ConditionFailed,
    FailureKind.COMPACTED: WatchCompacted,
    FailureKind.UNSUPPORTED: Unsupported,
    FailureKind.OTHER: StoreError,
}


class Failed(Response, code=77, kw_only=True):
    """A request was refused and changed nothing (`FORGOTTEN` excepted); `message` is for people."""

    kind: FailureKind
    message: str


# ----------------------------------------------------------------------------------------------------- requests

R_co = TypeVar("R_co", bound=Response, covariant=True)


class Request(Record, Generic[R_co]):
    """Base of what a client asks; the type parameter is the response it gets."""


class Put(Request[Written], code=1):
    """Write a key. Without `ttl` or `lease` the key stays, also if it was on a lease before."""

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
    """Add to the decimal number a key holds; a missing key counts from 0, and is put on `lease`. Others keep theirs."""

    key: str
    amount: int
    lease: int | None = None

    def total(self, entry: Entry | None) -> int:
        """Return the sum, given what the key holds.

        Raises:
            StoreUsageError: It holds no decimal number, or the sum has more than 64 bits.
        """
        held = b"0" if entry is None else entry.value
        digits = held.removeprefix(b"-")
        # Python's int() takes underscores and blanks; the store does not.
        if not digits.isdigit() or len(digits) > 20:
            raise StoreUsageError(f"{shown(self.key)} holds {shown(held)}, which is no decimal number to add to")
        total = int(held) + self.amount
        if abs(total) >= 2**63:  # what torch.distributed.Store counts in
            raise StoreUsageError(f"adding {self.amount} to {shown(self.key)} gives a number of more than 64 bits")
        return total


class Append(Request[Added], code=5):
    """Append bytes to what a key holds; a missing key counts as empty, and is put on `lease`. Others keep theirs."""

    key: str
    value: bytes
    lease: int | None = None


class Create(Request[Written], code=23):
    """In a transaction: write a key that is not there; one that is there stays as it is."""

    key: str
    value: bytes
    lease: int | None = None


Operation = Put | Get | Delete | Add | Append | Create


class GetMany(Request[Listing], code=6, kw_only=True):
    """Read several keys at one revision."""

    keys: tuple[str, ...]


class List(Request[Listing], code=7, kw_only=True):
    """Read all keys that start with `prefix`, sorted; with `keys_only`, their values come empty."""

    prefix: str
    keys_only: bool = False


class Count(Request[Counted], code=8, kw_only=True):
    """Count the keys that start with `prefix`."""

    prefix: str


class DeletePrefix(Request[Counted], code=9, kw_only=True):
    """Delete all keys that start with `prefix`, at one revision; with `at_most`, the first so many of them."""

    prefix: str
    at_most: int | None = None


class DeleteOlder(Request[DeletedOlder], code=25, kw_only=True):
    """Delete some of the keys that start with `prefix` and come after a key, of those last written up to `revision`.

    Without `revision` that is the store's present one. Keys that were written later stay.
    """

    prefix: str
    after: str = ""
    revision: int | None = None


class CompareAndSet(Request[CompareAndSetResult], code=10, kw_only=True):
    """Write a key if it is as expected: a mod_revision (0: it must not exist) or a value, exactly one of the two."""

    key: str
    value: bytes
    expected_revision: int | None = None
    expected_value: bytes | None = None
    ttl: float | None = None
    lease: int | None = None


class Grant(Request[Granted], code=14, kw_only=True):
    """Grant a lease of `ttl` seconds.

    With `disconnect_ttl` it lapses that long after the connection that last kept it has closed, if that is sooner and
    no other connection has kept it alive since. With `gone_ttl` it lapses that long after the last connection of its
    process has closed, if that looks like a death and the process does not come back.

    In the `grants` of a transaction, and only there, it has an `id`, of at least `CHOSEN_LEASE_LEAST`.
    """

    ttl: float
    disconnect_ttl: float | None = None
    gone_ttl: float | None = None
    id: int | None = None


class Transact(Request[TransactionResult], code=11, kw_only=True):
    """If all of `when` hold, do `then`, else do `otherwise`; all at one revision. A key is written once a branch.

    `grants` are leases of ids that the client has chosen. Each that a key goes on, and that is not there, is granted.
    """

    when: tuple[Condition, ...]
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...] = ()
    grants: tuple[Grant, ...] = ()


class Wait(Request[Listing], code=12, kw_only=True):
    """Answer when all keys exist, with what they hold then."""

    keys: tuple[str, ...]


Guardable = Operation | GetMany | List | Count | DeletePrefix | DeleteOlder | CompareAndSet | Wait


class Guarded(Request[R_co], code=13):
    """Do `request` if all of `when` hold, else fail with `CONDITION`. A guarded `Wait` ends when they cease to hold."""

    when: tuple[Condition, ...]
    request: Annotated[Request[R_co], Guardable]


class KeepAlive(Request[Granted], code=15, kw_only=True):
    """Give a lease its full TTL again, and take over as the connection that keeps it.

    With a `note` it is kept with the lease, in memory, in place of the one before; see `ListNotes`.
    """

    lease: int
    note: bytes = b""


class Revoke(Request[Done], code=16, kw_only=True):
    """End a lease and delete its keys now."""

    lease: int


class TimeToLive(Request[LeaseState], code=17, kw_only=True):
    """Ask what a lease has left."""

    lease: int


class Watch(Request[Watching], code=18, kw_only=True):
    """Watch all keys that start with `prefix`; events come under this request's id until it is cancelled.

    With `start_revision` (inclusive) every change from then on; with `snapshot` first what is there now; with neither,
    every change after this request.
    """

    prefix: str
    start_revision: int | None = None
    snapshot: bool = False


class Cancel(Request[Done], code=19, kw_only=True):
    """End the watch or the parked wait of this id, on this connection."""

    target: int


class Ping(Request[Pong], code=20, kw_only=True):
    """Ask whether the server is there."""


class Stats(Request[Figures], code=21, kw_only=True):
    """Ask for the server's counters."""


class ListGroups(Request[GroupPage], code=22, kw_only=True):
    """Ask which groups of keys there are, from the first name after `after` on."""

    after: str


class ListNotes(Request[NotePage], code=24, kw_only=True):
    """Ask for the notes of the leases of all keys that start with `prefix`, a page at a time, beginning after a key."""

    prefix: str
    after: str = ""


class Excessive(Request[Failed]):
    """Stands for a request that holds more than `elements_max` elements, and was therefore not decoded; never sent."""

    elements_max: int


class Unknown(Request[Failed]):
    """Stands for a request that this release does not know, or in which there is something that it does not know."""

    what: str


REQUESTS: dict[int, type[Request[Any]]] = {
    kind.code: kind for kind in Request.__subclasses__() if kind.code is not None
}
RESPONSES: dict[int, type[Response]] = {kind.code: kind for kind in Response.__subclasses__() if kind.code is not None}
"""All that a client and a server may say, by their codes."""


def checked(request: Request[Any]) -> Request[Any]:
    """Return a request as it is sent: what is of a subclass of a field's type becomes that type.

    Raises:
        StoreUsageError: It is none, or a field is not of its type.
    """
    if getattr(request, "code", None) not in REQUESTS:
        raise StoreUsageError(f"{shown(request)} is no request")
    try:
        return type(request).read(request)
    except Unfit as error:
        raise StoreUsageError(str(error)) from None


# What changes the store, so that doing it twice would differ from doing it once: the server keeps the replies to these
# until they are acknowledged. Renewing a lease twice is the same as once; revoking it is not, since the second time
# there is none.
MUTATIONS = frozenset((Put, Delete, Add, Append, DeletePrefix, DeleteOlder, CompareAndSet, Transact, Grant, Revoke))


def mutates(request: Request[Any]) -> bool:
    """Return whether a request changes the store; a guarded request counts as what it guards."""
    return type(request) in MUTATIONS or (type(request) is Guarded and type(request.request) in MUTATIONS)


def only_takes_away(request: Request[Any]) -> bool:
    """Return whether a mutation can only make the store smaller."""
    if type(request) is Guarded:
        request = request.request
    if type(request) is Transact:
        return all(type(operation) in {Get, Delete} for operation in (*request.then, *request.otherwise))
    return type(request) in {Delete, DeletePrefix, DeleteOlder, Revoke}


def waits(request: Request[Any]) -> bool:
    """Return whether a request is answered only when something happens."""
    return type(request) is Wait or (type(request) is Guarded and type(request.request) is Wait)
