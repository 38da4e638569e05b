"""Shell: leases at an etcd cluster: granted, kept, looked at and revoked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.errors import LeaseNotFound, StoreUsageError
from store.etcd.codec import key_of
from store.etcd.members import RetryState
from store.etcd.receipts import granted
from store.messages import Done, Grant, Granted, KeepAlive, LeaseState, Response, Revoke, TimeToLive

if TYPE_CHECKING:
    from store.etcd.members import Members

__all__ = ["call", "grant"]


async def call(members: Members, request: Grant | KeepAlive | Revoke | TimeToLive, deadline: float) -> Response:
    """Make one request about a lease and give its response."""
    match request:
        case Grant(ttl=ttl):
            return await grant(members, ttl, deadline)
        case KeepAlive(lease=lease):
            reply = await members.ask("Lease/LeaseKeepAlive", {"ID": lease}, deadline=deadline, what="KeepAlive")
            if reply.TTL <= 0:
                raise _no_lease(lease)
            return Granted(lease=lease, ttl=float(reply.TTL))
        case TimeToLive(lease=lease):
            asked = {"ID": lease, "keys": True}
            reply = await members.ask("Lease/LeaseTimeToLive", asked, deadline=deadline, what="TimeToLive")
            if reply.TTL < 0 or not reply.grantedTTL:
                raise _no_lease(lease)
            keys = tuple(sorted(map(key_of, reply.keys)))
            return LeaseState(remaining=float(reply.TTL), ttl=float(reply.grantedTTL), keys=keys)
        case Revoke(lease=lease):
            doubt = RetryState()
            try:
                await members.ask("Lease/LeaseRevoke", {"ID": lease}, deadline=deadline, what="Revoke", doubt=doubt)
            except LeaseNotFound:
                if not doubt.any:  # else it was we who ended it
                    raise _no_lease(lease) from None
            return Done()


async def grant(members: Members, ttl: float, deadline: float, *, id: int | None = None) -> Granted:
    """A lease, under an id of our own making if none is given, so that asking again grants no second one."""
    if not ttl > 0:
        raise StoreUsageError(f"ttl is {ttl:g} s; it must be above 0")
    lease, ttl_granted = await granted(members, ttl, deadline, id=id)
    return Granted(lease=lease, ttl=ttl_granted)


def _no_lease(lease: int) -> LeaseNotFound:
    return LeaseNotFound(f"lease {lease} has lapsed or was revoked; grant a new one")
