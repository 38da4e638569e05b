"""A key-value server for coordination, and its clients: compare-and-set, leases, watches, transactions, over TCP.

The package works without `rdzv`::

    async with store.serve() as server, store.connect(server.url) as client:
        await client.put("greeting", b"hello")
"""

from typing import TYPE_CHECKING

from store import _platform_guard as _platform_guard  # isort: skip  # first: it fails on systems where the store does not run
from store.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from store import recipes as recipes
    from store import sync as sync
    from store import when as when
    from store.calls import LeaseTerms as LeaseTerms
    from store.client.client import Client as Client
    from store.connecting import connect as connect
    from store.errors import AuthenticationError as AuthenticationError
    from store.errors import ConditionFailed as ConditionFailed
    from store.errors import ConnectionLost as ConnectionLost
    from store.errors import LeaseNotFound as LeaseNotFound
    from store.errors import LimitExceeded as LimitExceeded
    from store.errors import ProtocolError as ProtocolError
    from store.errors import StoreError as StoreError
    from store.errors import StoreReplaced as StoreReplaced
    from store.errors import StoreTimeoutError as StoreTimeoutError
    from store.errors import StoreUsageError as StoreUsageError
    from store.errors import Unsupported as Unsupported
    from store.errors import UsedAfterFork as UsedAfterFork
    from store.errors import WatchCompacted as WatchCompacted
    from store.interface import BlockingLease as BlockingLease
    from store.interface import BlockingStore as BlockingStore
    from store.interface import BlockingWatch as BlockingWatch
    from store.interface import Lease as Lease
    from store.interface import Store as Store
    from store.interface import Watch as Watch
    from store.keeping import BlockingKeptLease as BlockingKeptLease
    from store.keeping import HeldLease as HeldLease
    from store.limits import Limits as Limits
    from store.messages import Add as Add
    from store.messages import Append as Append
    from store.messages import CompareAndSetResult as CompareAndSetResult
    from store.messages import Condition as Condition
    from store.messages import Create as Create
    from store.messages import Delete as Delete
    from store.messages import Entry as Entry
    from store.messages import Event as Event
    from store.messages import Get as Get
    from store.messages import Grant as Grant
    from store.messages import KeyGroup as KeyGroup
    from store.messages import Operation as Operation
    from store.messages import Put as Put
    from store.messages import TransactionResult as TransactionResult
    from store.net.certificates import client_context as client_context
    from store.server.server import Server as Server
    from store.server.server import serve as serve
else:
    __getattr__, __dir__, __all__ = _lazy_names(
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
