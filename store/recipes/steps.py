"""Pure: the recipes themselves, each a generator that yields requests to a store and is sent what they answered.

`awaited` and `blocking` carry them out, so each recipe is written once. A refusal comes as an exception at the `yield`.

Nothing polls. Who waits sends one `Wait` for a key that never comes, guarded by the conditions under which waiting
makes sense: the place ahead still exists, and so does one's own. The store answers with `ConditionFailed` the moment
one of them ceases to hold. Each place is a key on its holder's lease, made once and never made again: its
`create_revision` is the order of arrival, and the fence.

Keys, under the recipe's name: `line/<kind><lease>` for locks and elections, `bell` for elections; `members/<lease>` and
`ready` for a double barrier; `tail`, `items/<number>` and `claims/<number>` for a queue.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from store import when
from store.errors import ConditionFailed, LeaseNotFound, StoreUsageError
from store.messages import (
    CompareAndSet,
    Condition,
    Count,
    Delete,
    Entry,
    Get,
    Guarded,
    List,
    Put,
    Request,
    Transact,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Held",
    "Item",
    "Steps",
    "claim_item",
    "count_items",
    "enter_barrier",
    "finish_item",
    "first_in_line",
    "hold_lock",
    "hold_read_lock",
    "lead",
    "leader_changed",
    "leave_barrier",
    "put_item",
    "take_item",
]

T = TypeVar("T")
Steps: TypeAlias = Generator[Request[Any], Any, T]

CLAIMS_WATCHED = 100
"""Claims that one wait of a queue looks at: an etcd transaction has at most 128 conditions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A place in the store that its holder has until its lease ends.

    Attributes:
        key: Where it is.
        token: Its revision: higher than that of every earlier holder.
        lease: The lease it is on.
    """

    key: str
    token: int
    lease: int

    @property
    def fence(self) -> Condition:
        """The condition that this is still held: for `when=` of a write."""
        return when.create_revision(self.key) == self.token


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item of a queue, claimed by whoever has it.

    Attributes:
        number: Its number; items are numbered from 0 as they were put.
        value: What was put.
        claim: The claim on it; `claim.fence` is for the writes that the item causes.
    """

    number: int
    value: bytes
    claim: Held


def _path(name: str, *parts: str) -> str:
    if not name:
        raise StoreUsageError("the name of a lock, an election, a barrier or a queue is empty; give it one")
    return "/".join([name, *parts])


def _lost(held: Held) -> LeaseNotFound:
    return LeaseNotFound(f"the place {held.key!r} was lost while waiting: its lease has lapsed; come again")


def _until_changed(name: str, conditions: Sequence[Condition]) -> Steps[None]:
    """Wait until one of the conditions does not hold any more."""
    try:
        yield Guarded(when=tuple(conditions), request=Wait(keys=(_path(name, "nothing"),)))
    except ConditionFailed:
        return


def _as_it_is(entry: Entry) -> Condition:
    return when.create_revision(entry.key) == entry.create_revision


def _take_place(key: str, value: bytes, lease: int) -> Steps[Held]:
    result = yield CompareAndSet(key=key, value=value, expected_revision=0, lease=lease)
    if result.entry is None:
        raise LeaseNotFound(f"lease {lease} has lapsed before {key!r} was written; come again")
    return Held(key=key, token=result.entry.create_revision, lease=lease)


# ------------------------------------------------------------------------------------------- locks and elections


def _line(name: str) -> str:
    return _path(name, "line", "")


def _stand_in_line(
    name: str, kind: str, lease: int, value: bytes, ahead: Callable[[Sequence[Entry], str], Entry | None]
) -> Steps[Held]:
    held = yield from _take_place(f"{_line(name)}{kind}{lease:016x}", value, lease)
    while True:
        listing = yield List(prefix=_line(name), keys_only=True)
        line = sorted(listing.entries, key=lambda entry: entry.create_revision)
        before = [entry for entry in line if entry.create_revision < held.token]
        if len(before) == len(line) or line[len(before)].key != held.key:
            raise _lost(held)
        blocking = ahead(before, _line(name))
        if blocking is None:
            return held
        # Only the last of those ahead is waited for: who leaves wakes one, not all.
        yield from _until_changed(name, [held.fence, _as_it_is(blocking)])


def _last(before: Sequence[Entry], line: str) -> Entry | None:
    del line
    return before[-1] if before else None


def _last_writer(before: Sequence[Entry], line: str) -> Entry | None:
    return _last([entry for entry in before if entry.key.startswith(f"{line}w")], line)


def hold_lock(name: str, lease: int, value: bytes = b"") -> Steps[Held]:
    """Wait until all who came earlier have gone, readers included."""
    return _stand_in_line(name, "w", lease, value, _last)


def hold_read_lock(name: str, lease: int, value: bytes = b"") -> Steps[Held]:
    """Wait until all writers who came earlier have gone."""
    return _stand_in_line(name, "r", lease, value, _last_writer)


def first_in_line(name: str) -> Steps[Entry | None]:
    """Return the place of the one whose turn it is, with its value."""
    while True:
        listing = yield List(prefix=_line(name), keys_only=True)
        if not listing.entries:
            return None
        first = min(listing.entries, key=lambda entry: entry.create_revision)
        entry: Entry | None = (yield Get(first.key)).entry
        if entry is not None and entry.create_revision == first.create_revision:
            return entry


def leader_changed(name: str, known: Entry | None) -> Steps[Entry | None]:
    """Wait until another leads than the one that is known, or nobody does."""
    while True:
        if known is not None:
            yield from _until_changed(name, [_as_it_is(known)])
        current = yield from first_in_line(name)
        if known is not None or current is not None:
            return current
        # Nobody leads. Who comes writes a key whose name is not known yet, so this waits for the bell it rings.
        bell = yield Get(_path(name, "bell"))
        current = yield from first_in_line(name)  # it may have come between the two looks
        if current is not None:
            return current
        revision = bell.entry.mod_revision if bell.entry is not None else 0
        yield from _until_changed(name, [when.mod_revision(_path(name, "bell")) == revision])


def _ring_bell(name: str, held: Held) -> Steps[None]:
    """Tell those who watch an election in which nobody leads that somebody does."""
    try:
        yield Guarded(when=(held.fence,), request=Put(_path(name, "bell"), b""))
    except ConditionFailed:
        raise _lost(held) from None


def lead(name: str, lease: int, value: bytes) -> Steps[Held]:
    """Wait to be elected."""
    held = yield from hold_lock(name, lease, value)
    yield from _ring_bell(name, held)
    return held


# ------------------------------------------------------------------------------------------------ double barrier


def enter_barrier(name: str, count: int, lease: int, value: bytes = b"") -> Steps[tuple[Held, Entry]]:
    """Wait until `count` are in; one's place, and the meeting that it belongs to."""
    if count < 1:
        raise StoreUsageError(f"a barrier is for at least 1, not for {count}")
    held = yield from _register(name, lease, value)
    ready_key = _path(name, "ready")
    members = yield List(prefix=_path(name, "members", ""), keys_only=True)
    try:
        if len(members.entries) >= count:
            # Whoever registers last sees all, so somebody always gets here; the first of several makes it ready.
            yield Guarded(when=(held.fence,), request=CompareAndSet(key=ready_key, value=b"", expected_revision=0))
        found = yield Guarded(when=(held.fence,), request=Wait(keys=(ready_key,)))
    except ConditionFailed:
        raise _lost(held) from None
    return held, found.entries[0]


def _register(name: str, lease: int, value: bytes) -> Steps[Held]:
    """Take a place among the members, once the last meeting has been left by all."""
    ready_key = _path(name, "ready")
    key = _path(name, "members", f"{lease:016x}")
    while True:
        result = yield Transact(when=(when.missing(ready_key),), then=(Put(key, value, lease=lease), Get(key)))
        if result.succeeded:
            return Held(key=key, token=result.results[1].create_revision, lease=lease)
        found = yield Get(ready_key)
        if found.entry is not None:
            yield from _until_left(name, found.entry)


def _until_left(name: str, ready: Entry) -> Steps[None]:
    """Wait until all have left one meeting, and take away its sign, also for those who died in it."""
    while True:
        found = yield Get(ready.key)
        if found.entry is None or found.entry.create_revision != ready.create_revision:
            return
        # Nobody registers while the sign is up, so these are members of this meeting.
        members = yield List(prefix=_path(name, "members", ""), keys_only=True)
        try:
            if not members.entries:
                yield Guarded(when=(_as_it_is(ready),), request=Delete(ready.key))
                return
        except ConditionFailed:
            return  # another has done it
        yield from _until_changed(name, [_as_it_is(ready), _as_it_is(members.entries[0])])


def leave_barrier(name: str, held: Held, ready: Entry) -> Steps[None]:
    """Leave one's place and wait until all others have left theirs."""
    yield Delete(held.key)
    yield from _until_left(name, ready)


# --------------------------------------------------------------------------------------------------------- queue


def put_item(name: str, value: bytes) -> Steps[int]:
    """Put an item at the end; its number."""
    tail_key = _path(name, "tail")
    while True:
        found = yield Get(tail_key)
        number, revision = (int(found.entry.value), found.entry.mod_revision) if found.entry else (0, 0)
        # Item and tail go together: a number that was given away, and no item under it, would be waited for for ever.
        result = yield Transact(
            when=(when.mod_revision(tail_key) == revision,),
            then=(Put(_item(name, number), value), Put(tail_key, str(number + 1).encode())),
        )
        if result.succeeded:
            return number


def _item(name: str, number: int) -> str:
    return _path(name, "items", f"{number:020d}")  # so that the order of keys is that of numbers


def _claim(name: str, number: int) -> str:
    return _path(name, "claims", f"{number:020d}")


def _next_item(name: str) -> Steps[tuple[int, Condition]]:
    """Wait for the first item that nobody has claimed; its number, and the condition that it is there."""
    while True:
        # The tail is read first: if an item is put after that, the tail has changed, and the wait below ends at once.
        # Waiting for the next item itself would not do: it may have come, and been taken, before the wait begins.
        tail = (yield Get(_path(name, "tail"))).entry
        claims = (yield List(prefix=_path(name, "claims", ""), keys_only=True)).entries
        items = (yield List(prefix=_path(name, "items", ""), keys_only=True)).entries
        claimed = {entry.key.rpartition("/")[2] for entry in claims}
        free = next((entry for entry in items if entry.key.rpartition("/")[2] not in claimed), None)
        if free is not None:
            return int(free.key.rpartition("/")[2]), _as_it_is(free)
        same_tail = when.mod_revision(_path(name, "tail")) == (tail.mod_revision if tail is not None else 0)
        # A claim that ends makes its item free, or takes it away.
        yield from _until_changed(name, [same_tail, *map(_as_it_is, claims[:CLAIMS_WATCHED])])


def take_item(name: str) -> Steps[bytes]:
    """Take the first item out; who dies after that takes it along."""
    while True:
        number, there = yield from _next_item(name)
        key = _item(name, number)
        result = yield Transact(
            when=(there, when.missing(_claim(name, number))),
            then=(Get(key), Delete(key)),
        )
        if result.succeeded:
            value: bytes = result.results[0].value
            return value


def claim_item(name: str, lease: int) -> Steps[Item]:
    """Claim the first item; the claim goes with the lease, and then the item is free again."""
    while True:
        number, there = yield from _next_item(name)
        claim = _claim(name, number)
        result = yield Transact(
            when=(there, when.missing(claim)),
            then=(Put(claim, b"", lease=lease), Get(claim), Get(_item(name, number))),
        )
        if result.succeeded:
            held = Held(key=claim, token=result.results[1].create_revision, lease=lease)
            return Item(number=number, value=result.results[2].value, claim=held)


def finish_item(name: str, item: Item) -> Steps[None]:
    """Take a claimed item out of the queue, if the claim still holds."""
    result = yield Transact(when=(item.claim.fence,), then=(Delete(_item(name, item.number)), Delete(item.claim.key)))
    if not result.succeeded:
        raise LeaseNotFound(
            f"the claim on item {item.number} of {name!r} has lapsed before it was done; another may have it now"
        )


def count_items(name: str) -> Steps[int]:
    """Count the items that are there, claimed ones included."""
    counted = yield Count(prefix=_path(name, "items", ""))
    number: int = counted.count
    return number
