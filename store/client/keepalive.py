"""Shell: the keeper of a node's leases, in the event loop and over the client that it is given.

Membership must not depend on how busy a caller is. So what keeps its leases lives where no caller can hold it up: a
node's in the node thread (`rdzv.node.loops`). How one lease is kept, and when it is known to be lost, is said in
`store.keeping`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import anyio

from store.errors import StoreError
from store.interface import Lease
from store.keeping import RELEASE_WITHIN, Keeping
from store.messages import GONE_TTL

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.interface import Store

__all__ = ["HeldLease", "TaskKeeper"]


class HeldLease:
    """A lease that is being kept, or that a transaction is about to grant.

    Attributes:
        id: The lease's id, to put keys on.
        ttl: As granted, or as asked for, in seconds.
        kept: Whether it is known to have been granted; it may have been lost since.
    """

    def __init__(self, keeper: TaskKeeper, *, id: int, ttl: float, kept: bool) -> None:
        self._keeper = keeper
        self.id = id
        self.ttl = ttl
        self.kept = kept

    async def release(self) -> None:
        """Stop keeping it and revoke it, within a short time; an unreachable store lets it lapse."""
        await self._keeper.release(self)


class TaskKeeper:
    """Keeps leases in the caller's own loop, over a client that is the caller's to close."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keeping = Keeping(store)

    async def hold(
        self,
        *,
        ttl: float,
        disconnect_ttl: float | None,
        gone_ttl: float | None = GONE_TTL,
        on_lapse: Callable[[str], None],
        note: Callable[[bool], bytes] | None = None,
    ) -> HeldLease:
        """Grant a lease and keep it until it is released.

        Args:
            ttl: Seconds.
            disconnect_ttl: Seconds it may outlive the keeper's connection; None: the TTL alone decides.
            gone_ttl: Seconds it may outlive this process, as far as all of its connections tell; None: as many as
                `disconnect_ttl` gives it.
            on_lapse: Called once, in the caller's event loop, with the reason, when it must be taken for lost.
            note: Says what goes with a keep-alive; see `store.keeping`.
        """
        lease = await self._keeping.hold(ttl, disconnect_ttl, gone_ttl, on_lapse, note)
        return HeldLease(self, id=lease.id, ttl=lease.ttl, kept=True)

    def prepare(self, *, id: int, ttl: float) -> HeldLease:
        """A lease that a transaction is about to grant, by this id; `keep` it once that is done."""
        return HeldLease(self, id=id, ttl=ttl, kept=False)

    def tell_silence(self, told: Callable[[float | None], None]) -> None:
        """Have somebody told when the store has not answered for a while, and since when; and None when it has."""
        self._keeping.on_silence = told

    def renew_now(self) -> None:
        """Renew all leases at once: there is something new to say with it."""
        self._keeping.renew_now()

    def keep(
        self,
        lease: HeldLease,
        *,
        sent_at: float,
        on_lapse: Callable[[str], None],
        note: Callable[[bool], bytes] | None = None,
    ) -> None:
        """Keep a lease that was prepared, and has been granted by what was sent at `sent_at`; see `hold`."""
        assert not lease.kept, "a lease is granted once"
        lease.kept = True
        self._keeping.adopt(Lease(self._store, id=lease.id, ttl=lease.ttl), sent_at, on_lapse, note)

    async def release(self, lease: HeldLease) -> None:
        """Stop keeping a lease, and revoke it; also one that may have been granted, and whose grant nobody knows of."""
        if lease.kept:
            await self._keeping.release(lease.id)
            return
        with anyio.move_on_after(RELEASE_WITHIN, shield=True), contextlib.suppress(StoreError):
            await Lease(self._store, id=lease.id, ttl=lease.ttl).revoke(timeout=RELEASE_WITHIN)

    async def aclose(self) -> None:
        """Release everything."""
        await self._keeping.release_all()
