"""Leases at an etcd cluster: granted, renewed, read and revoked."""

from __future__ import annotations

import contextlib
import math
import secrets
from typing import TYPE_CHECKING

from store.errors import LeaseNotFound, LimitExceeded, StoreError, StoreUsageError
from store.etcd.codec import Failure, FailureKind, decode_key_name, prefix_span, range_of
from store.etcd.members import DoubtFlag
from store.messages import CHOSEN_LEASE_LEAST, Done, Granted, LeaseState, List, Note, NotePage
from store.records import brief

if TYPE_CHECKING:
    from store.etcd.members import Members
    from store.etcd.reads import ReadOperations
    from store.messages import KeepAlive, ListNotes

TTL_MAX = 9_000_000_000.0  # seconds, etcd's limit

NOTES = "notes/"  # the prefix of leases' notes


async def keep_alive(members: Members, request: KeepAlive, deadline: float, *, hidden: str) -> Granted:
    """Renew a lease; `hidden` is the prefix of this client's own keys."""
    lease = request.lease
    reply = await members.ask("Lease/LeaseKeepAlive", {"ID": lease}, deadline=deadline, what="KeepAlive")
    if reply.TTL <= 0:
        raise _lease_gone_error(lease)
    if request.note:  # etcd's keep-alive cannot carry a note, so a key on the lease does
        put = {"request_put": {"key": f"{hidden}{NOTES}{lease}".encode(), "value": request.note, "lease": lease}}
        with contextlib.suppress(StoreError):  # a full etcd rejects the note, but has renewed the lease
            await members.ask("KV/Txn", {"success": [put]}, deadline=deadline, what="writing")
    return Granted(lease=lease, ttl=float(reply.TTL))


async def time_to_live(members: Members, lease: int, deadline: float) -> LeaseState:
    """Return the remaining time of a lease, and its keys."""
    asked = {"ID": lease, "keys": True}
    reply = await members.ask("Lease/LeaseTimeToLive", asked, deadline=deadline, what="TimeToLive")
    if reply.TTL < 0 or not reply.grantedTTL:
        raise _lease_gone_error(lease)
    keys = tuple(sorted(map(decode_key_name, reply.keys)))
    return LeaseState(remaining=float(reply.TTL), ttl=float(reply.grantedTTL), keys=keys)


async def revoke_lease(members: Members, lease: int, deadline: float) -> Done:
    """End a lease."""
    doubt = DoubtFlag()
    try:
        await members.ask("Lease/LeaseRevoke", {"ID": lease}, deadline=deadline, what="Revoke", doubt=doubt)
    except LeaseNotFound:
        if not doubt.any:  # no earlier attempt can have ended the lease
            raise _lease_gone_error(lease) from None
    return Done()


async def list_lease_notes(members: Members, reads: ReadOperations, request: ListNotes, deadline: float) -> NotePage:
    """Return the notes on the leases of keys under a prefix; their `age` is 0, as etcd does not tell it."""
    begin = f"{reads.hidden}{NOTES}"
    written = await members.ask("KV/Range", range_of(prefix_span(begin)), deadline=deadline, what="Range")
    by_lease = {kv.lease: kv.value for kv in written.kvs}
    listing = await reads.list(List(prefix=request.prefix, keys_only=True), (), deadline)
    keys = ((entry.key, entry.lease) for entry in listing.entries if entry is not None and entry.key > request.after)
    found = tuple(Note(key=key, note=by_lease.get(lease, b""), age=0.0) for key, lease in keys)
    return NotePage(notes=found, more=False)


async def grant_lease(members: Members, ttl: float, deadline: float, *, id: int | None = None) -> Granted:
    """Grant a lease, or renew it if `id` exists. The TTL is rounded up to seconds, and to etcd's minimum."""
    check_ttls(ttl=ttl)
    lease = id or new_lease_id()  # a request repeated with the same id grants no second lease
    asked = {"ID": lease, "TTL": math.ceil(ttl)}
    while True:
        try:
            reply = await members.ask("Lease/LeaseGrant", asked, deadline=deadline, what="Grant")
        except Failure as failure:
            if failure.trouble is not FailureKind.LEASE_EXISTS:
                raise
            # An earlier attempt, or another client, has granted the lease, so renew it.
            reply = await members.ask("Lease/LeaseKeepAlive", {"ID": lease}, deadline=deadline, what="Grant")
        if reply.TTL > 0:
            return Granted(lease=lease, ttl=float(reply.TTL))


def new_lease_id() -> int:
    """Return a random lease id, which no other client has."""
    return secrets.randbelow(CHOSEN_LEASE_LEAST - 1) + 1


def check_lease_id(lease: int | None) -> None:
    """Raise an error for an id that no lease can have, such as 0: to etcd, it means no lease."""
    if lease is not None and lease.bit_length() > 64:
        raise StoreUsageError(f"{brief(lease)} is no id of a lease")
    if lease is not None and not 0 < lease < 2**63:
        raise _lease_gone_error(lease)


def check_ttls(**ttls: float | None) -> None:
    """Raise an error for a TTL that is not positive, or too long for etcd."""
    for name, ttl in ttls.items():
        if ttl is not None and not ttl > 0:
            raise StoreUsageError(f"{name} is {ttl:g} s; it must be above 0")
        if ttl is not None and ttl > TTL_MAX:
            raise LimitExceeded(f"{name} is {ttl:g} s; etcd takes at most {TTL_MAX:g}: ask for less, and renew it")


def _lease_gone_error(lease: int) -> LeaseNotFound:
    return LeaseNotFound(f"lease {lease} has lapsed or was revoked; grant a new one")
