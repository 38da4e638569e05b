"""Shell: how a lease is kept in the caller's own loop: renewed in time, and known to be lost when it may be.

A lease is known to be ours until its TTL has passed since the *sending* of the last keep-alive that was acknowledged,
on our own clock (promise R9). From then on it may be gone, whatever the network says later, and its holder is told.

`KeptLease` and `BlockingKeptLease` are for who uses the store alone. A node of a run has its leases kept in a thread,
by the same `Keeping`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from typing import TYPE_CHECKING

import anyio

from store.errors import LeaseNotFound, StoreError
from store.messages import GONE_TTL
from store.net.tasks import cancel_and_wait
from store.net.threads import Flag

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from store.calls import BlockingCalls, Calls, Lease

    NoteOf = Callable[[bool], bytes]

__all__ = ["RELEASE_WITHIN", "RENEWALS_PER_TTL", "BlockingKeptLease", "Keeping", "KeptLease", "renewed_if_old"]

log: logging.Logger = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3  # two may be lost before the lease is
LATE = 1.0  # seconds by which a keep-alive may be late before the store counts as having been away
UNANSWERED = 1.7  # seconds without an answer to any keep-alive, after which whoever wants to know is told
RELEASE_WITHIN = 2.0  # seconds to revoke a lease whose holder is leaving; else it lapses by itself


class Keeping:
    """The leases kept over one store client, in the loop that client lives in.

    Attributes:
        on_silence: Called when keep-alives have had no answer for `UNANSWERED`, with the moment of the first of them;
            and with None once there is an answer, or nothing is asked any more.
    """

    def __init__(self, store: Calls) -> None:
        self._store = store
        self.on_silence: Callable[[float | None], None] | None = None
        self._silence: asyncio.TimerHandle | None = None  # while a keep-alive has no answer
        self._tasks: dict[int, tuple[Lease, asyncio.Task[None]]] = {}
        self._ours_until: dict[int, float] = {}  # by lease: when we may no longer believe in it
        self._wanted = 0  # how often renewals were asked for
        self._sleeping: set[asyncio.Future[None]] = set()  # the leases that wait until they are to be renewed
        store.on_connection(self._connection_changed)
        store.bound_pauses(self._remaining)

    def _connection_changed(self, connected: bool) -> None:
        if connected or self._store.failure is not None:
            self.renew_now()

    def _remaining(self) -> float:
        """Seconds until the first lease may lapse; infinity if there is none."""
        return min(self._ours_until.values(), default=math.inf) - self._store.time()

    def renew_now(self) -> None:
        """Renew all leases at once: there is something new to say with it."""
        self._wanted += 1
        for sleeping in list(self._sleeping):
            _wake(sleeping)

    async def hold(
        self,
        ttl: float,
        disconnect_ttl: float | None,
        gone_ttl: float | None,
        on_lapse: Callable[[str], None],
        note: NoteOf | None = None,
    ) -> Lease:
        """Grant a lease and keep it until it is released; `on_lapse` is told once why it must be taken for lost.

        `note` says what goes with a keep-alive, given whether the store was out of reach until then.
        """
        sent_at = self._store.time()
        lease = await self._store.grant(ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl)
        sent_at = await renewed_if_old(lease, sent_at, self._store.time)
        self.adopt(lease, sent_at, on_lapse, note)
        return lease

    def adopt(self, lease: Lease, sent_at: float, on_lapse: Callable[[str], None], note: NoteOf | None = None) -> None:
        """Keep a lease from now on that was granted by what was sent at `sent_at`, as `hold` does."""
        self._heard()
        self._ours_until[lease.id] = sent_at + lease.ttl
        task = asyncio.create_task(self._keep(lease, on_lapse, note), name=f"keep lease {lease.id}")
        self._tasks[lease.id] = lease, task

    async def _keep(self, lease: Lease, on_lapse: Callable[[str], None], note: NoteOf | None) -> None:
        """Renew until it is lost."""
        reason = ""
        ours_until = self._ours_until[lease.id]
        pause = (ours_until - self._store.time()) / RENEWALS_PER_TTL
        while not reason:
            # A new connection must say at once that it keeps the lease.
            await self._sleep(min(pause, ours_until - self._store.time()))
            sent_at, wanted = self._store.time(), self._wanted
            if sent_at < ours_until:
                try:
                    since = sent_at - (ours_until - lease.ttl)  # the last one that was answered
                    said = note(since > lease.ttl / RENEWALS_PER_TTL + LATE) if note is not None else b""
                    self._expect_answer(sent_at)
                    await lease.keep_alive(note=said, timeout=max(ours_until - sent_at, 0.001))
                    self._heard()
                    self._ours_until[lease.id] = ours_until = sent_at + lease.ttl
                    # Reckoned from the sending: if the answer was long under way, a cut may have held it up, and
                    # the next cut must find the lease as fresh as the first one did.
                    pause = max(sent_at + lease.ttl / RENEWALS_PER_TTL - self._store.time(), 0.0)
                    if self._wanted != wanted:  # while this one was under way, without what is to be said since
                        pause = 0.0
                except LeaseNotFound:
                    self._heard()
                    reason = LAPSED
                except StoreError as error:
                    log.debug("lease %d was not renewed: %s", lease.id, error)
                    pause = retry_pause(lease.ttl)  # and again, still listening for a new connection
                    reason = "" if self._store.failure is None else str(self._store.failure)
            if not reason and self._store.time() >= ours_until:
                reason = not_renewed(lease.ttl)
        self._drop(lease.id)
        on_lapse(reason)

    def _expect_answer(self, sent_at: float) -> None:
        if self._silence is None and self.on_silence is not None:
            self._silence = asyncio.get_running_loop().call_later(UNANSWERED, self.on_silence, sent_at)

    def _heard(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
            if self.on_silence is not None:
                self.on_silence(None)

    async def _sleep(self, seconds: float) -> None:
        """Sleep for so long, or until `renew_now`. A scope of anyio's would cost as much as all else of a renewal."""
        loop = asyncio.get_running_loop()
        sleeping: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(max(seconds, 0.0), _wake, sleeping)
        self._sleeping.add(sleeping)
        try:
            await sleeping
        finally:
            timer.cancel()
            self._sleeping.discard(sleeping)

    def _drop(self, lease_id: int) -> tuple[Lease | None, asyncio.Task[None] | None]:
        """Keep a lease no more."""
        self._ours_until.pop(lease_id, None)
        dropped = self._tasks.pop(lease_id, (None, None))
        if not self._tasks:
            self._heard()
        return dropped

    async def release(self, lease_id: int) -> None:
        """Stop keeping a lease and revoke it, within a short time."""
        lease, task = self._drop(lease_id)
        if lease is None or task is None:
            return
        with anyio.move_on_after(RELEASE_WITHIN, shield=True), contextlib.suppress(StoreError):
            await cancel_and_wait(task)
            self._ours_until.pop(lease_id, None)  # not before: a renewal may have been under way
            await lease.revoke(timeout=RELEASE_WITHIN)

    async def release_all(self) -> None:
        """Release every lease, all at once: an unreachable store costs its time limit one time, not one per lease."""
        await asyncio.gather(*map(self.release, list(self._tasks)))


async def renewed_if_old(lease: Lease, sent_at: float, time: Callable[[], float]) -> float:
    """Renew a lease whose grant was long under way; when was sent what it is now known by.

    So it is after an outage, in which the request waited: by our clock the lease may have lapsed before we heard of it.
    As nobody relies on it yet, it may be renewed.

    Raises:
        LeaseNotFound: It has lapsed indeed.
    """
    now = time()
    if now < sent_at + lease.ttl / RENEWALS_PER_TTL:
        return sent_at
    await lease.keep_alive()
    return now


def _wake(sleeping: asyncio.Future[None]) -> None:
    if not sleeping.done():
        sleeping.set_result(None)


LAPSED = "the store has let its lease lapse"


def not_renewed(ttl: float) -> str:
    """Say that a lease is lost because the store was out of reach."""
    return f"its lease of {ttl:g} s could not be renewed in time"


def retry_pause(ttl: float) -> float:
    """Return the seconds after which a keep-alive that failed is tried again."""
    return min(0.1, ttl / 10)


class KeptLease(contextlib.AbstractAsyncContextManager["KeptLease"]):
    """A lease that is kept for as long as a block lasts, and revoked at its end: `Store.kept_lease` makes one.

    If the lease is lost, the block is cancelled and ends with `LeaseNotFound`: what it held is another's by then.

    The caller's event loop does the keeping. A caller that blocks the loop for longer than the TTL loses the lease.

    Attributes:
        id: The lease's id, to put keys on; known in the block.
        ttl: Seconds, as granted.
        lost: Why the lease must be taken for lost; None while it is held.
    """

    id: int
    ttl: float

    def __init__(self, keeping: Keeping, ttl: float, disconnect_ttl: float | None) -> None:
        self._keeping = keeping
        self.ttl = ttl
        self._disconnect_ttl = disconnect_ttl
        self._scope = anyio.CancelScope()
        self.lost: str | None = None

    def check(self) -> None:
        """Raise `LeaseNotFound` if the lease must be taken for lost."""
        if self.lost is not None:
            raise LeaseNotFound(f"lease {self.id} is lost: {self.lost}; what was held on it may be another's")

    async def __aenter__(self) -> Self:
        lease = await self._keeping.hold(self.ttl, self._disconnect_ttl, GONE_TTL, self._lapsed)
        # No await from here on: a lease that is kept must be released.
        self.id, self.ttl = lease.id, lease.ttl
        self._scope.__enter__()
        return self

    def _lapsed(self, reason: str) -> None:
        self.lost = reason
        self._scope.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        cancelled_here = bool(self._scope.__exit__(kind, error, trace))
        await self._keeping.release(self.id)
        if kind is None or cancelled_here:
            self.check()
        return cancelled_here


class BlockingKeptLease(contextlib.AbstractContextManager["BlockingKeptLease"]):
    """The blocking twin of `KeptLease`: a thread does the keeping, and nothing can cancel the block.

    So a long block calls `check` before what counts, or puts the lease's key among the conditions of its writes. A
    block whose lease was lost ends with `LeaseNotFound`.

    Attributes:
        id: The lease's id, to put keys on; known in the block.
        ttl: Seconds, as granted.
        lost: Why the lease must be taken for lost; None while it is held.
    """

    id: int
    ttl: float

    def __init__(self, store: BlockingCalls, ttl: float, disconnect_ttl: float | None) -> None:
        self._store = store
        self.ttl = ttl
        self._disconnect_ttl = disconnect_ttl
        self._released = Flag()
        self._lost: str | None = None
        self._ours_until = 0.0

    @property
    def lost(self) -> str | None:
        """Why the lease must be taken for lost: known by the clock, also while the thread waits for an answer."""
        if self._lost is None and not self._released.is_set() and self._store.time() >= self._ours_until:
            self._lost = not_renewed(self.ttl)
        return self._lost

    def check(self) -> None:
        """Raise `LeaseNotFound` if the lease must be taken for lost."""
        if (lost := self.lost) is not None:
            raise LeaseNotFound(f"lease {self.id} is lost: {lost}; what was held on it may be another's")

    def __enter__(self) -> Self:
        sent_at = self._store.time()
        # Without `gone_ttl`: a broken connection is noticed too late here to come back within that.
        self._lease = self._store.grant(self.ttl, disconnect_ttl=self._disconnect_ttl, gone_ttl=None)
        self.id, self.ttl = self._lease.id, self._lease.ttl
        if self._store.time() >= sent_at + self.ttl / RENEWALS_PER_TTL:  # as in `renewed_if_old`
            sent_at = self._store.time()
            self._lease.keep_alive()
        self._ours_until = sent_at + self.ttl
        self._thread = threading.Thread(target=self._keep, name=f"keep lease {self.id}", daemon=True)
        self._thread.start()
        return self

    def _keep(self) -> None:
        """Renew until it is released or lost. A connection that broke is only seen by asking, so ask often enough."""
        renew_every = min(self.ttl, self._disconnect_ttl or math.inf) / RENEWALS_PER_TTL
        pause = renew_every
        while not self._released.wait(pause) and self.lost is None:
            sent_at = self._store.time()
            try:
                self._lease.keep_alive(timeout=max(self._ours_until - sent_at, 0.001))
            except LeaseNotFound:
                if not self._released.is_set():
                    self._lost = LAPSED
            except StoreError as error:
                log.debug("lease %d was not renewed: %s", self.id, error)
                pause = retry_pause(self.ttl)
            else:
                self._ours_until = max(self._ours_until, sent_at + self.ttl)
                pause = renew_every

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = self.lost  # before the clock stops counting
        self._released.set()
        if lost is None:
            with contextlib.suppress(StoreError):  # an unreachable store lets it lapse
                self._lease.revoke(timeout=RELEASE_WITHIN)
        self._thread.join(RELEASE_WITHIN)
        if kind is None:
            self.check()
