"""Converts requests and answers between etcd's format and the store's, and parses a cluster's URL.

Requests are nested mappings from the names in `rpc/etcd.proto` to values. The sender makes messages of them, so this
module works without the optional gRPC packages.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

from store.errors import AuthenticationError, ConditionFailed, LeaseNotFound, LimitExceeded, StoreError, StoreUsageError
from store.messages import Condition, Entry, Event, Target
from store.net.address import join_host_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from store.etcd.rpc import etcd_pb2 as pb

Fields: TypeAlias = "dict[str, Any]"  # the fields of a message to send, by name

Span: TypeAlias = tuple[bytes, bytes]  # the keys from the first up to the second, exclusive

DEFAULT_PORT: Final = 2379

OPERATIONS_MAX: Final = 126
"""The most operations of a write: etcd takes 128 (`--max-txn-ops`), and the receipt needs two of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The members of an etcd cluster, and whether they use TLS."""

    hosts: tuple[tuple[str, int], ...]
    secure: bool = False

    def __str__(self) -> str:
        return f"{'etcds' if self.secure else 'etcd'}://{','.join(self.targets)}"

    @property
    def targets(self) -> tuple[str, ...]:
        """The address of each member, for gRPC."""
        return tuple(join_host_port(host, port) for host, port in self.hosts)

    @classmethod
    def parse(cls, url: str) -> Endpoints:
        """Return the cluster that a URL names, or raise `StoreUsageError`."""
        scheme, separator, rest = url.partition("://")
        if scheme not in ("etcd", "etcds") or not separator:
            raise StoreUsageError(f"{url!r} does not start with etcd:// or etcds://")
        authority = rest.removesuffix("/")
        if "@" in authority:  # the URL is not shown, as it may have a password
            raise StoreUsageError("the URL's host contains '@'; give user= and password= beside the URL")
        if any(sign in authority for sign in "/?#"):
            raise StoreUsageError(f"{url!r} has more than a cluster's address; write etcd://HOST:PORT,HOST:PORT")
        hosts = []
        for part in authority.split(","):
            try:
                parts = urlsplit(f"//{part}")
                port = DEFAULT_PORT if parts.port is None else parts.port
            except ValueError as error:
                raise StoreUsageError(f"{url!r} is no URL of a cluster: {error}") from None
            if not parts.hostname:
                raise StoreUsageError(f"{url!r} names no host; write etcd://HOST:{DEFAULT_PORT}")
            hosts.append((parts.hostname, port))
        return cls(hosts=tuple(hosts), secure=scheme == "etcds")


def _range_end(prefix: bytes) -> bytes:
    """Return the first key after a prefix's keys: add 1 to the prefix's last byte, which is never 255 in UTF-8."""
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b"\0"  # to etcd, an end of one zero byte means no end


def prefix_span(prefix: str) -> Span:
    """Return the span of all keys that start with a prefix."""
    start = prefix.encode()
    return start or b"\0", _range_end(start)


def key_spans(prefix: str, hidden: str) -> tuple[Span, ...]:
    """Return the keys that start with a prefix, without those that start with `hidden`: clients' receipts and notes."""
    first, last = prefix_span(prefix)
    if not hidden.startswith(prefix):
        return ((first, last),)
    return (first, hidden.encode()), (_range_end(hidden.encode()), last)


def range_of(span: str | Span, **options: Any) -> Fields:
    """Return a read of one key, or of a span."""
    if isinstance(span, str):
        return {"key": span.encode(), **options}
    return {"key": span[0], "range_end": span[1], **options}


def entry_of(kv: pb.KeyValue) -> Entry:
    """Return a key of an answer as an `Entry`."""
    return Entry(
        key=decode_key_name(kv.key),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        lease=kv.lease or None,
    )


def decode_key_name(key: bytes) -> str:
    """Return a key's name. Bytes that are not UTF-8, which other programs may write, become surrogates."""
    return key.decode(errors="surrogateescape")


def one_entry(response: pb.RangeResponse) -> Entry | None:
    """Return the entry of a read of one key, or None."""
    return entry_of(response.kvs[0]) if response.kvs else None


def watch_requests(keys: Iterable[str | Span], *, start_revision: int) -> list[Fields]:
    """Return one request per watch; `WatchStream.subscribe` adds the ids of the watches."""
    return [range_of(key, start_revision=start_revision, progress_notify=True) for key in keys]


def events_by_revision(result: pb.WatchResponse, hidden: str) -> list[list[Event]]:
    """Return the events in a watch's message, grouped by revision; etcd never splits a revision."""
    events = [event for change in result.events if not (event := _decode_event(change)).key.startswith(hidden)]
    return [list(batch) for _, batch in itertools.groupby(events, key=lambda event: event.revision)]


DELETED: Final = 1  # `Event.EventType.DELETE`, whose module needs the etcd extra


def _decode_event(change: pb.Event) -> Event:
    kv = change.kv
    if change.type == DELETED:
        return Event(kind="delete", revision=kv.mod_revision, key=decode_key_name(kv.key))
    return entry_of(kv).event


def read_for_condition(condition: Condition) -> Fields:
    """Return the read whose result shows if a condition holds."""
    return range_of(condition.key, keys_only=condition.target not in (Target.VALUE, Target.VALUE_IF_ANY))


def compare(condition: Condition) -> Fields:
    """Return a condition in etcd's format, which has no `VALUE_IF_ANY`: the caller replaces it."""
    expected, fields = condition.expected, {"key": condition.key.encode(), "result": "EQUAL"}
    match condition.target:
        case Target.EXISTS:  # a missing key has `create_revision` 0
            return {**fields, "target": "CREATE", "result": "GREATER" if expected else "EQUAL", "create_revision": 0}
        case Target.VALUE:
            return {**fields, "target": "VALUE", "value": expected}
        case Target.MOD_REVISION:
            return {**fields, "target": "MOD", "mod_revision": expected}
        case Target.CREATE_REVISION:
            return {**fields, "target": "CREATE", "create_revision": expected}
        case Target.VALUE_IF_ANY:
            raise AssertionError("the present value decides")


def condition_error(conditions: Sequence[Condition]) -> ConditionFailed:
    """Return the error for conditions that do not all hold."""
    return ConditionFailed(" or ".join(condition.failure_message for condition in conditions[:4]))


TOO_MANY: Final = (
    f"the transaction has more conditions or operations than {{name}} takes; operations_max is {OPERATIONS_MAX} "
    f"(etcd's --max-txn-ops is 128): split it"
)


class FailureKind(Enum):
    """The kinds of failures of requests that the client handles itself."""

    UNDONE = "it was not done, and may be tried again"
    DOUBT = "it may have been done"
    TOKEN = "the token is no longer valid"  # noqa: S105  not a password
    COMPACTED = "that revision is no longer kept"
    LEASE_EXISTS = "there is such a lease already"
    NO_AUTHENTICATION = "nobody needs to log in"
    REOPEN = "the watch is to be opened again, and nothing is wrong with the member"


class Failure(Exception):
    """A failed attempt at a request; `trouble`: why, and whether etcd may have done it; `silent`: no answer came."""

    def __init__(self, reason: str, trouble: FailureKind, *, silent: bool = False) -> None:
        super().__init__(reason)
        self.trouble = trouble
        self.silent = silent


class NoSpace(LimitExceeded):
    """The cluster has reached its quota."""


_DENIED = (AuthenticationError, "{name} does not permit this user to do that; grant its role the prefix, readwrite")
_TOO_LARGE = (
    "the request is larger than {name} takes, 1.5 MiB unless --max-request-bytes says otherwise: store less at once, "
    "or a reference to it"
)
_NO_SPACE = (
    "nothing was written, because {name} has reached its quota (NOSPACE, --quota-backend-bytes); "
    "compact and defragment it, then run etcdctl alarm disarm; reading goes on"
)

_TELLING: Final[tuple[tuple[str, FailureKind | tuple[type[StoreError], str]], ...]] = (
    ("invalid auth token", FailureKind.TOKEN),
    ("revision of auth store is old", FailureKind.TOKEN),
    ("revision in header is old", FailureKind.TOKEN),  # the token, a JWT, is older than a change of users or roles
    ("user name is empty", FailureKind.TOKEN),  # no login before
    ("authentication is not enabled", FailureKind.NO_AUTHENTICATION),
    ("lease already exists", FailureKind.LEASE_EXISTS),
    ("has been compacted", FailureKind.COMPACTED),
    # With the next four messages, etcd has not begun to carry out the request.
    ("no leader", FailureKind.UNDONE),
    ("too many requests", FailureKind.UNDONE),
    ("raft proposal dropped", FailureKind.UNDONE),
    ("not capable", FailureKind.UNDONE),
    ("lease not found", (LeaseNotFound, "the lease has lapsed or was revoked at {name}; grant a new one")),
    ("database space exceeded", (NoSpace, _NO_SPACE)),
    ("too many operations", (LimitExceeded, TOO_MANY)),
    ("request is too large", (LimitExceeded, _TOO_LARGE)),
    ("larger than max", (LimitExceeded, _TOO_LARGE)),
    ("invalid user id or password", (AuthenticationError, "{name} refused the user or the password")),
    ("permission denied", _DENIED),
)
"""The meaning of etcd's messages: a kind that the client handles, or an error for the caller, with its sentence."""

INVALID, DENIED, UNAUTHENTICATED = 3, 7, 16  # codes of gRPC


def classify_error(code: int, message: str, *, name: str) -> FailureKind | StoreError:
    """Return the error for a refusal by etcd, or its `FailureKind` if the client handles it."""
    words = message.lower()
    meaning = next((meaning for telling, meaning in _TELLING if telling in words), None)
    if meaning is None and code == DENIED:
        meaning = _DENIED
    if isinstance(meaning, tuple):
        kind, sentence = meaning
        return kind(sentence.format(name=name))
    if meaning is None and code == INVALID:
        return StoreUsageError(f"{name} refused the request: {message}")
    return meaning or (FailureKind.TOKEN if code == UNAUTHENTICATED else FailureKind.DOUBT)
