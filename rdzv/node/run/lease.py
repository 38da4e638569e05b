"""The run's own lease, with which most of the run's keys expire (promise R19)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rdzv.errors import RendezvousError, RendezvousSettingsError
from store import Create, Entry, Grant, Lease, LimitExceeded, StoreError

if TYPE_CHECKING:
    from rdzv.core.keys import Keys
    from store import Store

RUN_TTL_LEAST = 60.0  # seconds that a run without nodes stays, at least, even if `closed_ttl` is shorter


async def get_or_grant_run_lease(store: Store, keys: Keys, closed_ttl: float) -> Lease:
    """Return the run's own lease; grant it if there is none. The key `keys.lease` is on it, with its TTL as value."""
    if (lease := lease_from_entry(store, await store.get(keys.lease))) is None:
        grant = run_grant(keys, closed_ttl, most=store.lease_ttl_max)
        try:
            made = await store.transact(then=(create_run_lease_key(keys, grant),), grants=(grant,))
        except LimitExceeded as error:
            raise lease_error(error, closed_ttl=closed_ttl) from error
        lease = lease_from_entry(store, made.results[0]) or Lease(store, id=keys.derived_lease_id, ttl=grant.ttl)
    return lease


def lease_from_entry(store: Store, there: object) -> Lease | None:
    """Return the lease of the key `keys.lease`; None without the key, or if its value is no TTL."""
    with contextlib.suppress(ValueError):
        if isinstance(there, Entry) and there.lease is not None:
            return Lease(store, id=there.lease, ttl=float(there.value))
    return None


def run_grant(keys: Keys, closed_ttl: float, *, most: float) -> Grant:
    """Return the grant of the run's own lease; `most` is the longest TTL that the store accepts."""
    return Grant(ttl=max(closed_ttl, min(RUN_TTL_LEAST, most)), id=keys.derived_lease_id)


def create_run_lease_key(keys: Keys, grant: Grant) -> Create:
    """Return the write of the key `keys.lease`, which has no effect if the key exists."""
    return Create(keys.lease, f"{grant.ttl:g}".encode(), lease=grant.id)


def is_ttl_limit_error(error: LimitExceeded) -> bool:
    """Return True if a lease was refused for its TTL; then the message names the store's limit."""
    return "lease_ttl_max" in str(error)


def is_store_full(error: Exception) -> bool:
    """Return True if a write was refused because the store, its disk, or the run's share of it is full."""
    text = str(error)
    return isinstance(error, LimitExceeded) and (" would hold " in text or text.startswith("nothing was written"))


def lease_error(error: LimitExceeded, *, closed_ttl: float, ttl: float | None = None) -> StoreError | RendezvousError:
    """Return the error for a refused lease. If its TTL was too long, the error names the setting to lower."""
    if not is_ttl_limit_error(error):
        return error  # the cause is not a setting, but a full store or disk
    if ttl is not None and f"ttl is {ttl:g} s" in str(error):
        return RendezvousSettingsError(f"ttl={ttl:g} s was refused: {error}; lower ttl")
    return RendezvousSettingsError(f"closed_ttl={closed_ttl:g} s was refused: {error}; lower closed_ttl")
