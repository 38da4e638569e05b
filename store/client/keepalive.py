"""Shell: a lease that a transaction grants, and that is kept from then on.

How a lease is kept, and when it is known to be lost, is said in `store.keeping`. A node keeps its leases where no
caller can hold it up, in the node thread (`rdzv.node.loops`): membership must not depend on how busy a caller is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import anyio

from store.errors import StoreError
from store.interface import Lease
from store.keeping import RELEASE_WITHIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.interface import Store
    from store.keeping import Keeping

__all__ = ["HeldLease"]


class HeldLease:
    """A lease that a transaction is about to grant, by this id; `keep` it once that is done.

    Attributes:
        id: The lease's id, to put keys on.
        ttl: As granted, or as asked for, in seconds.
        kept: Whether it is known to have been granted; it may have been lost since.
    """

    def __init__(self, store: Store, keeping: Keeping, *, id: int, ttl: float) -> None:
        self._lease = Lease(store, id=id, ttl=ttl)
        self._keeping = keeping
        self.id: int = id
        self.ttl: float = ttl
        self.kept: bool = False

    def keep(
        self, *, sent_at: float, on_lapse: Callable[[str], None], note: Callable[[bool], bytes] | None = None
    ) -> None:
        """Keep it: it has been granted by what was sent at `sent_at`; the other arguments are those of `Keeping`."""
        assert not self.kept, "a lease is granted once"
        self.kept = True
        self._keeping.adopt(self._lease, sent_at, on_lapse, note)

    async def release(self) -> None:
        """Stop keeping it and revoke it, within a short time; also one whose grant nobody knows of."""
        if self.kept:
            await self._keeping.release(self.id)
            return
        with anyio.move_on_after(RELEASE_WITHIN, shield=True), contextlib.suppress(StoreError):
            await self._lease.revoke(timeout=RELEASE_WITHIN)
