"""Shell: how a lease is kept: renewed in time, and known to be lost when it may be.

A lease is known to be ours until its TTL has passed since the *sending* of the last keep-alive that was acknowledged,
on our own clock (promise R9). From then on it may be gone, whatever the network says later, and its holder is told.

`kept_lease` and `BlockingKeptLease` are for who uses the store alone. A node of a run has its leases kept in a thread,
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

from store.calls import AtOnce, Lease, finished
from store.errors import LeaseNotFound, StoreError
from store.messages import GONE_TTL, NOTE_BYTES_MAX
from store.net.tasks import cancel_and_wait
from store.net.threads import Flag

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType
    from typing import Self

    from store.calls import BlockingCalls, Calls

    NoteOf = Callable[[bool], bytes]

__all__ = [
    "RELEASE_WITHIN",
    "RENEWALS_PER_TTL",
    "BlockingKeptLease",
    "HeldLease",
    "Keeping",
    "kept_lease",
    "renewed_if_old",
]

log: logging.Logger = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3  # two may be lost before the lease is
LATE = 1.0  # seconds by which a keep-alive may be late before the store counts as having been away
UNANSWERED = 1.7  # seconds without an answer to any keep-alive, after which whoever wants to know is told
RELEASE_WITHIN = 2.0  # seconds to revoke a lease whose holder is leaving; else it lapses by itself


class Keeping:
    """The leases kept over one store client, in the loop that client lives in.

    Attributes:
        store: The client.
        on_silence: Called when keep-alives have had no answer for `UNANSWERED`, with the moment of the first of them;
            and with None once there is an answer, or nothing is asked any more.
    """

    def __init__(self, store: Calls) -> None:
        self.store = store
        self.on_silence: Callable[[float | None], None] | None = None
        self._silence: asyncio.TimerHandle | None = None  # while a keep-alive has no answer
        self._kept: set[HeldLease] = set()
        store.on_connection(self._connection_changed)
        store.bound_pauses(self._remaining)

    def _connection_changed(self, connected: bool) -> None:
        if connected or self.store.failure is not None:
            self.renew_now()

    def _remaining(self) -> float:
        """Seconds until the first lease may lapse; infinity if there is none."""
        return min((lease.ours_until for lease in self._kept), default=math.inf) - self.store.time()

    def renew_now(self) -> None:
        """Renew all leases at once: there is something new to say with it."""
        for lease in self._kept:
            lease.renew_now()

    async def hold(
        self,
        ttl: float,
        disconnect_ttl: float | None,
        gone_ttl: float | None,
        on_lapse: Callable[[str], None],
        note: NoteOf | None = None,
    ) -> HeldLease:
        """Grant a lease and keep it until it is released; the rest is as of `HeldLease.keep`."""
        sent_at = self.store.time()
        lease = await self.store.grant(ttl, disconnect_ttl=disconnect_ttl, gone_ttl=gone_ttl)
        sent_at = await renewed_if_old(lease, sent_at, self.store.time)
        held = HeldLease(self, id=lease.id, ttl=lease.ttl)
        held.keep(sent_at=sent_at, on_lapse=on_lapse, note=note)
        return held

    async def release_all(self) -> None:
        """Release every lease, all at once: an unreachable store costs its time limit one time, not one per lease."""
        await asyncio.gather(*(lease.release() for lease in self._kept))

    # What its leases call.

    def add(self, lease: HeldLease) -> None:
        """Keep this one, too."""
        self.heard()
        self._kept.add(lease)

    def drop(self, lease: HeldLease) -> bool:
        """Keep it no more; return whether it was kept."""
        was_kept = lease in self._kept
        self._kept.discard(lease)
        if not self._kept:
            self.heard()
        return was_kept

    def expect_answer(self, sent_at: float) -> None:
        """Note that a keep-alive was sent."""
        if self._silence is None and self.on_silence is not None:
            self._silence = asyncio.get_running_loop().call_later(UNANSWERED, self.on_silence, sent_at)

    def heard(self) -> None:
        """Note that the store has answered one."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
            if self.on_silence is not None:
                self.on_silence(None)


class HeldLease:
    """A lease that is kept, or that a transaction is about to grant by this id: `keep` it once that is done.

    Attributes:
        id: The lease's id, to put keys on.
        ttl: As granted, or as asked for, in seconds.
        kept: Whether it is known to have been granted; it may have been lost since.
        ours_until: When it may no longer be believed in, on the client's clock.
        lost: Why it must be taken for lost, once it must.
        task: What renews it.
    """

    def __init__(self, keeping: Keeping, *, id: int, ttl: float) -> None:
        self._keeping = keeping
        self._lease = Lease(keeping.store, id=id, ttl=ttl)
        self.id: int = id
        self.ttl: float = ttl
        self.kept: bool = False
        self.ours_until: float = 0.0
        self.lost: str | None = None
        self.task: asyncio.Task[None] | None = None
        self._wanted = False  # whether it is to be renewed at once
        self._sleeping: asyncio.Future[None] | None = None

    def keep(self, *, sent_at: float, on_lapse: Callable[[str], None], note: NoteOf | None = None) -> None:
        """Keep it until it is released: it has been granted by what was sent at `sent_at`.

        Args:
            sent_at: On the client's clock.
            on_lapse: Told once why it must be taken for lost.
            note: Says what goes with a keep-alive, given whether the store was out of reach until then.
        """
        assert not self.kept, "a lease is granted once"
        self.kept = True
        self.ours_until = sent_at + self.ttl
        self._keeping.add(self)
        self.task = asyncio.create_task(self._keep(on_lapse, note), name=f"keep lease {self.id}")

    def renew_now(self) -> None:
        """Renew it at once."""
        self._wanted = True
        if self._sleeping is not None:
            _wake(self._sleeping)

    async def _keep(self, on_lapse: Callable[[str], None], note: NoteOf | None) -> None:
        """Renew until it is lost."""
        keeping, now = self._keeping, self._keeping.store.time
        renew_every = self.ttl / RENEWALS_PER_TTL
        pause = (self.ours_until - now()) / RENEWALS_PER_TTL
        while self.lost is None:
            # A new connection must say at once that it keeps the lease.
            await self._sleep(min(pause, self.ours_until - now()))
            sent_at = now()
            self._wanted = False
            if sent_at < self.ours_until:
                try:
                    since = sent_at - (self.ours_until - self.ttl)  # the last one that was answered
                    said = _note_of(note, since > renew_every + LATE)
                    keeping.expect_answer(sent_at)
                    await self._lease.keep_alive(note=said, timeout=max(self.ours_until - sent_at, 0.001))
                    keeping.heard()
                    self.ours_until = sent_at + self.ttl
                    # Reckoned from the sending: if the answer was long under way, a cut may have held it up, and
                    # the next cut must find the lease as fresh as the first one did.
                    pause = max(sent_at + renew_every - now(), 0.0)
                    if self._wanted:  # while this one was under way, without what is to be said since
                        pause = 0.0
                except LeaseNotFound:
                    keeping.heard()
                    self.lost = LAPSED
                except Exception as error:  # noqa: BLE001 - also of a defect its holder is to hear, in time
                    how = logging.DEBUG if isinstance(error, StoreError) else logging.ERROR
                    log.log(how, "lease %d was not renewed: %r", self.id, error)
                    pause = retry_pause(self.ttl)  # and again, still listening for a new connection
                    self.lost = None if keeping.store.failure is None else str(keeping.store.failure)
            if self.lost is None and now() >= self.ours_until:
                self.lost = not_renewed(self.ttl)
        keeping.drop(self)
        on_lapse(self.lost)

    def check(self) -> None:
        """Raise `LeaseNotFound` if it must be taken for lost."""
        _check(self.id, self.lost)

    async def _sleep(self, seconds: float) -> None:
        """Sleep for so long, or until `renew_now`. A scope of anyio's would cost as much as all else of a renewal."""
        loop = asyncio.get_running_loop()
        self._sleeping = loop.create_future()
        timer = loop.call_later(max(seconds, 0.0), _wake, self._sleeping)
        try:
            await self._sleeping
        finally:
            timer.cancel()
            self._sleeping = None

    async def release(self) -> None:
        """Stop keeping it and revoke it, within a short time; also one whose grant nobody knows of."""
        if self.kept and not self._keeping.drop(self):
            return  # it is lost, or was released before
        with anyio.move_on_after(RELEASE_WITHIN, shield=True), contextlib.suppress(StoreError):
            if self.task is not None:
                await cancel_and_wait(self.task)
            await self._lease.revoke(timeout=RELEASE_WITHIN)


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


def _check(lease: int, lost: str | None) -> None:
    if lost is not None:
        raise LeaseNotFound(f"lease {lease} is lost: {lost}; what was held on it may be another's")


def retry_pause(ttl: float) -> float:
    """Return the seconds after which a keep-alive that failed is tried again."""
    return min(0.1, ttl / 10)


@contextlib.asynccontextmanager
async def kept_lease(keeping: Keeping, ttl: float, disconnect_ttl: float | None) -> AsyncIterator[HeldLease]:
    """Keep a lease for as long as a block lasts, and revoke it then.

    If the lease is lost, the block is cancelled and ends with `LeaseNotFound`: what it held is another's by then.

    The caller's event loop does the keeping. A caller that blocks the loop for longer than the TTL loses the lease.
    """
    with anyio.CancelScope() as scope:
        lease = await keeping.hold(ttl, disconnect_ttl, GONE_TTL, lambda _: scope.cancel())
        try:
            yield lease
        finally:
            await lease.release()
    lease.check()


class BlockingKeptLease(contextlib.AbstractContextManager["BlockingKeptLease"]):
    """The blocking twin of `kept_lease`: a thread does the keeping, and nothing can cancel the block.

    So a long block calls `check` before what counts, or puts the lease's key among the conditions of its writes. A
    block whose lease was lost ends with `LeaseNotFound`.

    Attributes:
        id: The lease's id, to put keys on; known in the block.
        ttl: Seconds, as granted.
    """

    id: int

    def __init__(self, store: BlockingCalls, ttl: float, disconnect_ttl: float | None) -> None:
        self._store = store
        self.ttl: float = ttl
        self._disconnect_ttl = disconnect_ttl
        self._lost: str | None = None
        self._released = Flag()
        self._ours_until = 0.0

    @property
    def lost(self) -> str | None:
        """Why the lease must be taken for lost: known by the clock, also while the thread waits for an answer."""
        if self._lost is None and not self._released.is_set() and self._store.time() >= self._ours_until:
            self._lost = not_renewed(self.ttl)
        return self._lost

    def check(self) -> None:
        """Raise `LeaseNotFound` if it must be taken for lost."""
        _check(self.id, self.lost)

    def __enter__(self) -> Self:
        sent_at = self._store.time()
        # Without `gone_ttl`: a broken connection is noticed too late here to come back within that.
        granting = AtOnce(self._store).grant(self.ttl, disconnect_ttl=self._disconnect_ttl, gone_ttl=None)
        self._lease = finished(granting)
        self.id, self.ttl = self._lease.id, self._lease.ttl
        self._ours_until = finished(renewed_if_old(self._lease, sent_at, self._store.time)) + self.ttl
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
                finished(self._lease.keep_alive(timeout=max(self._ours_until - sent_at, 0.001)))
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
                finished(self._lease.revoke(timeout=RELEASE_WITHIN))
        self._thread.join(RELEASE_WITHIN)
        if kind is None:
            self.check()


def _note_of(note: NoteOf | None, away: bool) -> bytes:
    """Return what goes with a keep-alive: nothing if it cannot be made or sent, since the lease is renewed anyway."""
    try:
        said = b"" if note is None else note(away)
    except Exception:  # a defect of whoever makes notes
        log.exception("a lease is renewed without its note, which cannot be made")
        return b""
    return said if len(said) <= NOTE_BYTES_MAX else b""
