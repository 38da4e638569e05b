"""The parts of a store, and the checks of requests against its limits (promise S6)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from store.engine.keyspace import ENTRY_OVERHEAD, Keyspace, entry_answer_bytes
from store.engine.leases import LEASE_OVERHEAD, LeaseRecord, Leases
from store.engine.sessions import SESSION_OVERHEAD, Session, Sessions, reply_cost_at_most
from store.engine.snapshots import OldEntries, Snapshots
from store.engine.waits import PostponedWaits, Waits
from store.engine.watches import History, Watches
from store.errors import LeaseNotFound, LimitExceeded, StoreUsageError
from store.messages import CHOSEN_LEASE_LEAST, Add, Append, Create, Delete, Get, Put, key_size, operations_of
from store.records import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from store.limits import Limits
    from store.messages import Grant, Operation, Request, Write

RAISE_IT = "start the server with a higher limit"
READ_THEM = "read replies before sending more, or ask for no large values"
SPARE_SHARE = 8  # keys that coordinate a run may exceed a limit by 1/this of it (memory: of its reserve)
WRITES_ON_A_FULL_DISK = 512  # the most keys of one change while `why_only_deletes`: each may take 4 KiB
SMALL_REPLY_BYTES = 64 * 1024  # a client without kept replies may get a reply up to this beyond `replies_bytes_max`

PAST = {
    "append_bytes_max": ("the value for {of} would have {} bytes", "append to another key, or put the value"),
    "frame_bytes_max": ("the answer would take {} bytes", "ask for fewer keys at once"),
    "group_bytes_max": ("{of} would hold {} bytes", f"delete some, or {RAISE_IT}"),
    "group_keys_max": ("{of} would hold {} keys", f"delete some, or {RAISE_IT}"),
    "key_bytes_max": ("{of} has {} bytes", "use a shorter one"),
    "keys_max": ("the store would hold {} keys", "delete some"),
    "lease_ttl_max": ("{of} is {:g} s", "ask for less, and renew it"),
    "leases_max": ("the store would have {} leases", f"revoke some, or {RAISE_IT}"),
    "memory_bytes_max": (
        "the server would hold {} bytes in all, with what it keeps free for its connections",
        f"delete some, end watches and waits, revoke leases, or {RAISE_IT}",
    ),
    "operations_max": ("the request names {} {of}", "split it"),
    "replies_bytes_max": ("{} bytes of replies would wait to be acknowledged", READ_THEM),
    "session_replies_max": ("{} replies of this client would wait to be acknowledged", READ_THEM),
    "session_replies_bytes_max": ("{} bytes of replies of this client would wait to be acknowledged", READ_THEM),
    "stored_bytes_max": ("the store would hold {} bytes", "delete some"),
    "value_bytes_max": ("the value for {of} has {} bytes", f"store a reference to it instead, or {RAISE_IT}"),
    "waits_bytes_max": ("the waits of this connection would take {} bytes", "wait for fewer keys at once"),
    "watches_max": ("this connection would have {} watches and waits", "end some"),
    "writes_max": ("the request names {} {of}", "split it"),
}
"""The texts of refusals, by limit: the excess, and the remedy."""


class StoreState:
    """The parts of a store, its limits, and the room on its disk."""

    def __init__(self, limits: Limits) -> None:
        self.limits: Limits = limits
        self.why_only_deletes: str | None = None  # why most writes other than deletes are refused, or None
        self.writable_bytes: int = 0  # on a nearly full disk: the most bytes of a write
        self.steering_bytes: int = 0  # on a nearly full disk: bytes left for keys that coordinate a run
        self.keys: Keyspace = Keyspace()
        self.leases: Leases = Leases()
        self.watches: Watches = Watches(self.keys.groups.group_name_of)
        self.waits: Waits = Waits()
        self.past: OldEntries = OldEntries(self.keys.entries)
        self.postponed: PostponedWaits = PostponedWaits()
        self.snapshots: Snapshots = Snapshots(self.keys)
        self.history: History = History(limits.history_bytes_max)
        self.sessions: Sessions = Sessions(ttl=limits.session_ttl, sessions_max=limits.sessions_max)
        self.held_elsewhere: Callable[[], int] = int  # returns `Peers.unfreeable_bytes` of the server

    @property
    def writes_max(self) -> int:
        """The most keys of one change, or operations of a transaction."""
        most = self.limits.writes_max
        return most if self.why_only_deletes is None else min(most, WRITES_ON_A_FULL_DISK)

    @property
    def memory_bytes(self) -> int:
        """The bytes of the store itself, without those held for connections and the disk."""
        parked = self.watches.bytes + self.waits.bytes
        kept = self.history.bytes + self.sessions.budget.bytes + self.snapshots.held_bytes
        return self.keys.bytes + self.leases.bytes + len(self.sessions) * SESSION_OVERHEAD + parked + kept

    def free_old_entries(self) -> bool:
        """Free some entries of `past` that no snapshot or wait reads any more; return True if more are left."""
        looked_at = [revision for revision, _ in self.postponed.heaps]
        if self.snapshots.oldest_snapshot is not None:
            looked_at.append(self.snapshots.oldest_snapshot.revision)
        return self.past.free(min(looked_at, default=math.inf))

    def check_limit(
        self, limit: str, amount: float, of: object = "", *, for_keys: Collection[str] = (), spare: int | None = None
    ) -> None:
        """Refuse an amount above a limit. Keys that coordinate a run may exceed it by `spare`; see `SPARE_SHARE`."""
        most = self.writes_max if limit == "writes_max" else getattr(self.limits, limit)
        if amount > most:
            room = most // SPARE_SHARE if spare is None else spare
            if for_keys and amount <= most + room and all(map(self.keys.groups.is_coordination_key, for_keys)):
                return
            what, remedy = PAST[limit]
            shown_most = f"{most:g}" if isinstance(most, float) else most
            raise LimitExceeded(f"{what.format(amount, of=of)}; {limit} is {shown_most}: {remedy}")

    def check_memory(self, more: int, for_keys: Collection[str] = ()) -> None:
        """Refuse a request that would exceed the memory limit."""
        kept_back, spare = self.limits.memory_reserve, self.limits.memory_reserve // SPARE_SHARE
        held = self.memory_bytes + max(self.held_elsewhere() + spare, kept_back)
        # Count the history at its limit, but large snapshots only in part: closing their readers frees them.
        held += self.limits.history_bytes_max - self.history.bytes
        given_up = max(self.snapshots.held_bytes - self.limits.outbox_bytes_max, 0)
        self.check_limit("memory_bytes_max", held - given_up + more, for_keys=for_keys, spare=spare)

    def check_write(self, write: Write) -> bytes:
        """Check a write, but not the room for it; return the new value."""
        key = write.key
        if not key or len(key) * 4 > self.limits.key_bytes_max:
            self.check_key(key)
        if isinstance(write, Add):
            value = b"%d" % write.total(self.keys.get(key))
        elif isinstance(write, Append):
            entry = self.keys.get(key)
            held = b"" if entry is None else entry.value
            for limit in ("append_bytes_max", "value_bytes_max"):
                self.check_limit(limit, len(held) + len(write.value), brief(key))
            value = held + write.value
        else:
            value = write.value
            if len(value) > self.limits.value_bytes_max and not self.keys.groups.is_coordination_key(key):
                self.check_limit("value_bytes_max", len(value), brief(key))
            if not isinstance(write, Create) and write.ttl is not None:
                if write.lease is not None:
                    raise StoreUsageError(f"a put of {brief(key)} takes ttl or lease, not both")
                self.check_ttl(write.ttl, "ttl")
        if write.lease is not None:
            self._check_lease_of_write(write.lease, write)
        return value

    def bytes_written_by(self, request: Request[Any]) -> int:
        """Return the approximate bytes that a request would write; an append writes the whole value."""
        size = 0
        for operation in operations_of(request):
            size += ENTRY_OVERHEAD + len(getattr(operation, "value", b""))
            if isinstance(operation, Append) and (entry := self.keys.get(operation.key)) is not None:
                size += len(entry.value)
        return size

    def check_branch(self, operations: tuple[Operation, ...]) -> list[bytes | None]:
        """Check a branch of a transaction; return each operation's new value, None if it writes none."""
        values: list[bytes | None] = []
        written: list[tuple[str, int]] = []
        sizes: dict[str, int] = {}  # by key: its new value's size
        leased: list[str] = []
        size = answer = 0
        for operation in operations:
            key, value = operation.key, None
            if not key:
                self.check_key(key)
            if isinstance(operation, Get):
                answer += max(entry_answer_bytes(self.keys.get(key)), key_size(key) + sizes.get(key, 0))
            elif key in sizes:
                raise StoreUsageError(f"a transaction writes {brief(key)} twice; it may do so once")
            elif isinstance(operation, Create) and (there := self.keys.get(key)) is not None:
                sizes[key] = 0
                answer += entry_answer_bytes(there)
            elif isinstance(operation, Delete):
                sizes[key] = 0
            else:
                value = self.check_write(operation)
                if isinstance(operation, Put) and operation.ttl is not None:
                    leased.append(key)
                written.append((key, len(value)))
                sizes[key] = len(value)
                size += len(value)
                if size > self.limits.frame_bytes_max:  # checked before memory is taken for the next value
                    raise LimitExceeded(
                        f"the transaction would write values of {size} bytes; frame_bytes_max is "
                        f"{self.limits.frame_bytes_max}: write fewer keys at once (an append writes the whole value "
                        f"again)"
                    )
            values.append(value)
        self.check_watch_search_cost(sizes)
        self.check_lease_room(len(leased), leased)
        self.check_room_for_writes(written)
        if answer:
            self.check_limit("frame_bytes_max", answer)
        return values

    def check_watch_search_cost(self, keys: Collection[str]) -> None:
        """Refuse a change of so many keys that finding their watches would take too long."""
        most = self.watches.changeable_key_count(keys)
        if most < len(keys):
            raise LimitExceeded(
                f"the request changes {len(keys)} keys, and prefixes of so many lengths are watched that {most} of "
                f"them are all that may change at once: split it, or use shorter keys"
            )

    def check_key(self, key: str) -> None:
        """Refuse an empty or too long key."""
        if not key:
            raise StoreUsageError("a key has at least one character")
        self.check_key_size(key, "key")

    def check_key_size(self, key: str, what: str) -> None:
        """Refuse a key or prefix that is too long."""
        if len(key) * 4 > self.limits.key_bytes_max:
            self.check_limit("key_bytes_max", len(key.encode()), f"the {what} {brief(key)}")

    def check_room_for_write(self, write: Write, size: int) -> None:
        """Refuse a write, of this size, that the store has no room for."""
        if getattr(write, "ttl", None) is not None:
            self.check_lease_room(1, (write.key,))
        before = self.keys.get(write.key)
        if before is None or len(before.value) != size:
            self.check_room_for_writes(((write.key, size),))

    def check_room_for_writes(self, writes: Collection[tuple[str, int]]) -> None:
        """Refuse writes, pairs of a key and its new size, that the store has no room for."""
        names = [key for key, _ in writes]
        keys = size = 0  # added by these writes
        grown: dict[str, list[int]] = {}  # by group: added keys and bytes
        for key, value_size in writes:
            before = self.keys.get(key)
            if before is None:
                more, added = 1, ENTRY_OVERHEAD + key_size(key) + value_size
            else:
                more, added = 0, value_size - len(before.value)
            keys += more
            size += added
            name = self.keys.groups.group_name_of(key)
            if name is not None:
                growth = grown.setdefault(name, [0, 0])
                growth[0] += more
                growth[1] += added
        if keys > 0:
            self.check_limit("keys_max", len(self.keys.entries) + keys, for_keys=names)
        if size > 0:
            self.check_limit("stored_bytes_max", self.keys.bytes + size, for_keys=names)
        for name, (more, added) in grown.items():  # one group must not take the room of other groups
            group = self.keys.groups.by_name.get(name)
            whose = f"the group {brief(name)}"
            if more > 0:
                self.check_limit("group_keys_max", more + (group.keys if group else 0), whose, for_keys=names)
            if added > 0:
                self.check_limit("group_bytes_max", added + (group.bytes if group else 0), whose, for_keys=names)
        if size > 0:
            self.check_memory(size, names)

    def find_lease(self, id: int) -> LeaseRecord:
        """Return the lease of this id; `LeaseNotFound` if it lapsed or was revoked."""
        lease = self.leases.get_if_live(id)
        if lease is None:
            raise LeaseNotFound(f"lease {id} has lapsed or was revoked; grant a new one")
        return lease

    def _check_lease_of_write(self, lease: int, write: Write) -> None:
        if isinstance(write, Add | Append) and self.keys.get(write.key) is not None:
            return  # `Add` and `Append` leave an existing key on its lease
        record = self.find_lease(lease)
        if write.key in record.keys:
            return
        if record.terms.anonymous:  # an anonymous lease ends with its only key, which this transaction may delete
            raise StoreUsageError(
                f"lease {lease} was made by a put with ttl=, for that one key; grant one to put {brief(write.key)} on"
            )

    def check_grant_ttls(self, grant: Grant) -> None:
        """Check the TTLs of a new lease."""
        for name in ("ttl", "disconnect_ttl", "gone_ttl"):
            if (ttl := getattr(grant, name)) is not None:
                self.check_ttl(ttl, name)

    def check_grants(self, grants: Sequence[Grant], for_keys: Collection[str]) -> None:
        """Check the leases that a transaction grants for these keys."""
        for grant in grants:
            if grant.id is None or not CHOSEN_LEASE_LEAST <= grant.id < 2 * CHOSEN_LEASE_LEAST:
                raise StoreUsageError(
                    f"a transaction grants a lease of id {brief(grant.id)}; choose one from {CHOSEN_LEASE_LEAST} on"
                )
            self.check_grant_ttls(grant)
        if len({grant.id for grant in grants}) < len(grants):
            raise StoreUsageError("a transaction grants a lease twice; it may do so once")
        self.check_lease_room(len(grants), for_keys)

    def check_ttl(self, ttl: float, name: str) -> None:
        """Refuse a TTL that is too long, or not positive."""
        if not ttl > 0:
            raise StoreUsageError(f"{name} is {ttl:g} s; it must be above 0")
        self.check_limit("lease_ttl_max", ttl, name)

    def check_lease_room(self, leases: int = 1, for_keys: Collection[str] = ()) -> None:
        """Refuse new leases if they would exceed the limits on leases or memory."""
        if leases:
            self.check_limit("leases_max", len(self.leases) + leases, for_keys=for_keys)
            self.check_memory(leases * LEASE_OVERHEAD, for_keys)

    def check_reply_room(self, session: Session, request: Request[Any]) -> None:
        """Refuse a request if its reply could not be kept."""
        self.check_limit("session_replies_max", len(session.replies) + 1)
        self.check_limit("session_replies_bytes_max", session.held_bytes + 1)
        if session.replies or reply_cost_at_most(request, self.keys.entries) > SMALL_REPLY_BYTES:
            self.check_limit("replies_bytes_max", self.sessions.budget.bytes + 1)

    def check_watch_room(self, peer: int, cost: int, for_keys: Collection[str]) -> None:
        """Refuse a peer's new watch or wait, of `cost` bytes, if it would exceed a limit."""
        self.check_limit("watches_max", self.watches.count_of_peer(peer) + self.waits.count_of_peer(peer) + 1)
        self.check_memory(cost, for_keys)
