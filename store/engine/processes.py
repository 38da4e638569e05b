"""The connections of each client process, and whether the process is assumed dead (R20).

When a process dies, its operating system closes all its connections within a millisecond, without a goodbye. A process
is assumed dead once its last connection has closed without a goodbye, until it connects again. Exceptions:

- the server or the system has cut one of its connections (`DisconnectKind.CUT`);
- many processes seem to die at once (`_many_seem_dead`);
- it has no leases: only leases depend on a process's death.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

AT_ONCE = 0.05  # seconds in which deaths count as simultaneous
# A failed machine kills few processes with leases. If so many seem to die at once, the network failed: `gone_ttl` is
# ignored.
MANY = 8


class DisconnectKind(Enum):
    """The way in which a connection ended."""

    GOODBYE = "its client said that it will not come back"
    DROPPED = "it was closed from the client's side, without a goodbye"
    CUT = "the server closed it, or the system gave it up"


@dataclass(slots=True, kw_only=True, eq=False)
class ClientProcess:
    """A client process with a connection or a lease."""

    id: bytes
    peers: set[int] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)  # ids of the leases with a `gone_ttl` that its connections kept last
    cut: bool = False  # one of its connections was cut (`DisconnectKind.CUT`), and it has not connected since
    died_at: float | None = None  # when it seemed to die, on the leases' clock; None if no `gone_ttl` runs


class Processes:
    """The client processes with a connection or a lease, if they sent an id in their hello."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, ClientProcess] = {}
        self._of_peer: dict[int, ClientProcess] = {}
        self._of_lease: dict[int, ClientProcess] = {}
        self._holders = 0  # the number of processes with `leases`
        self._fallen: dict[ClientProcess, float] = {}  # when processes seemed to die, in the last `AT_ONCE` seconds

    def note_connected(self, peer: int, id: bytes, *, previous: int | None) -> None:
        """Note a new connection, which replaces the connection `previous`, if any."""
        if previous is not None:  # the end of the replaced connection is no sign of a death
            self._detach_connection(previous)
        if not id:
            return
        process = self._by_id.get(id) or ClientProcess(id=id)
        self._by_id[id] = self._of_peer[peer] = process
        process.peers.add(peer)
        process.cut = False
        process.died_at = None

    def note_disconnect(self, peer: int, how: DisconnectKind, *, now: float) -> ClientProcess | None:
        """Handle the end of a connection, at `now` in served time; return the process if it seems dead."""
        process = self._detach_connection(peer)
        if process is None:
            return None
        process.cut = process.cut or how is DisconnectKind.CUT
        if process.peers or process.cut or how is not DisconnectKind.DROPPED or not process.leases:
            return None
        self._fallen.pop(process, None)
        self._fallen[process] = now
        while self._fallen[first := next(iter(self._fallen))] < now - AT_ONCE:
            del self._fallen[first]
        if self._many_seem_dead():
            for fallen in self._fallen:
                fallen.died_at = None
            return None
        process.died_at = now
        return process

    def _many_seem_dead(self) -> bool:
        """Return True if at least `MANY` processes, or most, seemed to die at once."""
        fallen = len(self._fallen)
        all_of_them = self._holders + sum(not process.leases for process in self._fallen)
        return fallen >= MANY or (fallen > 1 and 2 * fallen > all_of_them)

    def note_lease_holder(self, peer: int, lease: int) -> ClientProcess | None:
        """Note that the process of a connection holds a lease; return the process, or None if unknown."""
        self.note_lease_released(lease)
        process = self._of_peer.get(peer)
        if process is not None:
            self._holders += not process.leases
            process.leases.add(lease)
            self._of_lease[lease] = process
        return process

    def note_lease_released(self, lease: int) -> None:
        """Note that no process holds this lease."""
        process = self._of_lease.pop(lease, None)
        if process is not None:
            process.leases.remove(lease)
            self._holders -= not process.leases
            self._forget_if_unused(process)

    def _detach_connection(self, peer: int) -> ClientProcess | None:
        process = self._of_peer.pop(peer, None)
        if process is not None:
            process.peers.discard(peer)
            self._forget_if_unused(process)
        return process

    def _forget_if_unused(self, process: ClientProcess) -> None:
        if not process.peers and not process.leases:
            self._by_id.pop(process.id, None)
