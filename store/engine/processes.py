"""Pure: which connections belong to one process, and whether they end as those of a process that has died (R20).

A process that dies takes all of its connections with it, within a millisecond: its system closes them, and nobody says
goodbye. One whose network hiccups loses some of them, or all, and makes new ones at once. So a process is taken for
dead when the last of its connections was closed from its side without a goodbye, until it says hello again.

Two things that look like a death are not taken for one:

- The server has closed one of its connections itself, or the system has given one up: that says nothing of the
  process, which is expected back. `Closing.CUT`
- Many processes seem to die at once. They share something that has failed, a proxy, a switch or the way to this
  server, and are as likely to come back as not. `_are_many` says what counts as many.

Only processes that hold leases are judged here, since only leases end by the verdict. A process without any (a worker
of a node, which uses the shared store) neither dies nor counts among the many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = ["AT_ONCE", "MANY", "Closing", "Process", "Processes"]

AT_ONCE = 0.05  # seconds; resets by one proxy or switch come within a few milliseconds, on a busy server a few more
# A machine that fails takes one process with leases along, and rarely more than a few. Eight at once are the work of a
# network, or of somebody who ends a job: then nobody is in a hurry.
MANY = 8


class Closing(Enum):
    """How a connection has ended."""

    GOODBYE = "its client said that it will not come back"
    DROPPED = "it was closed from the client's side, without a goodbye"
    CUT = "the server closed it, or the system gave it up"


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One process of a client, for as long as it has a connection or a lease."""

    id: bytes
    peers: set[int] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)  # that its connections kept last
    cut: bool = False  # one of its connections was cut, and none has been made since
    died_at: float | None = None  # when it was taken for dead, in served time; None: it is not, or not any more


class Processes:
    """All processes that have a connection or a lease, and said in their hello who they are."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Process] = {}
        self._of_peer: dict[int, Process] = {}
        self._of_lease: dict[int, Process] = {}
        self._holders = 0  # processes that hold leases
        self._fallen: dict[Process, float] = {}  # those that seemed to die within `AT_ONCE`, and when

    def __len__(self) -> int:
        return len(self._by_id)

    def connected(self, peer: int, id: bytes, *, previous: int | None) -> None:
        """A connection of a process was made, which is alive; `previous` is the one whose place it takes, if any."""
        if previous is not None:  # its end, which may not have been seen yet, is no news any more
            self._detach(previous)
        if not id:
            return
        process = self._by_id.get(id) or Process(id=id)
        self._by_id[id] = self._of_peer[peer] = process
        process.peers.add(peer)
        process.cut = False
        process.died_at = None

    def closed(self, peer: int, how: Closing, *, now: float) -> Process | None:
        """A connection has ended; `now` is served time, as leases know it. Who has just died by that, if anybody has.

        If too many seem to die at once, none of them has.
        """
        process = self._detach(peer)
        if process is None:
            return None
        process.cut = process.cut or how is Closing.CUT
        if process.peers or process.cut or how is not Closing.DROPPED or not process.leases:
            return None
        self._fallen.pop(process, None)
        self._fallen[process] = now
        while self._fallen[first := next(iter(self._fallen))] < now - AT_ONCE:
            del self._fallen[first]
        if self._are_many():
            for fallen in self._fallen:
                fallen.died_at = None
            return None
        process.died_at = now
        return process

    def _are_many(self) -> bool:
        """Whether so many have fallen at once that it is more likely the network than themselves.

        More than half of all, if they are more than one, are likely to share what has failed, too: the way to us. That
        keeps a small run behind a proxy whole; of a large one, `MANY` are reason enough.
        """
        fallen = len(self._fallen)
        all_of_them = self._holders + sum(not process.leases for process in self._fallen)
        return fallen >= MANY or (fallen > 1 and 2 * fallen > all_of_them)

    def keeps(self, peer: int, lease: int) -> Process | None:
        """The process of this connection, if it said which it is, holds this lease from now on, and no other one."""
        self.lets_go(lease)
        process = self._of_peer.get(peer)
        if process is not None:
            self._holders += not process.leases
            process.leases.add(lease)
            self._of_lease[lease] = process
        return process

    def lets_go(self, lease: int) -> None:
        """Nobody holds this lease any more."""
        process = self._of_lease.pop(lease, None)
        if process is not None:
            process.leases.remove(lease)
            self._holders -= not process.leases
            self._forget_if_done(process)

    def _detach(self, peer: int) -> Process | None:
        process = self._of_peer.pop(peer, None)
        if process is not None:
            process.peers.discard(peer)
            self._forget_if_done(process)
        return process

    def _forget_if_done(self, process: Process) -> None:
        if not process.peers and not process.leases:
            self._by_id.pop(process.id, None)
