"""The `torch.distributed.Store` API over one round's keys, for async and blocking stores.

    <prefix>k/<key>               a value, or the mark of a queue that has items
    <prefix>q/<key>/<unique>      one item of a queue; "/" and "%" in the key are percent-encoded
    <prefix>b/<key>/<rank>        a member that waits at a barrier, so that the missing ones can be named

A queue's order is that of its items' create_revisions. Every push writes the item and the mark in one transaction. The
pop of the last item deletes the item and the mark, unless a later push has written the mark. So the mark exists exactly
while the queue has items, and `wait`, `check` and a blocking `queue_pop` need not poll. An item is deleted only if it
still exists, so only one caller gets it. A push wakes all waiting callers of `queue_pop`, so at most tens should wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import islice
from posixpath import commonprefix  # of any texts
from typing import TYPE_CHECKING, Final, NoReturn, cast

from rdzv.config.config_errors import brief
from rdzv.errors import QueueEmptyError
from rdzv.shared_store.arguments import iterable_as_tuple, valid_int, valid_key, valid_keys, valid_value
from rdzv.shared_store.fencing import NAMED_MAX, QUEUES, VALUES, OutOfTimeError, names_in_words
from store import when
from store.messages import (
    Add,
    Append,
    CompareAndSet,
    Count,
    Delete,
    Entry,
    Get,
    GetMany,
    List,
    Put,
    Transact,
    TransactionResult,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from rdzv.shared_store.fencing import AbsenteeNames, FencedCall, MembershipQueries
    from store.messages import Operation

PREFIX_MAX: Final = 4096  # characters of a listed prefix; a longer common prefix is cut
MARK: Final = b"\x00queue"  # the value of a queue's mark; no text or number begins with a zero byte
ADD_MAX: Final = 2**63 - 1  # the largest number that this store, and PyTorch's, can count to


class RoundKeys(ABC):
    """Makes the keys of a round's store, and a `FencedCall` for each operation."""

    prefix: str
    lease: int | None
    _company: MembershipQueries

    @abstractmethod
    def _new_fenced_call(self, timeout: timedelta | float | None = None) -> FencedCall: ...

    @abstractmethod
    def _new_queue_item_name(self) -> str: ...

    def _value_key(self, key: str) -> str:
        return self.prefix + VALUES + valid_key(key)

    def _queue_prefix(self, key: str) -> str:
        # The key is escaped: otherwise the queue "a" would have the items of the queue "a/b".
        return f"{self.prefix}{QUEUES}{_escape_slashes(valid_key(key))}/"


class Operations(RoundKeys):
    """The methods of `torch.distributed.Store` that make requests."""

    async def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        await self._new_fenced_call()(Put(self._value_key(key), valid_value(value), None, self.lease))

    async def get(self, key: str) -> bytes:
        """Wait for a key, and read it."""
        (value,) = await _wait_and_get_all(self._new_fenced_call(), (key,), (self._value_key(key),))
        return value

    async def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        """Wait for all keys, and read them at one revision."""
        names = valid_keys(keys)
        return await _wait_and_get_all(self._new_fenced_call(), names, tuple(map(self._value_key, names)))

    async def wait(self, keys: Iterable[str], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys exist."""
        names = valid_keys(keys)
        held = tuple(map(self._value_key, names))
        ask = self._new_fenced_call(timeout)
        try:
            await ask(Wait(keys=held))
        except OutOfTimeError:
            missing = await _find_missing(ask, names, held)
            if missing:
                _raise_timeout(ask, names, missing)

    async def check(self, keys: Iterable[str]) -> bool:
        """Return True if all keys exist now."""
        conditions = tuple(when.exists(self._value_key(key)) for key in valid_keys(keys))
        return (await self._new_fenced_call()(Transact(when=conditions, then=()))).succeeded

    async def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> None:
        """Write several values at once; the last value of a repeated key counts."""
        names = valid_keys(keys)
        contents = [valid_value(value) for value in iterable_as_tuple(values, "values")]
        if len(names) != len(contents):
            raise ValueError(f"multi_set has {len(names)} keys and {len(contents)} values; give one value for each key")
        writes = {self._value_key(key): value for key, value in zip(names, contents, strict=True)}
        puts = tuple(Put(key, value, lease=self.lease) for key, value in writes.items())
        await self._new_fenced_call()(Transact(when=(), then=puts))

    async def add(self, key: str, amount: int) -> int:
        """Add to a key's decimal number, or to 0 if the key is missing; return the sum."""
        number = valid_int(amount, "amount")
        if abs(number) > ADD_MAX:
            raise ValueError(f"the amount {brief(number)} does not fit in the store's 64 bits")
        return (await self._new_fenced_call()(Add(self._value_key(key), number, self.lease))).value

    async def append(self, key: str, value: str | bytes) -> None:
        """Append to a key's value; a missing key counts as empty."""
        await self._new_fenced_call()(Append(self._value_key(key), valid_value(value), self.lease))

    async def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write the desired value if the key holds the expected one, or is missing and the expected one is empty.

        Return the key's value after the call; the expected value if the key is missing.
        """
        held, wanted, new = self._value_key(key), valid_value(expected_value), valid_value(desired_value)
        ask = self._new_fenced_call()
        may_create = not wanted
        while True:
            # One request creates the key, the other replaces its value: if one fails, try the other.
            if may_create:
                request = CompareAndSet(key=held, value=new, expected_revision=0, lease=self.lease)
            else:
                request = CompareAndSet(key=held, value=new, expected_value=wanted, lease=self.lease)
            result = await ask(request)
            if result.succeeded:
                return new
            if result.entry is None and wanted:
                return wanted
            if result.entry is not None and result.entry.value != wanted:
                return result.entry.value
            may_create = result.entry is None

    async def delete_key(self, key: str) -> bool:
        """Delete a key; return True if it existed."""
        return (await self._new_fenced_call()(Delete(self._value_key(key)))).count > 0

    async def list_keys(self) -> list[str]:
        """Return this round's keys that hold values, sorted; as in PyTorch, without queues."""
        return await _list_value_keys(self._new_fenced_call(), self.prefix)

    async def num_keys(self) -> int:
        """Return the number of this round's keys that hold values."""
        return len(await _list_value_keys(self._new_fenced_call(), self.prefix))

    async def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to a queue."""
        mark = self._value_key(key)
        item = Put(self._queue_prefix(key) + self._new_queue_item_name(), valid_value(value), lease=self.lease)
        writes = item, Put(mark, MARK, lease=self.lease)
        ask = self._new_fenced_call()
        starts = True  # assume an empty queue; otherwise the transaction writes nothing
        while True:
            condition = when.missing(mark) if starts else when.value(mark) == MARK
            result = await ask(Transact(when=(condition,), then=writes, otherwise=(Get(mark),)))
            if result.succeeded:
                return
            (there,) = result.results
            if isinstance(there, Entry) and there.value != MARK:
                raise _not_a_queue_error(key)
            starts = there is None

    async def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first item of a queue. If the queue is empty, wait, or without `block` raise `QueueEmptyError`."""
        mark, prefix = self._value_key(key), self._queue_prefix(key)
        ask = self._new_fenced_call()
        while True:
            listing = await ask(List(prefix=prefix, keys_only=True))
            items = sorted(filter(None, listing.entries), key=lambda item: item.create_revision)
            for item in items:
                # All earlier items have been taken by now, so this item is the queue's first.
                popped = await _pop_queue_item(ask, item, mark, is_last=item is items[-1])
                if popped is not None:
                    return popped
            if not items and not block:
                raise QueueEmptyError(f"the queue {brief(key)} is empty; pass block=True to wait for an item")
            if not items:
                await _wait_for_push(ask, key, mark)

    async def queue_len(self, key: str) -> int:
        """Return the number of items in a queue, 0 if it does not exist."""
        return (await self._new_fenced_call()(Count(prefix=self._queue_prefix(key)))).count

    async def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait for `world_size` callers of this barrier. Each key serves one barrier; timed-out callers still count."""
        members, last = self._value_key(f"{key}/num_members"), self._value_key(f"{key}/last_member")
        size = valid_int(world_size, "world_size")
        if size < 1:
            raise ValueError(f"world_size={size} must be at least 1: the caller of barrier counts")
        roster, came = self._company.roster, f"{self.prefix}b/{_escape_slashes(valid_key(key))}/"
        marks = [f"{came}{roster.rank}"] if roster is not None else []
        come: tuple[Operation, ...] = (
            Add(members, 1, self.lease),
            *(Put(mark, b"", lease=self.lease) for mark in marks),
        )
        go: tuple[Operation, ...] = Add(members, -1, self.lease), *map(Delete, marks)
        ask = self._new_fenced_call(timeout)
        is_last = (await _transact_and_get_sum(ask, come)) >= size
        if not is_last:
            try:
                await ask(Wait(keys=(last,)))
            except OutOfTimeError:
                found, is_over = (await ask(GetMany(keys=(members, last)))).entries
                if is_over is None:  # the key `last` is missing, so not all callers have come
                    there = found.value.decode() if found is not None else "none"
                    missing = await _name_missing_ranks(ask, roster, came, size, there) if roster is not None else ""
                    text = f"the barrier {brief(key)} timed out after {ask.seconds:g} s: {there} of {size} came"
                    ask.raise_timeout_or_loss(text + missing, keys=(f"{key}/last_member",))
        try:
            inside = await _transact_and_get_sum(ask, (*go, Put(last, b"1", lease=self.lease)) if is_last else go)
            if inside <= 0:  # the last caller to leave deletes the keys, as programs may use many barriers
                nobody_came = (when.value(members) == b"%d" % inside,)
                await ask(Transact(when=nobody_came, then=(Delete(members), Delete(last))))
        except OutOfTimeError:
            if is_last:
                raise
            # Only this call's exit timed out: all callers had come, so this call succeeds.


async def _wait_and_get_all(ask: FencedCall, names: tuple[str, ...], held: tuple[str, ...]) -> list[bytes]:
    try:
        return [entry.value for entry in (await ask(Wait(keys=held))).entries if entry is not None]
    except OutOfTimeError:
        missing = await _find_missing(ask, names, held)
        # If none is missing, all were written late; None: one was deleted again.
        found = None if missing else await _read_values(ask, held)
        if found is None:
            _raise_timeout(ask, names, missing or names)
        return found


async def _find_missing(ask: FencedCall, names: tuple[str, ...], held: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys that do not exist, or all keys if there is no time to ask."""
    if not held:
        return ()
    try:
        there = set(await _list_keys_under(ask, commonprefix((min(held)[:PREFIX_MAX], max(held)))))
    except OutOfTimeError:
        return names
    return tuple(dict.fromkeys(name for name, key in zip(names, held, strict=True) if key not in there))


async def _read_values(ask: FencedCall, held: tuple[str, ...]) -> list[bytes] | None:
    """Return the keys' values at one revision, or None if some do not exist."""
    distinct = tuple(dict.fromkeys(held))
    result = await ask(Transact(when=tuple(map(when.exists, distinct)), then=tuple(map(Get, distinct))))
    if not result.succeeded:
        return None
    found = {entry.key: entry.value for entry in result.results if isinstance(entry, Entry)}
    return [found[key] for key in held]


async def _pop_queue_item(ask: FencedCall, item: Entry, mark: str, *, is_last: bool) -> bytes | None:
    """Take this item; return None if another caller took it, or if the queue must be read again."""
    unchanged = when.mod_revision(item.key) == item.mod_revision
    take = Get(item.key), Delete(item.key)
    if not is_last:
        return _popped_value(await ask(Transact(when=(unchanged,), then=take)))
    untouched = when.mod_revision(mark) == item.mod_revision
    look = Get(item.key), Get(mark)
    result = await ask(Transact(when=(unchanged, untouched), then=(*take, Delete(mark)), otherwise=look))
    if result.succeeded:
        return _popped_value(result)
    still_there, there = result.results
    if still_there is None:
        return None
    # The mark was written after this item, by a later push or by `set`, or was deleted: take only the item.
    seen = when.mod_revision(mark) == (there.mod_revision if isinstance(there, Entry) else 0)
    return _popped_value(await ask(Transact(when=(unchanged, seen), then=take)))


async def _wait_for_push(ask: FencedCall, key: str, mark: str) -> None:
    try:
        listing = await ask(Wait(keys=(mark,)))
    except OutOfTimeError:
        message = f"nothing was pushed to the queue {brief(key)} within {ask.seconds:g} s"
        ask.raise_timeout_or_loss(message, keys=(key,))
    if any(entry is not None and entry.value != MARK for entry in listing.entries):
        raise _not_a_queue_error(key)


def _escape_slashes(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")


async def _list_keys_under(ask: FencedCall, prefix: str) -> list[str]:
    return [entry.key for entry in (await ask(List(prefix=prefix, keys_only=True))).entries if entry is not None]


async def _list_value_keys(ask: FencedCall, prefix: str) -> list[str]:
    values, queues = prefix + VALUES, prefix + QUEUES
    keys = await _list_keys_under(ask, prefix)
    of_queues = {key.removeprefix(queues).partition("/")[0] for key in keys if key.startswith(queues)}
    of_values = [key.removeprefix(values) for key in keys if key.startswith(values)]
    return [key for key in of_values if _escape_slashes(key) not in of_queues]


async def _name_missing_ranks(ask: FencedCall, roster: AbsenteeNames, came_prefix: str, size: int, there: str) -> str:
    came = {key.removeprefix(came_prefix) for key in await _list_keys_under(ask, came_prefix)}
    if str(len(came)) != there:
        return ""  # the missing ranks are unknown: for example, one rank has called twice
    # Stop early: a wrong `size` may be huge.
    missing = list(islice((rank for rank in range(size) if str(rank) not in came), NAMED_MAX))
    names: dict[int, str] = {}
    for bucket in dict.fromkeys(map(roster.key, missing)):
        found = (await ask(Get(bucket))).entry
        if found is not None:
            names.update(roster.read(found.value))
    return roster.describe_missing(missing, names, more=size - len(came) - len(missing))


async def _transact_and_get_sum(ask: FencedCall, operations: tuple[Operation, ...]) -> int:
    return cast("int", (await ask(Transact(when=(), then=operations))).results[0])


def _popped_value(result: TransactionResult) -> bytes | None:
    return result.results[0].value if result.succeeded and isinstance(result.results[0], Entry) else None


def _raise_timeout(ask: FencedCall, names: tuple[str, ...], missing: tuple[str, ...]) -> NoReturn:
    of_all = f" ({len(missing)} of {len(names)} keys)" if len(names) > 1 else ""
    message = f"wait timed out after {ask.seconds:g} s, still missing: {names_in_words(missing)}{of_all}"
    ask.raise_timeout_or_loss(message, keys=missing)


def _not_a_queue_error(key: str) -> ValueError:
    return ValueError(f"{brief(key)} holds a value that was set, not a queue; give the queue a key of its own")
