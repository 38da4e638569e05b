"""Shell: the state that all tasks of a term share, and its writes, conditional on the term."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from rdzv.node.link.wakeup import Wakeup
from store import ConditionFailed, Entry, Get, Lease, LeaseNotFound, Put, StoreError, when

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from rdzv.core.keys import Keys
    from rdzv.core.round import Round
    from rdzv.core.view import Answered, Standstill, Stuck, View
    from store import Condition, Event, Store
    from store.messages import Operation

    Fact = Event | Stuck | Standstill | Answered

SHARED_RENEWALS_PER_TTL = 4
GIVE_BACK_WITHIN = 2.0  # seconds to revoke an unused lease


@dataclass(eq=False, kw_only=True)
class Office:
    """The shared state of a coordinator's term."""

    store: Store
    keys: Keys
    view: View  # the state of the run, by which it decides
    term: int  # the create_revision of the coordinator's key
    run_lease: Lease
    wakeup: Wakeup = field(default_factory=Wakeup)  # wakes the deciding task
    inbox: deque[Fact] = field(default_factory=deque)  # facts that `view` does not have yet, in order of arrival
    failed: Exception | None = None  # the error that ended another task of the term

    @property
    def in_office(self) -> tuple[Condition, ...]:
        """The conditions of every write: this node is the coordinator."""
        return (when.create_revision(self.keys.coordinator) == self.term,)

    @property
    def round_unchanged(self) -> Condition:
        """The condition that the round in the store is that of `view`."""
        round = self.view.round
        return when.mod_revision(self.keys.round) == (0 if round is None else round.revision)

    def put(self, key: str, value: bytes) -> Put:
        """Return a write on the run's own lease."""
        return Put(key, value, lease=self.run_lease.id)

    async def write(self, *writes: Operation, also: Sequence[Condition] = ()) -> int | None:
        """Carry out `writes` at one revision; return it, or None if a condition in `also` does not hold."""
        holder = (Get(self.keys.coordinator),) if also else ()
        result = await self.store.transact(when=(*self.in_office, *also), then=writes, otherwise=holder)
        if result.succeeded:
            return result.revision
        if not any(isinstance(one, Entry) and one.create_revision == self.term for one in result.results):
            raise ConditionFailed("this node is no longer the coordinator")
        return None

    async def forget(self, number: int, term: int) -> None:
        """Delete all keys of a round or of an attempt at it; the ranks last, by which `_clear_away` finds a round."""
        await self.store.delete_prefix(self.keys.shared(number, term), when=self.in_office)
        await self.store.delete_prefix(self.keys.attempt(number, term), when=self.in_office)

    def bring(self, *facts: Fact) -> None:
        """Queue facts for the deciding task, which applies them before its next decision."""
        self.inbox.extend(facts)
        self.wakeup.changed()

    def begin(self, what: str, work: Callable[..., Coroutine[Any, Any, None]], *about: object) -> asyncio.Task[None]:
        """Start a task, named `what`, beside the deciding one; an error of it ends the term."""

        async def beside() -> None:
            try:
                await work(*about)
            except Exception as error:  # noqa: BLE001  it ends the term, which logs it
                self.failed = error
                self.wakeup.changed()

        return asyncio.create_task(beside(), name=f"{what} in run {self.keys.run_id}")


class SharedLease:
    """The lease of a round's shared store (promise R19).

    Users' keys may be large, so they do not stay for `closed_ttl` as the run's own keys do.
    """

    def __init__(self, store: Store, *, ttl: float) -> None:
        self._store = store
        self._ttl = min(ttl, store.lease_ttl_max)
        self._lease: Lease | None = None
        self._known = asyncio.Event()  # set once it is known if the last round's lease exists
        self.used: bool = False  # a round has the lease, or the commit of one is pending

    async def take(self) -> int:
        """Return the id of a lease for a round that is about to be committed."""
        await self._known.wait()
        if self._lease is None:
            self._lease, self.used = await self._store.grant(self._ttl), False
        return self._lease.id

    async def keep(self, round: Round | None) -> None:
        """Renew the lease until cancelled; begin with the lease of `round`, if any."""
        if round is not None and round.lease is not None:
            self._lease, self.used = Lease(self._store, id=round.lease, ttl=self._ttl), True
            await self._renew()
        else:
            # Grant one now, so that no round waits for it; if that fails, `take` tries again.
            with contextlib.suppress(StoreError):
                self._lease = await self._store.grant(self._ttl)
        self._known.set()
        while True:
            await anyio.sleep(self._ttl / SHARED_RENEWALS_PER_TTL)
            await self._renew()

    async def _renew(self) -> None:
        try:
            if self._lease is not None:
                await self._lease.keep_alive()
        except LeaseNotFound:  # no node has coordinated for so long that the last round has no member left
            self._lease = None
        except StoreError:
            pass  # more renewals follow before the lease ends

    async def give_back(self) -> None:
        """Revoke the lease if it is unused; if that fails, it lapses."""
        if self._lease is not None and not self.used:
            with anyio.move_on_after(GIVE_BACK_WITHIN), contextlib.suppress(StoreError):
                await self._lease.revoke()
