"""Pure: our requests in etcd's words, and etcd's answers in ours; and where an etcd cluster is, as a URL.

etcd's JSON gateway writes bytes as base64 and 64-bit numbers as strings, and leaves out whatever is zero, false or
empty: no `succeeded` means false, no `type` means a put, no `kvs` means that there is nothing.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

from store.errors import (
    AuthenticationError,
    ConditionFailed,
    LeaseNotFound,
    LimitExceeded,
    StoreError,
    StoreUsageError,
)
from store.messages import Condition, Entry, Event, Target
from store.net.address import host_and_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "OPERATIONS_MAX",
    "Cluster",
    "FailureKind",
    "Json",
    "NoSpace",
    "Span",
    "broken",
    "classify",
    "compare",
    "entry_in",
    "entry_of",
    "events_of",
    "range_of",
    "span_of",
    "spans",
    "text",
    "watch_request",
]

Json: TypeAlias = "dict[str, Any]"
Span: TypeAlias = tuple[bytes, bytes]
"""The keys from the first, up to but without the second."""

DEFAULT_PORT: Final = 2379

OPERATIONS_MAX: Final = 126
"""etcd takes 128 (`--max-txn-ops`), counting what is nested; one is the condition on the receipt, one its writing."""

# ---------------------------------------------------------------------------------------------------- where it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The members of an etcd cluster that a client may ask, and whether TLS is spoken there."""

    hosts: tuple[tuple[str, int], ...]
    secure: bool = False

    def __str__(self) -> str:
        scheme = "etcds" if self.secure else "etcd"
        return f"{scheme}://{','.join(host_and_port(host, port) for host, port in self.hosts)}"

    @property
    def urls(self) -> tuple[str, ...]:
        """Each member's gateway."""
        scheme = "https" if self.secure else "http"
        return tuple(f"{scheme}://{host_and_port(host, port)}/v3/" for host, port in self.hosts)

    @classmethod
    def parse(cls, url: str) -> Cluster:
        """Return the cluster that a URL names.

        Raises:
            StoreUsageError: It is not the URL of an etcd cluster; the message says what is wrong with it.
        """
        scheme, separator, rest = url.partition("://")
        if scheme not in ("etcd", "etcds") or not separator:
            raise StoreUsageError(f"{url!r} does not start with etcd:// or etcds://")
        authority = rest.removesuffix("/")
        if "@" in authority:  # not shown: what precedes it may be a password
            raise StoreUsageError("the URL's host contains '@'; give user= and password= beside the URL")
        if any(sign in authority for sign in "/?#"):
            raise StoreUsageError(f"{url!r} says more than where a cluster is; write etcd://HOST:PORT,HOST:PORT")
        return cls(hosts=tuple(_host(url, part) for part in authority.split(",")), secure=scheme == "etcds")


def _host(url: str, text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError as error:
        raise StoreUsageError(f"{url!r} is no URL of a cluster: {error}") from None
    if not parts.hostname:
        raise StoreUsageError(f"{url!r} names no host; write etcd://HOST:{DEFAULT_PORT}")
    return parts.hostname, DEFAULT_PORT if port is None else port


# ---------------------------------------------------------------------------------------------------- keys


def text(data: str | bytes) -> str:
    """Bytes as JSON has them."""
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _bytes(encoded: str) -> bytes:
    return base64.b64decode(encoded)


def _end(prefix: bytes) -> bytes:
    """The first key after all that start with a prefix. No byte of UTF-8 is 255, so the last one can be raised."""
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b"\0"  # a zero byte: up to the very last key


def span_of(prefix: str) -> Span:
    """Return the keys that start with a prefix."""
    start = prefix.encode()
    return start or b"\0", _end(start)


def spans(prefix: str, hidden: str) -> tuple[Span, ...]:
    """The keys that start with a prefix, without those that start with `hidden`, which are this client's receipts."""
    first, last = span_of(prefix)
    if not hidden.startswith(prefix):
        return ((first, last),)
    return (first, hidden.encode()), (_end(hidden.encode()), last)


def range_of(span: str | Span, **options: Any) -> Json:
    """A read of one key, or of a span."""
    if isinstance(span, str):
        return {"key": text(span), **options}
    return {"key": text(span[0]), "range_end": text(span[1]), **options}


def entry_of(kv: Json) -> Entry:
    """A key as it stands."""
    return Entry(
        key=_key(kv),
        value=_bytes(kv.get("value", "")),
        create_revision=int(kv.get("create_revision", 0)),
        mod_revision=int(kv.get("mod_revision", 0)),
        lease=int(kv["lease"]) if kv.get("lease", "0") != "0" else None,
    )


def _key(kv: Json) -> str:
    # Others may use the cluster, too, and call their keys what they like.
    return _bytes(kv["key"]).decode(errors="surrogateescape")


def entry_in(response: Json) -> Entry | None:
    """Return what a read of one key found."""
    kvs = response.get("kvs")
    return entry_of(kvs[0]) if kvs else None


# ---------------------------------------------------------------------------------------------------- watches


def watch_request(keys: Iterable[str | Span], *, start_revision: int) -> list[Json]:
    """Watches that share one stream; etcd numbers them as they come."""
    return [{"create_request": range_of(key, start_revision=str(start_revision), progress_notify=True)} for key in keys]


def events_of(result: Json, hidden: str) -> list[list[Event]]:
    """Return the changes in one message of a watch, one list per revision; etcd never splits a revision."""
    batches: list[list[Event]] = []
    for change in result.get("events", ()):
        event = _event(change)
        if event.key.startswith(hidden):
            continue
        if batches and batches[-1][-1].revision == event.revision:
            batches[-1].append(event)
        else:
            batches.append([event])
    return batches


def _event(change: Json) -> Event:
    kv = change["kv"]
    if change.get("type") == "DELETE":
        return Event(kind="delete", revision=int(kv["mod_revision"]), key=_key(kv))
    entry = entry_of(kv)
    return Event(
        kind="put",
        revision=entry.mod_revision,
        key=entry.key,
        value=entry.value,
        create_revision=entry.create_revision,
        lease=entry.lease,
    )


# ---------------------------------------------------------------------------------------------------- conditions


_TARGETS: Final = {
    Target.MOD_REVISION: ("MOD", "mod_revision"),
    Target.CREATE_REVISION: ("CREATE", "create_revision"),
}


def compare(condition: Condition) -> Json:
    """A condition."""
    expected = condition.expected
    match condition.target:
        case Target.EXISTS:
            result = "GREATER" if expected else "EQUAL"  # than the zero that a missing key has
            return {"key": text(condition.key), "target": "CREATE", "result": result, "create_revision": "0"}
        case Target.VALUE:
            assert isinstance(expected, bytes), "a value is compared with bytes"
            return {"key": text(condition.key), "target": "VALUE", "result": "EQUAL", "value": text(expected)}
        case target:
            name, field_name = _TARGETS[target]
            return {"key": text(condition.key), "target": name, "result": "EQUAL", field_name: str(int(expected))}


def broken(conditions: Sequence[Condition]) -> ConditionFailed:
    """Return the error for conditions one of which does not hold."""
    shown = [
        f"{condition.target.name.lower()} of {condition.key!r} is no longer {condition.expected!r:.40}"
        for condition in conditions[:4]
    ]
    return ConditionFailed(" or ".join(shown))


# ---------------------------------------------------------------------------------------------------- refusals


class FailureKind(Enum):
    """What a refusal means, where it is not simply an error for the caller."""

    UNDONE = "it was not done, and may be tried again"
    DOUBT = "it may have been done"
    TOKEN = "the token is no longer valid"  # noqa: S105  that is no password
    COMPACTED = "that revision is no longer kept"
    LEASE_EXISTS = "there is such a lease already"
    NO_AUTHENTICATION = "nobody needs to log in"


class NoSpace(LimitExceeded):
    """The cluster has reached its quota."""


_TELLING: Final[tuple[tuple[str, FailureKind], ...]] = (
    ("invalid auth token", FailureKind.TOKEN),
    ("revision of auth store is old", FailureKind.TOKEN),
    ("authentication is not enabled", FailureKind.NO_AUTHENTICATION),
    ("lease already exists", FailureKind.LEASE_EXISTS),
    ("has been compacted", FailureKind.COMPACTED),
    # etcd says these before it has proposed anything.
    ("no leader", FailureKind.UNDONE),
    ("too many requests", FailureKind.UNDONE),
    ("raft proposal dropped", FailureKind.UNDONE),
    ("not capable", FailureKind.UNDONE),
)

INVALID, NOT_FOUND, DENIED, UNAUTHENTICATED = 3, 5, 7, 16
"""Codes of gRPC."""


def classify(code: int, message: str, *, name: str) -> FailureKind | StoreError:
    """Return what a refusal by etcd means: an error for the caller, or something that the client deals with.

    Args:
        code: That of gRPC.
        message: etcd's.
        name: The cluster's.
    """
    words = message.lower()
    for telling, trouble in _TELLING:
        if telling in words:
            return trouble
    if code == UNAUTHENTICATED:
        return FailureKind.TOKEN
    if "lease not found" in words:
        return LeaseNotFound(f"the lease has lapsed or was revoked at {name}; grant a new one")
    if "database space exceeded" in words:
        return NoSpace(
            f"nothing can be written now, and nothing was: {name} has reached its quota (NOSPACE, "
            f"--quota-backend-bytes); compact and defragment it, then run etcdctl alarm disarm; reading goes on"
        )
    if "too many operations" in words:
        return LimitExceeded(
            f"the transaction has more conditions or operations than {name} takes; operations_max is {OPERATIONS_MAX} "
            f"(etcd's --max-txn-ops is 128): split it"
        )
    if "request is too large" in words or "larger than max" in words:
        return LimitExceeded(
            f"the request is larger than {name} takes, 1.5 MiB unless --max-request-bytes says otherwise ({message}): "
            f"store less at once, or a reference to it"
        )
    if "user name is empty" in words:
        return AuthenticationError(f"{name} wants a user, and none was given: pass user= and password=")
    if "invalid user id or password" in words:
        return AuthenticationError(f"{name} refused the user or the password")
    if code == DENIED or "permission denied" in words:
        return AuthenticationError(f"{name} does not permit this user to do that; grant its role the prefix, readwrite")
    if code == INVALID:
        return StoreUsageError(f"{name} refused the request: {message}")
    return FailureKind.DOUBT
