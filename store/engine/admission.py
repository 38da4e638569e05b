"""Pure: what the engine takes in, and what it says to who asks for too much (promise S6).

Everything here looks and refuses; nothing here changes anything. A request is checked as a whole before the first of
its changes is made, so that one that is refused has done nothing. Each error names what was too much, the limit, and
what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

from store.engine.keyspace import ENTRY_OVERHEAD, answer_bytes
from store.engine.sessions import reply_cost_at_most
from store.errors import LeaseNotFound, LimitExceeded, StoreUsageError
from store.messages import (
    CHOSEN_LEASE_LEAST,
    NOTE_BYTES_MAX,
    Add,
    Append,
    Create,
    Delete,
    Failed,
    FailureKind,
    Get,
    Operation,
    Put,
    key_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from store.engine.leases import LeaseRecord
    from store.engine.sessions import Session
    from store.engine.state import State
    from store.messages import Entry, Grant, Request

__all__ = ["Admission", "shown", "sum_of"]

ADD_MAX = 2**63 - 1  # what torch.distributed.Store counts in
RAISE_IT = "start the server with a higher limit"
SMALL_REPLY_BYTES = 64 * 1024  # what one reply may take though all of them together take too much


class Admission:
    """The limits of a store, and how far it is from each of them.

    Attributes:
        held_elsewhere: Tells how many bytes the server holds for its connections and its disk.
    """

    def __init__(self, state: State) -> None:
        self._limits, self._keys, self._leases = state.limits, state.keys, state.leases
        self._watches, self._waits, self._sessions = state.watches, state.waits, state.sessions
        self._history, self._snapshots = state.history, state.snapshots
        self.held_elsewhere: Callable[[], int] = int  # nothing, until a server tells

    @property
    def memory_bytes(self) -> int:
        """What the store takes, without what its server holds for its connections and its disk."""
        parked = self._watches.bytes + self._waits.bytes
        kept = self._history.bytes + self._sessions.held_bytes + self._snapshots.held_bytes
        return self._keys.bytes + parked + kept

    def check_memory(self, more: int) -> None:
        """Refuse what would take more memory than all of it together may."""
        held = self.memory_bytes + max(self.held_elsewhere(), self._limits.memory_kept_back)
        if held + more > self._limits.memory_bytes_max:
            what = f"the server would hold {held + more} bytes in all, with what it keeps free for its connections"
            raise self._past("memory_bytes_max", what, f"delete some, end watches and waits, or {RAISE_IT}")

    def _past(self, limit: str, what: str, remedy: str) -> LimitExceeded:
        """The error of what passes a limit: what was too much, the limit, and what to do."""
        return LimitExceeded(f"{what}; {limit} is {getattr(self._limits, limit)}: {remedy}")

    def check_operations(self, operations: tuple[Operation, ...]) -> None:
        """Refuse a branch as a whole, before its first write."""
        room = []
        written: dict[str, int] = {}  # and the size that its value will have
        joining: dict[int, int] = {}  # how many keys so far go on a lease
        answer = leases = 0
        for operation in operations:
            if isinstance(operation, Get):
                entry = self._keys.get(operation.key)
                answer += max(answer_bytes(entry), key_bytes(operation.key) + written.get(operation.key, 0))
                continue
            if operation.key in written:
                raise StoreUsageError(f"a transaction writes {shown(operation.key)} twice; once is what it may")
            written[operation.key] = 0
            match operation:
                case Put():
                    leases += operation.ttl is not None
                    self.check_put(
                        operation.key,
                        operation.value,
                        ttl=operation.ttl,
                        lease=operation.lease,
                        leases=leases,
                        joining=joining,
                    )
                    size = len(operation.value)
                case Add():
                    self.check_rewrite(operation, joining)
                    size = len(sum_of(operation, self._keys.get(operation.key)))
                case Append():
                    self.check_rewrite(operation, joining)
                    size = self.check_append(operation)
                case Create():
                    entry = self._keys.get(operation.key)
                    if entry is not None:
                        answer += answer_bytes(entry)
                        continue
                    self.check_put(operation.key, operation.value, ttl=None, lease=operation.lease, joining=joining)
                    size = len(operation.value)
                case Delete():
                    continue
                case _:
                    assert_never(operation)
            written[operation.key] = size
            room.append((operation.key, size))
        self.check_told(written)
        self.check_revision(sum(written.values()))
        self.check_room(room)
        self.check_answer(answer)

    def check_told(self, keys: Collection[str]) -> None:
        """Refuse to change more keys at once than those who must hear of it can be found for in time."""
        most = self._watches.affordable(keys)
        if most < len(keys):
            raise LimitExceeded(
                f"the request changes {len(keys)} keys, and prefixes of so many lengths are watched that {most} of "
                f"them are all that may change at once: split it, or use shorter keys"
            )

    def check_grants(self, grants: Sequence[Grant]) -> None:
        """Refuse leases that are to be made for a transaction."""
        for grant in grants:
            if grant.id is None or not CHOSEN_LEASE_LEAST <= grant.id < 2 * CHOSEN_LEASE_LEAST:
                raise StoreUsageError(
                    f"a transaction grants a lease of id {shown(grant.id)}; choose one from {CHOSEN_LEASE_LEAST} on"
                )
            self.check_grant(grant)
        if len({grant.id for grant in grants}) < len(grants):
            raise StoreUsageError("a transaction grants a lease twice; once is what it may")
        self.check_lease_room(len(grants))

    def check_grant(self, grant: Grant) -> None:
        """Refuse a lease that is too long, or none."""
        self.check_ttl(grant.ttl)
        if grant.disconnect_ttl is not None:
            self.check_ttl(grant.disconnect_ttl, name="disconnect_ttl")
        if grant.gone_ttl is not None:
            self.check_ttl(grant.gone_ttl, name="gone_ttl")

    def check_session(self, session: Session) -> Failed | None:
        """What to answer a mutation of a session that keeps too many replies already."""
        limits = self._limits
        if session.replies >= limits.session_replies_max:
            held, limit = f"{session.replies} replies", f"session_replies_max is {limits.session_replies_max}"
        elif session.held_bytes >= limits.session_replies_bytes_max:
            held = f"{session.held_bytes} bytes of replies"
            limit = f"session_replies_bytes_max is {limits.session_replies_bytes_max}"
        else:
            return None
        return _no_room(f"{held} of this client", limit, session)

    def check_reply(self, session: Session, request: Request[Any]) -> Failed | None:
        """What to answer a mutation whose reply cannot be kept, though sessions that are away have made room.

        Who has acknowledged everything is let through, unless its reply may take much more: what others do not read is
        not to keep it from working, and many who come for one large reply each are not to take all memory there is.
        """
        held, most = self._sessions.held_bytes, self._limits.replies_bytes_max
        if held < most:
            return None
        if not session.replies and reply_cost_at_most(request, self._keys.entries) <= SMALL_REPLY_BYTES:
            return None
        what = f"{held} bytes of replies, {session.held_bytes} of them of this client,"
        return _no_room(what, f"replies_bytes_max is {most}", session)

    def check_put(
        self,
        key: str,
        value: bytes,
        ttl: float | None,
        lease: int | None,
        *,
        leases: int = 1,
        joining: dict[int, int] | None = None,
    ) -> None:
        """Refuse a put.

        `leases` is how many leases are being made with this one, if it makes one, and `joining` how many keys go on
        each lease with this one; it is counted there.
        """
        if not key or len(key) * 4 > self._limits.key_bytes_max:
            self.check_key(key)
        if len(value) > self._limits.value_bytes_max:
            self.check_value(key, len(value))
        if ttl is not None:
            if lease is not None:
                raise StoreUsageError(f"a put of {shown(key)} takes ttl or lease, not both")
            self.check_ttl(ttl)
            self.check_lease_room(leases)
        if lease is not None:
            self.check_lease(lease, key, joining)

    def check_rewrite(self, request: Add | Append, joining: dict[int, int] | None = None) -> None:
        """Refuse an add or an append."""
        self.check_key(request.key)
        if request.lease is not None and self._keys.get(request.key) is None:  # else it stays on the lease it is on
            self.check_lease(request.lease, request.key, joining)

    def check_lease(self, lease: int, key: str, joining: dict[int, int] | None) -> None:
        """Refuse to put a key on a lease that is gone, is another key's own, or has as many as can go at once."""
        record = self.lease(lease)
        if record.anonymous and key not in record.keys:
            # It ends with its one key, which may be about to go in this very transaction.
            raise StoreUsageError(
                f"lease {lease} was made by a put with ttl=, for that one key; grant one to put {shown(key)} on"
            )
        if key in record.keys:
            return
        others = len(record.keys)
        if joining is not None:
            others += joining.get(lease, 0)
            joining[lease] = joining.get(lease, 0) + 1
        if others >= self._limits.lease_keys_max:
            what = f"lease {lease} has {others} keys, all that it may have"
            raise self._past("lease_keys_max", what, f"put {shown(key)} on another lease")

    def check_key(self, key: str) -> None:
        """Refuse a key that is empty or too long."""
        if not key:
            raise StoreUsageError("a key has at least one character")
        if len(key) * 4 > self._limits.key_bytes_max:
            self.check_size(key, "key")

    def check_size(self, key: str, what: str) -> None:
        """Refuse a key that is too long; also as a prefix, since a longer one starts no key and only takes memory."""
        most = self._limits.key_bytes_max
        if len(key) * 4 > most and len(key.encode()) > most:
            size = len(key.encode())
            raise self._past("key_bytes_max", f"the {what} {shown(key)} has {size} bytes", "use a shorter one")

    def check_note(self, note: bytes) -> None:
        """Refuse a note that is too long: each lease keeps one."""
        if len(note) > NOTE_BYTES_MAX:
            raise LimitExceeded(
                f"the note of a keep-alive has {len(note)} bytes, and at most {NOTE_BYTES_MAX} are kept: shorten it"
            )

    def check_value(self, key: str, size: int) -> None:
        """Refuse a value that is too long."""
        if size > self._limits.value_bytes_max:
            what, remedy = f"the value for {shown(key)} has {size} bytes", "store a reference to it instead"
            raise self._past("value_bytes_max", what, f"{remedy}, or {RAISE_IT}")

    def check_room_for(self, key: str, size: int) -> None:
        """Refuse a write that the store has no room for; `size` is that of its value."""
        before = self._keys.get(key)
        if before is None or len(before.value) != size:
            self.check_room(((key, size),))

    def check_room(self, writes: Iterable[tuple[str, int]]) -> None:
        """Refuse writes that the store has no room for; each is a key and the size its value will have."""
        keys, size = len(self._keys), self._keys.bytes
        grown: dict[str, list[int]] = {}  # groups, and how many keys and bytes more each would hold
        for key, value_size in writes:
            before = self._keys.get(key)
            if before is None:
                more, added = 1, ENTRY_OVERHEAD + key_bytes(key) + value_size
            elif (added := value_size - len(before.value)) != 0:
                more = 0
            else:
                continue
            keys += more
            size += added
            name = self._keys.groups.name_of(key)
            if name is not None:
                growth = grown.setdefault(name, [0, 0])
                growth[0] += more
                growth[1] += added
        if keys > self._limits.keys_max and keys > len(self._keys):
            raise self._past("keys_max", f"the store holds {len(self._keys)} keys", "delete some")
        if size > self._limits.stored_bytes_max and size > self._keys.bytes:
            raise self._past("stored_bytes_max", f"the store would hold {size} bytes", "delete some")
        for name, (more, added) in grown.items():
            self._check_group(name, more, added)
        if size > self._keys.bytes:
            self.check_memory(size - self._keys.bytes)

    def _check_group(self, name: str, more: int, added: int) -> None:
        """Refuse what would let one group of keys take the room of the others."""
        group = self._keys.groups.get(name)
        keys, size = (group.keys, group.bytes) if group is not None else (0, 0)
        whose = f"the group {shown(name)} (group_parts is {self._limits.group_parts})"
        remedy = f"delete some, or {RAISE_IT}"
        if more > 0 and keys + more > self._limits.group_keys_max:
            raise self._past("group_keys_max", f"{whose} holds {keys} keys", remedy)
        if added > 0 and size + added > self._limits.group_bytes_max:
            raise self._past("group_bytes_max", f"{whose} would hold {size + added} bytes", remedy)

    def check_branches(self, count: int) -> None:
        """Refuse a transaction of more operations, in both branches together, than others can wait for (S11)."""
        if count > self._limits.writes_max:
            raise self._past("writes_max", f"the transaction names {count} operations", "split it")

    def check_writes(self, count: int) -> None:
        """Refuse to change more keys at once than others can wait for (promise S11)."""
        if count > self._limits.writes_max:
            raise self._past("writes_max", f"the request changes {count} keys", "split it")

    def check_revision(self, size: int) -> None:
        """Refuse to change more at once than a disk takes in one piece, and than watchers take in one message."""
        if size > self._limits.revision_bytes_max:
            remedy = "write fewer keys at once (an append writes the whole value again)"
            raise self._past("revision_bytes_max", f"the transaction would write values of {size} bytes", remedy)

    def check_ttl(self, ttl: float, *, name: str = "ttl") -> None:
        """Refuse a lease that is too long, or none."""
        if not ttl > 0:
            raise StoreUsageError(f"{name} is {ttl:g} s; it must be above 0")
        if ttl > self._limits.lease_ttl_max:
            raise LimitExceeded(
                f"{name} is {ttl:g} s; lease_ttl_max is {self._limits.lease_ttl_max:g} s: ask for less, and renew it"
            )

    def check_lease_room(self, leases: int = 1) -> None:
        """Refuse so many more leases."""
        if len(self._leases) + leases > self._limits.leases_max:
            raise self._past("leases_max", f"the store has {len(self._leases)} leases", f"revoke some, or {RAISE_IT}")

    def check_open(self, peer: int, cost: int) -> None:
        """Refuse one more watch or wait of a peer, which would take `cost` bytes."""
        count = self._watches.of(peer) + self._waits.of(peer)
        if count >= self._limits.watches_max:
            raise self._past("watches_max", f"this connection has {count} watches and waits", "end some")
        size = self._watches.bytes + self._waits.bytes + cost
        if size > self._limits.parked_bytes_max:
            what = f"the watches and waits of all connections would take {size} bytes"
            raise self._past("parked_bytes_max", what, "end some, or wait for fewer keys at once")
        self.check_memory(cost)

    def check_waits(self, peer: int, cost: int) -> None:
        """Refuse a wait for too many keys at once."""
        size = self._waits.bytes_of(peer) + cost
        if size > self._limits.waits_bytes_max:
            what = f"the waits of this connection would take {size} bytes"
            raise self._past("waits_bytes_max", what, "wait for fewer keys at once")

    def check_answer(self, size: int) -> None:
        """Refuse to answer with more than a message may have: one key may be asked for thousands of times."""
        if size > self._limits.frame_bytes_max:
            raise self._past("frame_bytes_max", f"the answer would take {size} bytes", "ask for fewer keys at once")

    def lease(self, id: int) -> LeaseRecord:
        """The lease of this id.

        Raises:
            LeaseNotFound: It has lapsed, or was revoked.
        """
        lease = self._leases.get(id)
        if lease is None:
            raise LeaseNotFound(f"lease {id} has lapsed or was revoked; grant a new one")
        return lease

    def check_append(self, request: Append) -> int:
        """How long the value of an append will be; refused if that is too long."""
        entry = self._keys.get(request.key)
        size = len(request.value) + (len(entry.value) if entry else 0)
        self.check_value(request.key, size)
        return size

    def check_count(self, count: int, what: str) -> None:
        """Refuse a request that names too many things."""
        if count > self._limits.operations_max:
            raise self._past("operations_max", f"the request names {count} {what}", "split it")


def shown(value: object) -> str:
    """A key or a value as messages show it: they end up in logs, and a key that was refused may be megabytes long."""
    if isinstance(value, str | bytes) and len(value) > 40:
        return f"{value[:40]!r}..."
    return repr(value)


def sum_of(request: Add, entry: Entry | None) -> bytes:
    """The value after an add to a key that holds `entry` now."""
    try:
        total = (_number(entry.value) if entry else 0) + request.amount
    except ValueError:
        raise StoreUsageError(
            f"{request.key!r} holds {entry.value[:40]!r}, which is no decimal number to add to"  # type: ignore[union-attr]
        ) from None
    if abs(total) > ADD_MAX:
        raise StoreUsageError(f"adding {request.amount} to {request.key!r} passes 64 bits")
    return b"%d" % total


def _number(value: bytes) -> int:
    """A decimal number as `add` keeps it. Python's int() takes underscores and blanks; the store does not."""
    if len(value) > 21:
        raise ValueError("it is too long")
    digits = value[1:] if value[:1] == b"-" else value
    if not digits.isdigit() or len(digits) > 20:
        raise ValueError(value)
    return int(value)


def _no_room(held: str, limit: str, session: Session) -> Failed:
    """The answer to a mutation that is not carried out since its reply could not be kept."""
    remedy = "read replies before sending more" if session.replies else "come again, or ask for no large values"
    return Failed(kind=FailureKind.LIMIT, message=f"{held} wait to be acknowledged; {limit}: {remedy}")
