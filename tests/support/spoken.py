"""A peer that speaks the protocol by hand: it can send any message, and reads all messages as they are on the wire."""

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
