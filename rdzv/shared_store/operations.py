"""Pure: the `torch.distributed.Store` API over one round's keys, each operation a plan.

A *plan* is a generator that yields requests to a store, is sent their responses, and returns the operation's result.
The async and the blocking store of a round drive the same plans, so the twins cannot differ. `fencing` stands between
a plan and whoever drives it, and has each request done only while this node is a member of the round.

    <prefix>k/<key>               a value; or the mark of a queue, for as long as that holds anything
    <prefix>q/<key>/<unique>      one item of a queue; "/" and "%" in the key are percent-encoded
    <prefix>b/<key>/<rank>        a member that has come to a barrier and not gone on, so that the others can be named

A queue's order is that of its items' create_revisions. Every push writes the item and the mark in one transaction; the
pop of the last item deletes both, on condition that the mark has not been written since that item was: so the mark is
there exactly while there are items, and it is what `wait`, `check` and a blocking `queue_pop` look at. Nothing is
polled. To PyTorch, what comes of using one key for a queue and for a value is "unexpected"; here a queue refuses it.

Each item goes to one popper, since its deletion is conditional on its being there. Who loses that race takes the next.
A push wakes everyone who waits for it: meant for tens of poppers, not for thousands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from rdzv.config.config_errors import shown
from rdzv.errors import QueueEmptyError, SharedStoreTimeoutError
from rdzv.shared_store.arguments import key_of, keys_of, many_of, value_of, whole_of
from rdzv.shared_store.fencing import NAMED_MAX, QUEUES, VALUES, OutOfTime
from store import when
from store.messages import (
    Add,
    Added,
    Append,
    CompareAndSet,
    CompareAndSetResult,
    Count,
    Counted,
    Delete,
    Entry,
    Found,
    Get,
    List,
    Listing,
    Put,
    Transact,
    TransactionResult,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rdzv.shared_store.company import Company
    from rdzv.shared_store.fencing import Plan

__all__ = ["Plans"]

MARK: Final = b"\x00queue"
"""What a queue's key holds. No text and no number begins with a zero byte."""

ADD_MAX: Final = 2**63 - 1
"""What the store, and PyTorch's, counts in."""


class Plans:
    """The plans for one round's store.

    Args:
        prefix: What all its keys begin with.
        lease: The lease that everything written goes with, if any: the run's own.
        unique: Makes names that nobody else makes.
        company: Who this member is, and among whom, if it is to be named to those who wait for it.
    """

    def __init__(
        self,
        *,
        prefix: str,
        lease: int | None = None,
        unique: Callable[[], str],
        company: Company | None = None,
    ) -> None:
        self._company = company
        self._prefix = prefix
        self._values = prefix + VALUES
        self._queues = prefix + QUEUES
        self._lease = lease
        self._unique = unique

    # ------------------------------------------------------------------------------------------ values

    def set(self, key: str, value: str | bytes) -> Plan[None]:
        """Write a value."""
        yield Put(self._value_key(key), value_of(value), None, self._lease)

    def get(self, key: str) -> Plan[bytes]:
        """Wait for a key and read it."""
        held = (self._value_key(key),)
        try:
            listing: Listing = yield Wait(keys=held)
        except OutOfTime as late:
            (value,) = yield from self._found_late((key,), held, late)
            return value
        (entry,) = listing.entries
        assert entry is not None, "a wait is answered when its keys exist"
        return entry.value

    def multi_get(self, keys: Iterable[str]) -> Plan[list[bytes]]:
        """Wait for all keys and read them, at one revision."""
        names = keys_of(keys)
        held = tuple(map(self._value_key, names))
        try:
            listing: Listing = yield Wait(keys=held)
        except OutOfTime as late:
            return (yield from self._found_late(names, held, late))
        return [entry.value for entry in listing.entries if entry is not None]

    def _found_late(self, names: tuple[str, ...], held: tuple[str, ...], late: OutOfTime) -> Plan[list[bytes]]:
        """Return what the keys hold after all, when the time for waiting is over."""
        missing = yield from self._missing(names, held)
        # If none is: they came while we looked, or this was a look without a wait. They may have gone again.
        found = (yield from self._read(held)) if not missing else None
        if found is None:
            raise _waited_in_vain(names, missing or names, late.seconds) from late
        return found

    def wait(self, keys: Iterable[str]) -> Plan[None]:
        """Wait until all keys exist."""
        names = keys_of(keys)
        held = tuple(map(self._value_key, names))
        try:
            yield Wait(keys=held)
        except OutOfTime as late:
            missing = yield from self._missing(names, held)
            if missing:
                raise _waited_in_vain(names, missing, late.seconds) from late

    def check(self, keys: Iterable[str]) -> Plan[bool]:
        """Return whether all keys exist."""
        conditions = tuple(when.exists(self._value_key(key)) for key in keys_of(keys))
        result: TransactionResult = yield Transact(when=conditions, then=())
        return result.succeeded

    def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> Plan[None]:
        """Write several values at one revision; of a key that is named twice, the last one."""
        names = keys_of(keys)
        contents = [value_of(value) for value in many_of(values, "values")]
        if len(names) != len(contents):
            raise ValueError(f"multi_set has {len(names)} keys and {len(contents)} values; give one value for each key")
        writes = {self._value_key(key): value for key, value in zip(names, contents, strict=True)}
        yield Transact(when=(), then=tuple(Put(key, value, lease=self._lease) for key, value in writes.items()))

    def add(self, key: str, amount: int) -> Plan[int]:
        """Add to a number, a missing key counting from 0."""
        number = whole_of(amount, "amount")
        if abs(number) > ADD_MAX:
            raise ValueError(f"the amount {shown(number)} does not fit in 64 bits, which is what the store counts in")
        added: Added = yield Add(self._value_key(key), number, self._lease)
        return added.value

    def append(self, key: str, value: str | bytes) -> Plan[None]:
        """Append to a value, a missing key counting as empty."""
        yield Append(self._value_key(key), value_of(value), self._lease)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> Plan[bytes]:
        """Write a value if the key holds what is expected; an empty expectation also fits a key that is missing."""
        held, wanted, new = self._value_key(key), value_of(expected), value_of(desired)
        may_create = not wanted
        while True:
            # Whichever of the two fails for the other's reason is followed by the other. What is answered at last
            # was true at one moment, that of the last request.
            if may_create:
                request = CompareAndSet(key=held, value=new, expected_revision=0, lease=self._lease)
            else:
                request = CompareAndSet(key=held, value=new, expected_value=wanted, lease=self._lease)
            result: CompareAndSetResult = yield request
            if result.succeeded:
                return new
            if result.entry is None and wanted:
                return wanted
            if result.entry is not None and result.entry.value != wanted:
                return result.entry.value
            may_create = result.entry is None

    def delete_key(self, key: str) -> Plan[bool]:
        """Delete a key; whether it was there."""
        counted: Counted = yield Delete(self._value_key(key))
        return counted.count > 0

    def list_keys(self) -> Plan[list[str]]:
        """Return the keys that hold values; as in PyTorch, queues are not among them."""
        listing: Listing = yield List(prefix=self._prefix, keys_only=True)
        keys = [entry.key for entry in listing.entries if entry is not None]
        queues = {_escaped_key_of(key, self._queues) for key in keys if key.startswith(self._queues)}
        values = (key.removeprefix(self._values) for key in keys if key.startswith(self._values))
        return [key for key in values if _escaped(key) not in queues]

    def num_keys(self) -> Plan[int]:
        """Return how many keys hold values."""
        return len((yield from self.list_keys()))

    def _missing(self, names: tuple[str, ...], held: tuple[str, ...]) -> Plan[tuple[str, ...]]:
        """Return which of the keys do not exist, without reading the others' values; all, if the store does not say."""
        if not held:
            return ()
        try:
            listing: Listing = yield List(prefix=_common_prefix(held), keys_only=True)
        except OutOfTime:
            return names
        there = {entry.key for entry in listing.entries if entry is not None}
        return tuple(dict.fromkeys(name for name, key in zip(names, held, strict=True) if key not in there))

    def _read(self, held: tuple[str, ...]) -> Plan[list[bytes] | None]:
        """Return what the keys hold at one revision, or None if they do not all exist."""
        distinct = tuple(dict.fromkeys(held))
        result: TransactionResult = yield Transact(
            when=tuple(map(when.exists, distinct)), then=tuple(map(Get, distinct))
        )
        if not result.succeeded:
            return None
        found = {entry.key: entry.value for entry in result.results if isinstance(entry, Entry)}
        return [found[key] for key in held]

    # ------------------------------------------------------------------------------------------ queues

    def queue_push(self, key: str, value: str | bytes) -> Plan[None]:
        """Append an item to a queue."""
        mark = self._value_key(key)
        item = Put(self._queue_prefix(key) + self._unique(), value_of(value), lease=self._lease)
        writes = item, Put(mark, MARK, lease=self._lease)
        starts = True  # whether this is thought to be its first item; if that is wrong, nothing happens
        while True:
            condition = when.missing(mark) if starts else when.value(mark) == MARK
            result: TransactionResult = yield Transact(when=(condition,), then=writes, otherwise=(Get(mark),))
            if result.succeeded:
                return
            (there,) = result.results
            if isinstance(there, Entry) and there.value != MARK:
                raise _no_queue(key)
            starts = there is None

    def queue_pop(self, key: str, block: bool = True) -> Plan[bytes]:
        """Take the first item of a queue; with `block`, wait until there is one."""
        mark, prefix = self._value_key(key), self._queue_prefix(key)
        while True:
            listing: Listing = yield List(prefix=prefix, keys_only=True)
            items = sorted(filter(None, listing.entries), key=lambda item: item.create_revision)
            for item in items:
                # Those before it have been seen to be gone, and none comes back: it is the first.
                popped = yield from self._pop(item, mark, is_last=item is items[-1])
                if popped is not None:
                    return popped
            if not items and not block:
                raise QueueEmptyError(f"the queue {shown(key)} is empty; pass block=True to wait for an item")
            if not items:
                yield from self._wait_for_push(key, mark)

    def queue_len(self, key: str) -> Plan[int]:
        """Return how many items a queue holds; 0 if there is no such queue."""
        counted: Counted = yield Count(prefix=self._queue_prefix(key))
        return counted.count

    def _pop(self, item: Entry, mark: str, *, is_last: bool) -> Plan[bytes | None]:
        """Take this item; None if somebody else has taken it, or the queue has to be looked at again."""
        unchanged = when.mod_revision(item.key) == item.mod_revision
        take = Get(item.key), Delete(item.key)
        if not is_last:
            result: TransactionResult = yield Transact(when=(unchanged,), then=take)
            return _taken(result)
        untouched = when.mod_revision(mark) == item.mod_revision
        look = Get(item.key), Get(mark)
        result = yield Transact(when=(unchanged, untouched), then=(*take, Delete(mark)), otherwise=look)
        if result.succeeded:
            return _taken(result)
        still_there, there = result.results
        if still_there is None:
            return None
        # Others have pushed since, or the key was set or deleted as if it were a value's: the mark is not ours.
        seen = when.mod_revision(mark) == (there.mod_revision if isinstance(there, Entry) else 0)
        result = yield Transact(when=(unchanged, seen), then=take)
        return _taken(result)

    def _wait_for_push(self, key: str, mark: str) -> Plan[None]:
        try:
            listing: Listing = yield Wait(keys=(mark,))
        except OutOfTime as late:
            raise SharedStoreTimeoutError(
                f"nothing was pushed to the queue {shown(key)} within {late.seconds:g} s",
                keys=(key,),
                timeout=late.seconds,
            ) from late
        if any(entry is not None and entry.value != MARK for entry in listing.entries):
            raise _no_queue(key)

    # ------------------------------------------------------------------------------------------ barrier

    def barrier(self, key: str, world_size: int) -> Plan[None]:
        """Wait until so many have called it with this key. Who is the last to leave deletes what it was kept in."""
        members, last = f"{key}/num_members", f"{key}/last_member"
        size = whole_of(world_size, "world_size")
        if size < 1:
            raise ValueError(f"world_size={size} must be at least 1: whoever calls barrier is one of them")
        came, mark = yield from self._come_to_barrier(key, members)
        if came >= size:
            opened: TransactionResult = yield Transact(
                when=(),
                then=(
                    Put(self._value_key(last), b"1", lease=self._lease),
                    Add(self._value_key(members), -1, self._lease),
                    *mark,
                ),
                otherwise=(),
            )
            yield from self._leave_barrier(members, last, int(cast("int", opened.results[1])))
            return
        try:
            yield Wait(keys=(self._value_key(last),))
        except OutOfTime as late:
            found: Found = yield Get(self._value_key(members))
            there = found.entry.value.decode() if found.entry is not None else "none"
            missing = yield from self._missing_at_barrier(key, size, there)
            raise SharedStoreTimeoutError(
                f"the barrier {shown(key)} timed out after {late.seconds:g} s: {there} of {size} came{missing}",
                keys=(last,),
                timeout=late.seconds,
            ) from late
        try:
            left: TransactionResult = yield Transact(
                when=(), then=(Add(self._value_key(members), -1, self._lease), *mark), otherwise=()
            )
            yield from self._leave_barrier(members, last, int(cast("int", left.results[0])))
        except OutOfTime:  # it was passed in time, and what is left goes with the round
            return

    def _come_to_barrier(self, key: str, members: str) -> Plan[tuple[int, tuple[Delete, ...]]]:
        """Count this caller, and say which rank it is; how many have come, and what to delete when it goes."""
        add = Add(self._value_key(members), 1, self._lease)
        if self._company is None:
            added: Added = yield add
            return added.value, ()
        mark = f"{self._came_prefix(key)}{self._company.rank}"
        result: TransactionResult = yield Transact(when=(), then=(add, Put(mark, b"", lease=self._lease)), otherwise=())
        return int(cast("int", result.results[0])), (Delete(mark),)

    def _missing_at_barrier(self, key: str, size: int, there: str) -> Plan[str]:
        """Return who has not come, in words; empty if that is not known."""
        company, prefix = self._company, self._came_prefix(key)
        if company is None:
            return ""
        listing: Listing = yield List(prefix=prefix, keys_only=True)
        came = {entry.key.removeprefix(prefix) for entry in listing.entries if entry is not None}
        if str(len(came)) != there:
            return ""  # several callers of one rank, say: who is missing cannot be told from their ranks
        missing = [rank for rank in range(size) if str(rank) not in came]
        names: dict[int, str] = {}
        for roster in dict.fromkeys(map(company.roster_key, missing[:NAMED_MAX])):
            found: Found = yield Get(roster)
            if found.entry is not None:
                names.update(company.read_roster(found.entry.value))
        return company.describe_missing(missing, names)

    def _came_prefix(self, key: str) -> str:
        return f"{self._prefix}b/{_escaped(key_of(key))}/"

    def _leave_barrier(self, members: str, last: str, inside: int) -> Plan[None]:
        """Delete the two keys of a barrier if nobody is inside any more. They may be many: ten steps a second, say."""
        if inside <= 0:
            nobody_came = (when.value(self._value_key(members)) == b"%d" % inside,)
            both = Delete(self._value_key(members)), Delete(self._value_key(last))
            yield Transact(when=nobody_came, then=both, otherwise=())

    def _value_key(self, key: str) -> str:
        return self._values + key_of(key)

    def _queue_prefix(self, key: str) -> str:
        # Escaped, or the queue "a" would hold the items of the queue "a/b".
        return f"{self._queues}{_escaped(key_of(key))}/"


def _escaped(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")


def _escaped_key_of(item: str, prefix: str) -> str:
    """The queue's key, as it stands in the key of one of its items."""
    return item.removeprefix(prefix).partition("/")[0]


def _common_prefix(keys: Iterable[str]) -> str:
    """Return what all of these begin with."""
    first, last = min(keys), max(keys)
    for at, character in enumerate(first):
        if not last.startswith(character, at):
            return first[:at]
    return first


def _taken(result: TransactionResult) -> bytes | None:
    """The value of the item that a pop has read and deleted; None if it could not."""
    return result.results[0].value if result.succeeded and isinstance(result.results[0], Entry) else None


def _waited_in_vain(names: tuple[str, ...], missing: tuple[str, ...], seconds: float) -> SharedStoreTimeoutError:
    named = ", ".join(map(shown, missing[:NAMED_MAX]))
    more = f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
    of_all = f" ({len(missing)} of {len(names)} keys)" if len(names) > 1 else ""
    return SharedStoreTimeoutError(
        f"wait timed out after {seconds:g} s, still missing: {named}{more}{of_all}", keys=missing, timeout=seconds
    )


def _no_queue(key: str) -> ValueError:
    return ValueError(f"{shown(key)} holds a value that was set, not a queue; give the queue a key of its own")
