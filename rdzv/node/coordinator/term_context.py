"""The state that the tasks of a coordinator's term share, and their writes to the store."""

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
    from rdzv.core.view import StandstillReport, StopAnswer, StuckMember, TermView
    from store import Condition, Event, Store
    from store.messages import Operation

    Fact = Event | StuckMember | StandstillReport | StopAnswer

SHARED_RENEWALS_PER_TTL = 4
GIVE_BACK_WITHIN = 2.0  # seconds that a term's end waits for the store to revoke an unused lease


@dataclass(eq=False, kw_only=True)
class TermContext:
    """The shared state of a coordinator's term."""

    store: Store
    keys: Keys
    view: TermView  # the run's state, from which the coordinator decides
    term: int  # the revision that created the coordinator's key
    run_lease: Lease
    wakeup: Wakeup = field(default_factory=Wakeup)  # wakes the deciding task
    inbox: deque[Fact] = field(default_factory=deque)  # facts that `view` does not have yet, in order of arrival
    failed: Exception | None = None  # the error that ended another task of the term

    @property
    def term_conditions(self) -> tuple[Condition, ...]:
        """The condition of the coordinator's writes: the term has not ended."""
        return (when.create_revision(self.keys.coordinator) == self.term,)

    @property
    def round_condition(self) -> Condition:
        """The condition that no round was written to the store after that of `view`."""
        round = self.view.round
        return when.mod_revision(self.keys.round) == (0 if round is None else round.revision)

    def make_leased_put(self, key: str, value: bytes) -> Put:
        """Return a write of a key on the run's own lease."""
        return Put(key, value, lease=self.run_lease.id)

    async def write(self, *writes: Operation, also: Sequence[Condition] = ()) -> int | None:
        """Write in one transaction; return its revision, None if `also` fails; raise ConditionFailed after the term."""
        holder = (Get(self.keys.coordinator),) if also else ()
        result = await self.store.transact(when=(*self.term_conditions, *also), then=writes, otherwise=holder)
        if result.succeeded:
            return result.revision
        if not any(isinstance(one, Entry) and one.create_revision == self.term for one in result.results):
            raise ConditionFailed("this node is no longer the coordinator")
        return None

    async def delete_round(self, number: int, term: int) -> None:
        """Delete the keys of a round, or of an attempt at it; last the ranks, by which old rounds are found."""
        await self.store.delete_prefix(self.keys.shared(number, term), when=self.term_conditions)
        await self.store.delete_prefix(self.keys.round_prefix(number, term), when=self.term_conditions)

    def queue_for_decision(self, *facts: Fact) -> None:
        """Queue facts for the deciding task, which applies them before its next decision."""
        self.inbox.extend(facts)
        self.wakeup.notify()

    def spawn(self, what: str, work: Callable[..., Coroutine[Any, Any, None]], *about: object) -> asyncio.Task[None]:
        """Start a task of the term, named `what`. If the task raises, the term ends."""

        async def run_task() -> None:
            try:
                await work(*about)
            except Exception as error:  # noqa: BLE001  it ends the term, which logs it
                self.failed = error
                self.wakeup.notify()

        return asyncio.create_task(run_task(), name=f"{what} in run {self.keys.run_id}")


class SharedStoreLease:
    """The lease of a round's shared store (promise R19).

    Users' keys may be large, so after the run's end they are deleted sooner than the run's own keys.
    """

    def __init__(self, store: Store, *, ttl: float) -> None:
        self._store = store
        self._ttl = min(ttl, store.lease_ttl_max)
        self._lease: Lease | None = None
        self._known = asyncio.Event()  # set once the first grant or renewal of a lease was tried
        self.used: bool = False  # True if a round has this lease, or may have it after a pending commit

    async def acquire(self) -> int:
        """Return the id of a lease for a round about to be committed."""
        await self._known.wait()
        if self._lease is None:
            self._lease = await self._store.grant(self._ttl)
        return self._lease.id

    async def renew_until_cancelled(self, round: Round | None) -> None:
        """Renew the shared store's lease until cancelled: the lease of `round`, or a new lease."""
        if round is not None and round.lease is not None:
            self._lease, self.used = Lease(self._store, id=round.lease, ttl=self._ttl), True
            await self._renew()
        else:
            # Grant the lease now, so that no round waits for it. If granting fails now, `acquire` grants a lease.
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
        except LeaseNotFound:  # no node coordinated for the lease's TTL, so the last round has no members
            self._lease = None
        except StoreError:
            pass  # the renewal failed, but the lease lasts until the next one

    async def revoke_unused(self) -> None:
        """Revoke the lease if no round uses it; if revoking fails, the lease expires."""
        if self._lease is not None and not self.used:
            with anyio.move_on_after(GIVE_BACK_WITHIN), contextlib.suppress(StoreError):
                await self._lease.revoke()
