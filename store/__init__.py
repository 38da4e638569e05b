"""A key-value server for coordination, and its clients: compare-and-set, leases, watches, transactions, over TCP.

The package works without `rdzv`::

    async with store.serve() as server, store.connect(server.url) as client:
        await client.put("greeting", b"hello")
"""

from typing import TYPE_CHECKING

from store import _platform_guard as _platform_guard  # isort: skip  # first: it fails on systems where the store does not run
from store.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from store import recipes, sync, when
    from store.calls import LeaseTerms
    from store.client.client import Client
    from store.connecting import connect
    from store.errors import (
        AuthenticationError,
        ConditionFailed,
        ConnectionLost,
        LeaseNotFound,
        LimitExceeded,
        ProtocolError,
        StoreError,
        StoreReplaced,
        StoreTimeoutError,
        StoreUsageError,
        Unsupported,
        UsedAfterFork,
        WatchCompacted,
    )
    from store.interface import BlockingLease, BlockingStore, BlockingWatch, Lease, Store, Watch
    from store.keeping import BlockingKeptLease, HeldLease
    from store.limits import Limits
    from store.messages import (
        Add,
        Append,
        CompareAndSetResult,
        Condition,
        Create,
        Delete,
        Entry,
        Event,
        Get,
        Grant,
        KeyGroup,
        Operation,
        Put,
        TransactionResult,
    )
    from store.net.certificates import client_context
    from store.server.server import Server, serve
else:
    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "store.recipes": "",
            "store.sync": "",
            "store.when": "",
            "store.client.client": "Client",
            "store.calls": "LeaseTerms",
            "store.connecting": "connect",
            "store.errors": (
                "AuthenticationError ConditionFailed ConnectionLost LeaseNotFound LimitExceeded "
                "ProtocolError StoreError StoreReplaced StoreTimeoutError StoreUsageError Unsupported "
                "UsedAfterFork WatchCompacted"
            ),
            "store.interface": "BlockingLease BlockingStore BlockingWatch Lease Store Watch",
            "store.keeping": "BlockingKeptLease HeldLease",
            "store.limits": "Limits",
            "store.messages": (
                "Add Append CompareAndSetResult Condition Create Delete Entry Event Get Grant KeyGroup Operation Put "
                "TransactionResult"
            ),
            "store.net.certificates": "client_context",
            "store.server.server": "Server serve",
        },
    )

__all__ = [
    "Add",
    "Append",
    "AuthenticationError",
    "BlockingKeptLease",
    "BlockingLease",
    "BlockingStore",
    "BlockingWatch",
    "Client",
    "CompareAndSetResult",
    "Condition",
    "ConditionFailed",
    "ConnectionLost",
    "Create",
    "Delete",
    "Entry",
    "Event",
    "Get",
    "Grant",
    "HeldLease",
    "KeyGroup",
    "Lease",
    "LeaseNotFound",
    "LeaseTerms",
    "LimitExceeded",
    "Limits",
    "Operation",
    "ProtocolError",
    "Put",
    "Server",
    "Store",
    "StoreError",
    "StoreReplaced",
    "StoreTimeoutError",
    "StoreUsageError",
    "TransactionResult",
    "Unsupported",
    "UsedAfterFork",
    "Watch",
    "WatchCompacted",
    "client_context",
    "connect",
    "recipes",
    "serve",
    "sync",
    "when",
]
