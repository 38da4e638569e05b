"""Shell: what all rooms of a coordinator's term share: its picture of the run, and writing on condition of the term."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

import anyio

from rdzv.node.link.wakeup import Wakeup
from store import ConditionFailed, Entry, Get, Lease, LeaseNotFound, Put, StoreError, when

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from rdzv.core.keys import Keys
    from rdzv.core.round import Round
    from rdzv.core.view import Answered, Standstill, Stuck, View
    from store import Condition, Event, Store
    from store.messages import Operation

    Fact = Event | Stuck | Standstill | Answered

__all__ = ["Office", "SharedLease"]

SHARED_RENEWALS_PER_TTL = 4
GIVE_BACK_WITHIN = 2.0  # seconds to revoke a lease that turned out not to be needed


class Office:
    """The office of a coordinator, for one term.

    Attributes:
        store: The client.
        keys: The run's keys.
        view: The picture of the run.
        term: The revision that made the key of the role.
        in_office: The conditions of everything that is written in this term.
        wakeup: Wakes the deciding task.
        inbox: Facts that the deciding task has not folded into the picture yet, in the order in which they came.
        failed: Why something that the deciding task relies on has ended.
    """

    def __init__(self, store: Store, keys: Keys, view: View, *, term: int, run_lease: Lease) -> None:
        self.store = store
        self.keys = keys
        self.view = view
        self.term = term
        self.in_office: tuple[Condition, ...] = (when.create_revision(keys.coordinator) == term,)
        self.wakeup: Wakeup = Wakeup()
        self.inbox: deque[Fact] = deque()
        self.failed: Exception | None = None
        self._run_lease = run_lease

    def put(self, key: str, value: bytes) -> Put:
        """A write on the run's own lease: what it writes goes with the run."""
        return Put(key, value, lease=self._run_lease.id)

    async def write(self, *writes: Operation, also: Sequence[Condition] = ()) -> int | None:
        """Write all of it at one revision, if these conditions hold as well; that revision, or None if they do not.

        Raises:
            ConditionFailed: This node is no longer the coordinator.
        """
        holder = (Get(self.keys.coordinator),) if also else ()
        result = await self.store.transact(when=(*self.in_office, *also), then=writes, otherwise=holder)
        if result.succeeded:
            return result.revision
        if not any(isinstance(one, Entry) and one.create_revision == self.term for one in result.results):
            raise ConditionFailed("this node is no longer the coordinator")
        return None

    async def forget(self, number: int, term: int) -> None:
        """Delete all of one round, or of an attempt at one; the ranks last, since by them the rest is found."""
        await self.store.delete_prefix(self.keys.shared(number, term), when=self.in_office)
        await self.store.delete_prefix(self.keys.attempt(number, term), when=self.in_office)

    def bring(self, *facts: Fact) -> None:
        """Bring facts to the deciding task, which folds them into the picture before its next decision."""
        self.inbox.extend(facts)
        self.wakeup.changed()

    def begin(self, what: str, work: Callable[..., Coroutine[Any, Any, None]], *about: object) -> asyncio.Task[None]:
        """Do something beside the deciding task, which is told of an error: it must not wait for what never comes."""

        async def beside() -> None:
            try:
                await work(*about)
            except Exception as error:  # noqa: BLE001  it ends the term, which says so
                self.failed = error
                self.wakeup.changed()

        return asyncio.create_task(beside(), name=f"{what} in run {self.keys.run_id}")


class SharedLease:
    """The lease of what the members of a round share (promise R19).

    It is the only thing of a run that is large, so that it does not stay as long as the run is remembered. Whoever
    coordinates renews it; nobody does once the last member has gone, in whichever way. A successor goes on with the
    same lease.

    Attributes:
        used: Whether a round goes with it, or may: its commit is under way.
    """

    def __init__(self, store: Store, *, ttl: float) -> None:
        self._store = store
        self._ttl = min(ttl, store.lease_ttl_max)
        self._lease: Lease | None = None
        self._known = asyncio.Event()  # whether that of the last round is still there
        self.used: bool = False

    async def take(self) -> int:
        """The id of the lease, for a round that is about to be completed."""
        await self._known.wait()
        if self._lease is None:
            self._lease, self.used = await self._store.grant(self._ttl), False
        return self._lease.id

    async def keep(self, round: Round | None) -> None:
        """Renew it for as long as this node coordinates, beginning with that of the last round, if there is one."""
        if round is not None and round.lease is not None:
            self._lease, self.used = Lease(self._store, id=round.lease, ttl=self._ttl), True
            await self._renew()
        else:
            # Now, so that no round waits for it once its last node has come. If it fails, `take` tries again.
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
        except LeaseNotFound:  # nobody coordinated for so long: no member of the last round is left, either
            self._lease = None
        except StoreError:
            pass  # there are more times before it matters

    async def give_back(self) -> None:
        """Revoke it if no round goes with it. It lapses if that cannot be done."""
        if self._lease is not None and not self.used:
            with anyio.move_on_after(GIVE_BACK_WITHIN), contextlib.suppress(StoreError):
                await self._lease.revoke()
