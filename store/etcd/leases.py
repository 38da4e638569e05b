"""Shell: leases at an etcd cluster: granted, kept, looked at and revoked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.errors import LeaseNotFound, StoreUsageError
from store.etcd.codec import entry_of
from store.etcd.gateway import RetryState
from store.etcd.receipts import granted
from store.messages import Done, Grant, Granted, KeepAlive, LeaseState, Response, Revoke, TimeToLive

if TYPE_CHECKING:
    from store.etcd.gateway import Gateway

__all__ = ["call", "grant"]


async def call(gateway: Gateway, request: Grant | KeepAlive | Revoke | TimeToLive, deadline: float) -> Response:
    """Make one request about a lease and give its response."""
    match request:
        case Grant(ttl=ttl):
            return await grant(gateway, ttl, deadline)
        case KeepAlive(lease=lease):
            reply = await gateway.ask("lease/keepalive", {"ID": str(lease)}, deadline=deadline, what="KeepAlive")
            left = int(reply.get("TTL", 0))
            if left <= 0:
                raise _no_lease(lease)
            return Granted(lease=lease, ttl=float(left))
        case TimeToLive(lease=lease):
            asked = {"ID": str(lease), "keys": True}
            reply = await gateway.ask("lease/timetolive", asked, deadline=deadline, what="TimeToLive")
            left = int(reply.get("TTL", 0))
            if left < 0 or "grantedTTL" not in reply:
                raise _no_lease(lease)
            keys = tuple(sorted(entry_of({"key": key}).key for key in reply.get("keys", ())))
            return LeaseState(remaining=float(left), ttl=float(reply["grantedTTL"]), keys=keys)
        case Revoke(lease=lease):
            doubt = RetryState()
            try:
                await gateway.ask("lease/revoke", {"ID": str(lease)}, deadline=deadline, what="Revoke", doubt=doubt)
            except LeaseNotFound:
                if not doubt.any:  # else it was we who ended it
                    raise _no_lease(lease) from None
            return Done()


async def grant(gateway: Gateway, ttl: float, deadline: float) -> Granted:
    """A lease, under an id of our own making, so that asking again grants no second one."""
    if not ttl > 0:
        raise StoreUsageError(f"ttl is {ttl:g} s; it must be above 0")
    lease, ttl_granted = await granted(gateway, ttl, deadline)
    return Granted(lease=lease, ttl=ttl_granted)


def _no_lease(lease: int) -> LeaseNotFound:
    return LeaseNotFound(f"lease {lease} has lapsed or was revoked; grant a new one")
