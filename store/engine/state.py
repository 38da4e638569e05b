"""Pure: what a store consists of, for the rooms that check requests, carry them out and make changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.engine.keyspace import Keyspace
from store.engine.leases import Leases
from store.engine.sessions import Sessions
from store.engine.snapshots import Snapshots
from store.engine.waits import Postponed, Waits
from store.engine.watches import History, Watches

if TYPE_CHECKING:
    from store.limits import Limits

__all__ = ["State"]


class State:
    """The parts of a store. Each knows itself alone; what a request means to several of them, `requests` says."""

    __slots__ = ("history", "keys", "leases", "limits", "postponed", "sessions", "snapshots", "waits", "watches")

    def __init__(self, limits: Limits) -> None:
        self.limits: Limits = limits
        self.keys: Keyspace = Keyspace(limits)
        self.leases: Leases = Leases()
        self.watches: Watches = Watches(self.keys.groups.name_of)
        self.waits: Waits = Waits()
        self.postponed: Postponed = Postponed(self.keys.entries)
        self.snapshots: Snapshots = Snapshots(self.keys)
        self.history: History = History(limits.history_bytes_max)
        self.sessions: Sessions = Sessions(ttl=limits.session_ttl, sessions_max=limits.sessions_max)
