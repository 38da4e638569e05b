"""What a peer without manners says and hears: the words of the protocol, for tests that speak it by hand."""

from store.messages import (
    CompareAndSet,
    Count,
    Failed,
    GetMany,
    Granted,
    List,
    Ping,
    Request,
    Revoke,
    TimeToLive,
    Transact,
    Wait,
    Watch,
    Written,
)
from store.protocol import wire
from store.protocol.wire import Lagged

__all__ = [
    "CompareAndSet",
    "Count",
    "Failed",
    "GetMany",
    "Granted",
    "Lagged",
    "List",
    "Ping",
    "Request",
    "Revoke",
    "TimeToLive",
    "Transact",
    "Wait",
    "Watch",
    "Written",
    "wire",
]
