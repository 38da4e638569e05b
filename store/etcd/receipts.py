"""Shell: the receipts of one client, on which its writes rest: see `writes`.

They are keys of this client's own, each for one write at a time, on a lease of their own: nothing stays behind of a
client that has gone. A write that puts a key on a lease which it has granted itself has its receipt on that one: while
an answer is looked for, the lease can only lapse together with all that the write did, and a copy of the write that
comes later is refused, since its lease is gone. So a client that writes nothing else needs no further lease.
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
        self._writers_lease: int | None = None  # the last one that a write has granted itself ...
        self._free_on_it: list[Receipt] = []  # ... and the receipts that are on it

    def is_writers(self, lease: int | None) -> bool:
        """Whether this lease was granted by a write, which had its receipt on it."""
        return lease is not None and lease == self._writers_lease

    async def take(self, deadline: float, *, on: int | None = None) -> Receipt:
        """Return a receipt that nobody else uses; `on` is a lease that the write has granted itself."""
        if on is not None:
            if not self.is_writers(on):
                self._writers_lease, self._free_on_it = on, []
            return self._free_on_it.pop() if self._free_on_it else self._new(on)
        async with self._taking:
            now = anyio.current_time()
            if self._lease is None or now > self._good_until:
                # The old one lapses by itself, once those who still use it are done.
                self._lease, ttl = await granted(self._members, RECEIPTS_TTL, deadline)
                self._good_until = now + ttl - RECEIPTS_LEAST
                self._free.clear()
        return self._free.pop() if self._free else self._new(self._lease)

    def _new(self, lease: int) -> Receipt:
        return Receipt(key=self._prefix + secrets.token_hex(12), revision=0, lease=lease)

    def give_back(self, receipt: Receipt) -> None:
        """Free a receipt whose revision is known. A receipt that is not given back lapses."""
        if receipt.lease == self._lease:
            self._free.append(receipt)
        elif self.is_writers(receipt.lease):
            self._free_on_it.append(receipt)

    async def stand(self, receipt: Receipt, deadline: float) -> bool:
        """Return whether the lease of receipts is still there, as far as it is theirs; if not, a new one is granted."""
        if self.is_writers(receipt.lease):
            self._free_on_it.clear()  # whether it is there, the next attempt of the write will be told
            return True
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
    while True:
        try:
            reply = await members.ask("Lease/LeaseGrant", asked, deadline=deadline, what="Grant")
        except Failure as failure:
            if failure.trouble is not FailureKind.LEASE_EXISTS:
                raise
            # An attempt of ours has granted it, now or some time ago, or it is one that several share: its TTL is to
            # begin now.
            reply = await members.ask("Lease/LeaseKeepAlive", {"ID": lease}, deadline=deadline, what="Grant")
        if reply.TTL > 0:
            return lease, float(reply.TTL)
