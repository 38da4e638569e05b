"""Shell: the receipts of one client, on which its writes rest: see `writes`.

They are keys of this client's own, each for one write at a time, on a lease of their own: nothing stays behind of a
client that has gone.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from typing import TYPE_CHECKING, Final

import anyio

from store.etcd.codec import Failure, FailureKind
from store.etcd.transactions import Receipt
from store.messages import CHOSEN_LEASE_LEAST

if TYPE_CHECKING:
    from store.etcd.members import Members

__all__ = ["HANG_UP_WITHIN", "Receipts", "granted"]

RECEIPTS_TTL: Final = 60.0
"""In seconds. A write that is not answered for so long is one that nobody can know of any more."""

RECEIPTS_LEAST: Final = 40.0
"""In seconds; with less than this left, a new lease is taken: more than the default timeout of a call."""

HANG_UP_WITHIN: Final = 1.0
"""In seconds, for taking receipts back; else their lease lapses."""


class Receipts:
    """The receipts of one client: keys of its own, on a lease of its own, each for one write at a time."""

    def __init__(self, members: Members, prefix: str) -> None:
        self._members = members
        self._prefix = prefix
        self._free: list[Receipt] = []
        self._lease: int | None = None
        self._good_until = -math.inf
        self._taking = asyncio.Lock()

    async def take(self, deadline: float) -> Receipt:
        """Return a receipt that nobody else uses."""
        async with self._taking:
            now = anyio.current_time()
            if self._lease is None or now > self._good_until:
                # The old one lapses by itself, once those who still use it are done.
                self._lease, ttl = await granted(self._members, RECEIPTS_TTL, deadline)
                self._good_until = now + ttl - RECEIPTS_LEAST
                self._free.clear()
        if self._free:
            return self._free.pop()
        return Receipt(key=self._prefix + secrets.token_hex(12), revision=0, lease=self._lease)

    def give_back(self, receipt: Receipt) -> None:
        """Free a receipt whose revision is known. A receipt that is not given back lapses."""
        if receipt.lease == self._lease:
            self._free.append(receipt)

    async def stand(self, deadline: float) -> bool:
        """Return whether their lease is still there; if not, the next one is on a new one."""
        asked = {"ID": self._lease}
        reply = await self._members.ask("Lease/LeaseTimeToLive", asked, deadline=deadline, what="a question")
        if reply.TTL > 0:
            return True
        self._lease = None
        self._free.clear()
        return False

    async def give_up(self) -> None:
        """Take all of them back."""
        lease, self._lease = self._lease, None
        if lease is not None and self._members.connected:
            await self._members.ask(
                "Lease/LeaseRevoke", {"ID": lease}, deadline=anyio.current_time() + HANG_UP_WITHIN, what="Revoke"
            )


async def granted(members: Members, ttl: float, deadline: float, *, id: int | None = None) -> tuple[int, float]:
    """A lease, and its TTL as granted: in whole seconds, and at least etcd's own least.

    A new one, or that of an `id` that was chosen, which may be there already.
    """
    lease = id or secrets.randbelow(CHOSEN_LEASE_LEAST - 1) + 1
    asked = {"ID": lease, "TTL": math.ceil(ttl)}
    try:
        reply = await members.ask("Lease/LeaseGrant", asked, deadline=deadline, what="Grant")
    except Failure as failure:
        if failure.trouble is not FailureKind.LEASE_EXISTS:
            raise
        # It was an attempt of ours whose answer was lost, or is one that several share.
        reply = await members.ask("Lease/LeaseTimeToLive", {"ID": lease}, deadline=deadline, what="Grant")
        return lease, float(reply.grantedTTL or math.ceil(ttl))
    return lease, float(reply.TTL)
