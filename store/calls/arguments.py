"""What the named calls of a store make of their arguments, and of its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from store.errors import StoreUsageError
from store.messages import CompareAndSet, Guarded, Request, Response

if TYPE_CHECKING:
    from collections.abc import Iterable

    from store.messages import Condition, Entry, KeyGroup, Note

__all__ = [
    "Entries",
    "KeyGroups",
    "Keys",
    "LeaseLike",
    "MaybeEntries",
    "Notes",
    "compare_and_set",
    "entries_of",
    "guarded",
    "id_of",
    "keys_of",
]

R = TypeVar("R", bound=Response)
Keys: TypeAlias = "Iterable[str]"
Entries: TypeAlias = "list[Entry]"  # inside the classes below, `list` is a method
KeyGroups: TypeAlias = "list[KeyGroup]"
Notes: TypeAlias = "list[Note]"
MaybeEntries: TypeAlias = "list[Entry | None]"


class LeaseLike(Protocol):
    """Anything that knows the id of a lease."""

    @property
    def id(self) -> int:
        """The id that the store gave it."""
        ...


def id_of(lease: LeaseLike | int | None) -> int | None:
    """Return the id of a lease that may be given as that, or as itself."""
    return lease if lease is None or isinstance(lease, int) else lease.id


def guarded(request: Request[R], when: Iterable[Condition]) -> Request[R]:
    """Return the request on these conditions, if there are any."""
    conditions = tuple(when)
    return Guarded(when=conditions, request=request) if conditions else request


def compare_and_set(
    key: str,
    value: bytes,
    expected_revision: int | None,
    expected_value: bytes | None,
    ttl: float | None,
    lease: LeaseLike | int | None,
) -> CompareAndSet:
    """Return the request, if it has exactly one expectation."""
    if (expected_revision is None) == (expected_value is None):
        raise StoreUsageError(
            f"compare_and_set of {key!r} takes exactly one of expected_revision and expected_value, "
            f"not {'both' if expected_value is not None else 'neither'}"
        )
    return CompareAndSet(
        key=key,
        value=value,
        expected_revision=expected_revision,
        expected_value=expected_value,
        ttl=ttl,
        lease=id_of(lease),
    )


def keys_of(keys: Iterable[str]) -> tuple[str, ...]:
    """Return several keys; refuse one string, which would be taken for its letters."""
    if isinstance(keys, str):
        raise StoreUsageError(f"{keys!r} is one key where several are taken: write [{keys!r}]")
    return tuple(keys)


def entries_of(entries: Iterable[Entry | None]) -> list[Entry]:
    """Return the entries of a listing in which none can be missing."""
    return [entry for entry in entries if entry is not None]
