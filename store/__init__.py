"""A key-value server for coordination, and its clients: compare-and-set, leases, watches, transactions, over TCP.

It knows nothing of rendezvous, and can be used by itself::

    async with store.serve() as server, store.connect(server.url) as client:
        await client.put("greeting", b"hello")
"""

from typing import TYPE_CHECKING

from store import recipes, sync, when
from store.client.client import Client
from store.connect import connect
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
from store.interface import BlockingLease, BlockingStore, Lease, Store
from store.limits import Limits
from store.messages import (
    Add,
    Append,
    CompareAndSetResult,
    Condition,
    Delete,
    Entry,
    Event,
    Get,
    KeyGroup,
    Put,
    TransactionResult,
)
from store.net.certificates import client_context

if TYPE_CHECKING:
    from store.server.server import Server, serve

__all__ = [
    "Add",
    "Append",
    "AuthenticationError",
    "BlockingLease",
    "BlockingStore",
    "Client",
    "CompareAndSetResult",
    "Condition",
    "ConditionFailed",
    "ConnectionLost",
    "Delete",
    "Entry",
    "Event",
    "Get",
    "KeyGroup",
    "Lease",
    "LeaseNotFound",
    "LimitExceeded",
    "Limits",
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
    "WatchCompacted",
    "client_context",
    "connect",
    "recipes",
    "serve",
    "sync",
    "when",
]


def __getattr__(name: str) -> object:
    """Load the server when it is first asked for: a client needs neither it nor sqlite3."""
    if name not in {"Server", "serve"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from store.server import server

    return getattr(server, name)
