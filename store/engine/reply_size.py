"""Pure: what a reply that is kept for its client holds on to (promise S6): what it does, and what it may come to.

Most hold on to nothing but themselves. Those that carry values keep these from being let go of, also when their keys
have long been overwritten or deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from store.messages import (
    Added,
    Append,
    CompareAndSet,
    CompareAndSetResult,
    Entry,
    Failed,
    Get,
    Guarded,
    Put,
    Response,
    Transact,
    TransactionResult,
    Written,
    key_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from store.messages import Request

__all__ = ["reply_cost", "reply_cost_at_most"]

REPLY = 100  # bytes of bookkeeping for any reply, or any result in one
ENTRY = 200  # and for an entry in it


def reply_cost(response: Response) -> int:
    """About how many bytes a kept reply holds on to."""
    if type(response) is Written or type(response) is Added:  # most are, and a `match` takes its time
        return REPLY
    if type(response) is CompareAndSetResult:
        return REPLY + _entry_cost(response.entry)
    match response:
        case TransactionResult(results=results):
            return REPLY + sum(REPLY + (_entry_cost(result) if isinstance(result, Entry) else 0) for result in results)
        case Failed(message=message):
            return REPLY + len(message)
    return REPLY


def _entry_cost(entry: Entry | None) -> int:
    """What an entry takes that a reply holds on to, though its key may have been deleted."""
    return 0 if entry is None else ENTRY + key_bytes(entry.key) + len(entry.value)


def reply_cost_at_most(request: Request[Any], entries: Mapping[str, Entry]) -> int:
    """The same of the reply to a mutation that has not been made yet, on a store that holds these entries."""
    if isinstance(request, Guarded):
        request = request.request

    def size(key: str) -> int:
        entry = entries.get(key)
        return 0 if entry is None else len(entry.value)

    match request:
        case CompareAndSet(key=key, value=value):
            return REPLY + ENTRY + key_bytes(key) + max(size(key), len(value))
        case Transact(then=then, otherwise=otherwise):
            operations = then + otherwise
            written: dict[str, int] = {}
            for operation in operations:
                if isinstance(operation, Put | Append):
                    written[operation.key] = written.get(operation.key, 0) + len(operation.value)

            def most(key: str) -> int:
                return ENTRY + key_bytes(key) + size(key) + written.get(key, 0)

            return REPLY + sum(
                REPLY + (most(operation.key) if isinstance(operation, Get) else 0) for operation in operations
            )
    return REPLY
