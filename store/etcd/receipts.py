"""The receipts of one client, on which its writes depend: see `transactions`.

A receipt is a key of this client, for one write at a time. Receipts have a lease of their own, which is replaced, not
renewed. But if a write grants a lease for its keys, its receipt is on that lease: the receipt then expires together
with the written keys, and etcd rejects a late copy of the write.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import anyio

from store.etcd.leases import grant_lease, revoke_lease
from store.etcd.transactions import Receipt

if TYPE_CHECKING:
    from store.etcd.members import Members

RECEIPTS_TTL: Final = 60.0  # seconds, of the receipts' own lease; later the outcome of an unanswered write is unknown
RECEIPTS_LEAST: Final = (
    40.0  # the fewest seconds left of their own lease for a new receipt; above a write's default timeout
)
HANG_UP_WITHIN: Final = 1.0  # seconds to delete receipts, or revoke unused leases; the remaining ones expire


class WriteReceipts:
    """The receipts of one client; `writers_lease` is the last lease that a write has granted for its own keys."""

    def __init__(self, members: Members, prefix: str) -> None:
        self._members = members
        self._prefix = prefix
        self.lease: int | None = None
        self.writers_lease: int | None = None
        self._free: defaultdict[int, list[Receipt]] = defaultdict(list)  # by lease
        self._good_until = -math.inf
        self._taking = asyncio.Lock()

    async def acquire(self, deadline: float, *, on: int | None = None) -> Receipt:
        """Return an unused receipt; `on` is a lease that this client grants for the write's keys."""
        if on is None:
            on = await self._get_own_lease(deadline)
        elif on != self.writers_lease:
            self._forget_lease_receipts(self.writers_lease)
            self.writers_lease = on
        free = self._free[on]
        return free.pop() if free else Receipt(key=self._prefix + secrets.token_hex(12), revision=0, lease=on)

    async def _get_own_lease(self, deadline: float) -> int:
        async with self._taking:
            now = anyio.current_time()
            if self.lease is None or now > self._good_until:
                self._forget_lease_receipts(self.lease)  # the receipts on the old lease expire with it
                granted = await grant_lease(self._members, RECEIPTS_TTL, deadline)
                self.lease = granted.lease
                self._good_until = now + granted.ttl - RECEIPTS_LEAST
        return self.lease

    def release_for_reuse(self, receipt: Receipt) -> None:
        """Make a receipt of known revision available again, unless its lease was replaced; then it expires."""
        if receipt.lease in (self.lease, self.writers_lease):
            self._free[receipt.lease].append(receipt)

    def forget_lapsed_lease(self, receipt: Receipt) -> None:
        """Forget a receipt's lapsed lease, with all receipts on it."""
        self._forget_lease_receipts(receipt.lease)
        if receipt.lease == self.lease:
            self.lease = None

    def _forget_lease_receipts(self, lease: int | None) -> None:
        self._free.pop(lease or 0, None)

    async def delete_all(self) -> None:
        """Revoke the receipts' own lease, which deletes them."""
        lease, self.lease = self.lease, None
        if lease is not None and self._members.is_connected:
            await revoke_lease(self._members, lease, anyio.current_time() + HANG_UP_WITHIN)
