"""Keeps leases: renews them in time, and knows when they may be lost.

A lease is valid until its TTL has passed since the *sending* of the last acknowledged keep-alive, on this client's
clock (promise R9), including time for which the client's machine was suspended. Once the client has noticed the end of
a connection, a lease with `disconnect_ttl` or `gone_ttl` is valid for at most that many seconds more.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

import anyio

from store.calls import BlockingAsAsync, Lease, run_synchronously
from store.errors import ConnectionLost, LeaseNotFound, StoreError, StoreTimeoutError, StoreUsageError
from store.messages import NOTE_BYTES_MAX
from store.net.process import process_identity
from store.net.tasks import RepeatedCancel, cancel_and_wait, run_shielded, run_to_completion
from store.net.threads import Flag

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Self, Unpack

    from store.calls import BlockingCalls, Calls, DisconnectNotifier, LeaseTerms

    NoteOf = Callable[[bool], bytes]

log: logging.Logger = logging.getLogger(__name__)

SUSPENDED_LEAST = 1.0  # seconds; a shorter suspension may be only a pause between the readings of two clocks
RENEWALS_PER_TTL = 3  # keep-alives per TTL
LATE = 1.0  # seconds by which a keep-alive may be late before its note says so
UNANSWERED = 1.7  # seconds without an answer to keep-alives before `on_silence` is called
LOOK_SHARE = 0.1  # blocking clients check for lost connections at intervals of this share of `away_ttl`
LOOK_LEAST = 0.03  # seconds; the shortest such interval
RELEASE_WITHIN = 2.0  # seconds to revoke a lease or leave a round; leases expire otherwise
LAPSED = "the store has let its lease lapse"
RELEASE_SOON = 0.2  # seconds to revoke a lease after a timeout or an error of the store
_suspended_for = 0.0


def time_suspended() -> float:
    """Return the seconds for which this machine was suspended since its start; `CLOCK_MONOTONIC` omits them."""
    global _suspended_for
    if hasattr(time, "CLOCK_BOOTTIME"):  # `max`: a pause between the two readings lowers their difference
        _suspended_for = max(_suspended_for, time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())
    return _suspended_for


class LeaseValidity:
    """The time until which a lease is valid, on the client's clock."""

    def __init__(self, sent_at: float, ttl: float, cuts: DisconnectNotifier | None, terms: LeaseTerms) -> None:
        self.renewed_at: float = sent_at  # when the grant or last acknowledged renewal was sent
        self._slept = time_suspended()
        self.ttl: float = ttl
        self.cut_at: float = math.inf  # when a connection first ended since the renewal; infinity also after a refusal
        # A store without `cuts` ends no lease early when a connection ends.
        away_ttls = (terms.get("disconnect_ttl"), terms.get("gone_ttl")) if cuts is not None else ()
        # Ignore values that are no numbers: the grant rejects them.
        self.away_ttl: float = min((each for each in away_ttls if isinstance(each, int | float)), default=math.inf)

    @property
    def until(self) -> float:
        """The time at which the lease may be gone."""
        slept, until = time_suspended() - self._slept, min(self.renewed_at + self.ttl, self.cut_at + self.away_ttl)
        return until - slept if slept > SUSPENDED_LEAST else until

    def note_disconnect(self, cut_at: float) -> None:
        """Note that a connection ended at `cut_at`; infinity: connecting was refused, so no server ends leases."""
        self.cut_at = cut_at if cut_at == math.inf else min(self.cut_at, cut_at)

    def note_renewal(self, sent_at: float, slept: float, *, cut_before: float) -> None:
        """Note a renewal, sent when `time_suspended()` was `slept`; forget disconnects up to `cut_before`."""
        self.renewed_at, self._slept = sent_at, slept
        if self.cut_at <= cut_before:
            self.cut_at = math.inf

    def loss_reason(self, now: float) -> str | None:
        """Return why the lease is lost, or None."""
        if now < self.until:
            return None
        if self.cut_at + self.away_ttl <= now < self.renewed_at + self.ttl:
            return f"its connection has ended, and it was not renewed on another within {self.away_ttl:g} s"
        return f"its lease of {self.ttl:g} s could not be renewed in time"


class KeptLeases:
    """The leases kept over one store client, in its event loop.

    If a keep-alive has no answer for `UNANSWERED` seconds, `on_silence` is called with the time of its sending. After
    an answer, it is called with None.
    """

    def __init__(self, store: Calls) -> None:
        self.store = store
        self.on_silence: Callable[[float | None], None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self.kept: dict[HeldLease, None] = {}
        if store.cuts is not None:
            store.cuts.listeners[self._handle_disconnect] = None
        store.on_connection_change(self._renew_if_connected)
        store.cap_retry_pauses(lambda: min((lease.valid_until for lease in self.kept), default=math.inf) - store.time())

    def _renew_if_connected(self, connected: bool) -> None:
        if connected or self.store.failure is not None:
            self.renew_now()

    def _handle_disconnect(self, at: float) -> None:
        for lease in tuple(self.kept):
            lease.note_disconnect(at)

    def renew_now(self) -> None:
        """Renew all leases at once, with new notes."""
        for lease in self.kept:
            lease.renew_now()

    async def grant_kept(self, ttl: float, on_lapse: Callable[[str], None], **terms: Unpack[LeaseTerms]) -> HeldLease:
        """Grant a lease and keep it; `on_lapse` as in `HeldLease.keep`."""
        cuts, before = self.store.cuts, self.store.cuts and self.store.cuts.last
        granting = asyncio.create_task(_grant_lease(self.store, ttl, terms))
        try:
            lease, sent_at = await asyncio.shield(granting)
        except asyncio.CancelledError:
            await run_shielded(_revoke_when_granted(granting))
            raise
        held = HeldLease(self, id=lease.id, ttl=lease.ttl)
        held.keep(sent_at=sent_at, on_lapse=on_lapse, terms=terms)
        if cuts is not None and cuts.last != before:
            held.note_disconnect(cuts.last)
        return held

    async def release_all(self) -> None:
        """Release all leases concurrently: an unreachable store costs one timeout."""
        await run_to_completion(*(lease.release() for lease in self.kept))

    def add_lease(self, lease: HeldLease) -> None:
        """Add a lease, which its own task renews."""
        self.note_keep_alive_answered()
        self.kept[lease] = None

    def remove_lease(self, lease: HeldLease) -> bool:
        """Remove a lease; return True if it was kept."""
        was_kept = lease in self.kept
        self.kept.pop(lease, None)
        if not self.kept:
            self.note_keep_alive_answered()
        return was_kept

    def note_keep_alive_sent(self, sent_at: float) -> None:
        """Note that a keep-alive was sent."""
        if self._silence is None and self.on_silence is not None:
            self._silence = asyncio.get_running_loop().call_later(UNANSWERED, self.on_silence, sent_at)

    def note_keep_alive_answered(self) -> None:
        """Note an answer of the store."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
            if self.on_silence is not None:
                self.on_silence(None)


class HeldLease:
    """A lease, kept once `keep` is called: by `grant_kept`, or after a transaction by the caller."""

    def __init__(self, keeping: KeptLeases, *, id: int, ttl: float) -> None:
        self._keeping = keeping
        self._lease = Lease(keeping.store, id=id, ttl=ttl)
        self.id: int = id
        self.ttl: float = ttl
        self.kept: bool = False
        self.lost: str | None = None  # why the lease was lost, or None
        self.task: asyncio.Task[None] | None = None  # renews the lease
        self._wanted = False  # True if `renew_now` was called since the last keep-alive was sent
        self._sleeping: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def keep(
        self,
        *,
        sent_at: float,
        on_lapse: Callable[[str], None],
        note: NoteOf | None = None,
        terms: LeaseTerms | None = None,
    ) -> None:
        """Keep the lease until its release. The request for the grant was sent at `sent_at`, on the client's clock.

        If the lease is lost, `on_lapse` gets the reason. `note` returns the note of a keep-alive; its argument is
        True if the keep-alive is late by `LATE`. `terms` are options of the grant that may end the lease early.
        """
        assert not self.kept, "a lease is granted once"
        self.kept = True
        self._belief = LeaseValidity(sent_at, self.ttl, self._keeping.store.cuts, terms or {})
        self._on_lapse = on_lapse
        self._keeping.add_lease(self)
        self.task = asyncio.create_task(self._renew_until_lost(note), name=f"keep lease {self.id}")
        self._check_expiry()

    @property
    def valid_until(self) -> float:
        """The time, on the client's clock, at which the lease may be gone."""
        return self._belief.until

    def note_disconnect(self, cut_at: float) -> None:
        """Note the end of a connection: renew the lease on another connection, or report its loss in time."""
        self._belief.note_disconnect(cut_at)
        self.renew_now()
        self._check_expiry()

    def _check_expiry(self) -> None:
        """Note the loss of the lease if its time is over; else set a timer: `_renew_until_lost` may sleep longer."""
        if self not in self._keeping.kept:
            return
        if self._timer is not None:
            self._timer.cancel()
        if (lost := self._belief.loss_reason(self._keeping.store.time())) is not None:
            self._report_loss(lost)
        else:
            left = self.valid_until - self._keeping.store.time()
            self._timer = asyncio.get_running_loop().call_later(left, self._check_expiry)

    def _report_loss(self, why: str) -> None:
        if self._keeping.remove_lease(self):
            self.lost = why
            if self.task is not None and self.task is not asyncio.current_task():
                self.task.cancel()
            self._on_lapse(why)

    def renew_now(self) -> None:
        """Renew the lease at once."""
        self._wanted = True
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)

    async def _renew_until_lost(self, note: NoteOf | None) -> None:
        keeping, belief, now = self._keeping, self._belief, self._keeping.store.time
        renew_every = self.ttl / RENEWALS_PER_TTL
        pause = (belief.until - now()) / RENEWALS_PER_TTL
        while self.lost is None:
            # `renew_now` ends this sleep: a new connection must keep the lease at once.
            await self._sleep_until_woken(min(pause, belief.until - now()))
            sent_at, slept = now(), time_suspended()
            self._wanted = False
            if sent_at < belief.until:
                try:
                    said = _note_or_empty(note, sent_at - belief.renewed_at > renew_every + LATE)
                    keeping.note_keep_alive_sent(sent_at)
                    await self._lease.keep_alive(note=said, timeout=max(belief.until - sent_at, 0.001))
                    keeping.note_keep_alive_answered()
                    belief.note_renewal(sent_at, slept, cut_before=now())
                    # Count the pause from the sending of the keep-alive: a lost connection may have delayed the answer.
                    pause = max(sent_at + renew_every - now(), 0.0)
                    if self._wanted:  # `renew_now` was called since the sending, for a newer note
                        pause = 0.0
                except LeaseNotFound:
                    keeping.note_keep_alive_answered()
                    self._report_loss(LAPSED)
                except Exception as error:  # noqa: BLE001 - retry after any error, until the lease is lost
                    pause = _log_failed_renewal(error, self._lease)  # a new connection ends the pause
                    if keeping.store.failure is not None:
                        self._report_loss(str(keeping.store.failure))
            self._check_expiry()

    def check(self) -> None:
        """Raise `LeaseNotFound` if the lease is lost."""
        self._check_expiry()
        _raise_if_lease_lost(self.id, self.lost)

    async def _sleep_until_woken(self, seconds: float) -> None:
        self._sleeping = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([self._sleeping], timeout=max(seconds, 0.0))
        finally:
            self._sleeping = None

    async def release(self, *, within: float = RELEASE_WITHIN) -> None:
        """Revoke the lease within `within` seconds, even if it may not exist."""
        if self.kept and not self._keeping.remove_lease(self):
            return  # the lease was lost, or released before
        if self._timer is not None:
            self._timer.cancel()
        await run_shielded(self._stop_and_revoke(), within=within)

    async def _stop_and_revoke(self) -> None:
        with anyio.move_on_after(RELEASE_WITHIN), contextlib.suppress(StoreError):
            if self.task is not None:
                await cancel_and_wait(self.task)
            await self._lease.revoke(timeout=RELEASE_WITHIN)


async def _revoke_when_granted(granting: asyncio.Future[tuple[Lease, float]]) -> None:
    with anyio.move_on_after(RELEASE_WITHIN), contextlib.suppress(StoreError):
        lease, _ = await granting
        await lease.revoke(timeout=RELEASE_WITHIN)


async def _grant_lease(store: Calls, ttl: float, terms: LeaseTerms) -> tuple[Lease, float]:
    sent_at, timeout = store.time(), terms.get("timeout")
    asked: LeaseTerms = {"gone_ttl": None, **terms}
    lease = await store.grant(ttl, **asked)
    left = None if timeout is None else max(sent_at + timeout - store.time(), 0.001)
    try:
        return lease, await renew_if_old(lease, sent_at, store.time, timeout=left)
    except StoreError:
        with contextlib.suppress(StoreError):
            await lease.revoke(timeout=RELEASE_SOON)
        raise


async def renew_if_old(
    lease: Lease, sent_at: float, time: Callable[[], float], *, timeout: float | None = None
) -> float:
    """Renew a lease if its grant took long; return when the renewal, or else the grant, was sent."""
    now = time()
    if now < sent_at + lease.ttl / RENEWALS_PER_TTL:
        return sent_at
    await lease.keep_alive(timeout=timeout)
    return now


def _release_timeout(ended_with: type[BaseException] | None) -> float:
    did_not_answer = ended_with is not None and issubclass(ended_with, StoreTimeoutError | ConnectionLost)
    return RELEASE_SOON if did_not_answer else RELEASE_WITHIN


def _raise_if_lease_lost(lease: int, lost: str | None) -> None:
    if lost is not None:
        raise LeaseNotFound(f"lease {lease} is lost: {lost}; its keys may have another holder")


def _log_failed_renewal(error: Exception, lease: Lease) -> float:
    """Log why a lease was not renewed; return the seconds until its keep-alive is retried."""
    how = logging.DEBUG if isinstance(error, StoreError) else logging.ERROR
    log.log(how, "lease %d was not renewed: %r", lease.id, error)
    return min(0.1, lease.ttl / 10)


@contextlib.asynccontextmanager
async def kept_lease(keeping: KeptLeases, ttl: float, **terms: Unpack[LeaseTerms]) -> AsyncIterator[HeldLease]:
    """Keep a lease during a block, which may end in another task; then revoke it.

    If the lease is lost, the task that entered the block is cancelled until it leaves, and `LeaseNotFound` is raised.
    The lease is lost if the event loop is blocked for longer than the TTL.
    """
    loss, made_in = RepeatedCancel(), process_identity()
    lease = await keeping.grant_kept(ttl, loss.begin, **terms)
    try:
        try:
            yield lease
        finally:
            if made_in is not process_identity() and lease.task is not None:
                lease.task.cancel()  # a forked child leaves the leases to its parent
                keeping.kept.clear()
            lease._check_expiry()
            loss.end()
            await lease.release(within=_release_timeout(sys.exc_info()[0]))
    except asyncio.CancelledError:
        if not loss.was_only_cause:
            raise
    lease.check()


class _LeaseKeeper:
    lease: Lease

    def __init__(
        self, store: BlockingCalls, ttl: float, terms: LeaseTerms, holder: weakref.ref[BlockingKeptLease]
    ) -> None:
        self._store, self._ttl, self._terms, self._holder = store, ttl, terms, holder
        self.belief: LeaseValidity = LeaseValidity(store.time(), math.inf, store.cuts, terms)
        self.known, self.left, self.over = Flag(), Flag(), Flag()
        self.error: Exception | None = None
        self._lost: str | None = None
        self._due = 0.0

    @property
    def loss_reason(self) -> str | None:
        if self._lost is None and not self.left.is_set():
            failed = self._store.failure
            self._lost = str(failed) if failed is not None else self.belief.loss_reason(self._store.time())
        return self._lost

    def start(self) -> None:
        # Called in a new thread, where no signal's handler can interrupt `Thread.start`.
        try:
            threading.Thread(target=self._keep_lease, name="keep a lease", daemon=True).start()
        except Exception as error:  # noqa: BLE001 - any error must end the holder's wait
            self.error = error
            self.known.set()
            self.over.set()

    def _keep_lease(self) -> None:
        cuts = self._store.cuts
        if cuts is not None:
            cuts.listeners[self._note_disconnect] = None
        try:
            self.lease, renewed_at = run_synchronously(
                _grant_lease(BlockingAsAsync(self._store), self._ttl, self._terms)
            )
            self.belief.renewed_at, self.belief.ttl = renewed_at, self.lease.ttl
            self.known.set()
            threading.current_thread().name = f"keep lease {self.lease.id}"
            self._renew_until_left()
            if self.loss_reason is None:
                run_synchronously(self.lease.revoke(timeout=RELEASE_WITHIN))
        except Exception as error:  # noqa: BLE001 - the holder raises the error, if still waiting
            self.error = error
        finally:
            if cuts is not None:
                cuts.listeners.pop(self._note_disconnect, None)
            self.known.set()
            self.over.set()

    def _note_disconnect(self, cut_at: float) -> None:
        self.belief.note_disconnect(cut_at)
        self._due = 0.0

    def _renew_until_left(self) -> None:
        belief, cuts, time = self.belief, self._store.cuts, self._store.time
        renew_every = min(belief.ttl, self._terms.get("disconnect_ttl") or math.inf) / RENEWALS_PER_TTL
        look_every = max(belief.away_ttl * LOOK_SHARE, LOOK_LEAST)
        self._due = time() + renew_every
        while not self.left.wait(max(min(self._due - time(), look_every), 0.0)):
            if self._holder() is None or self.loss_reason is not None:
                return
            if cuts is not None and look_every < math.inf:
                cuts.look()
            sent_at, slept = time(), time_suspended()
            if sent_at < self._due:
                continue
            self._due = sent_at + renew_every
            try:
                run_synchronously(self.lease.keep_alive(timeout=max(belief.until - sent_at, 0.001)))
            except LeaseNotFound:
                self._lost = LAPSED
            except Exception as error:  # noqa: BLE001 - retry after any error, until the lease is lost
                self._due = time() + _log_failed_renewal(error, self.lease)
            else:
                belief.note_renewal(sent_at, slept, cut_before=sent_at)


class BlockingKeptLease(contextlib.AbstractContextManager["BlockingKeptLease"]):
    """The blocking twin of `kept_lease`: a thread renews the lease, and the block is not cancelled.

    Call `check` before critical steps, or make writes conditional on the lease's key. If the lease is lost, the block
    ends with `LeaseNotFound`, unless it raises.
    """

    id: int

    def __init__(self, store: BlockingCalls, ttl: float, **terms: Unpack[LeaseTerms]) -> None:
        self.ttl: float = ttl
        self._keeper = keeper = _LeaseKeeper(store, ttl, terms, weakref.ref(self, lambda _: keeper.left.set()))
        self._made_in = process_identity()

    @property
    def lost(self) -> str | None:
        """The reason why the lease was lost, or None."""
        return self._keeper.loss_reason

    def check(self) -> None:
        """Raise `LeaseNotFound` if the lease is lost."""
        _raise_if_lease_lost(self.id, self.lost)

    def __enter__(self) -> Self:
        keeper = self._keeper
        if keeper.known.is_set() or keeper.left.is_set():
            raise StoreUsageError("a kept lease is for one `with`: call kept_lease again")
        try:
            _thread.start_new_thread(keeper.start, ())
            keeper.known.wait()
        except BaseException:
            keeper.left.set()
            raise
        if keeper.error is not None:
            raise keeper.error
        self.id, self.ttl = keeper.lease.id, keeper.lease.ttl
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        lost = self.lost  # read before `left` is set: afterwards no loss is noted
        self._keeper.left.set()
        if self._made_in is process_identity():  # this process has the thread; a forked child has not
            self._keeper.over.wait(_release_timeout(kind))
        if kind is None:
            _raise_if_lease_lost(self.id, lost)


def _note_or_empty(note: NoteOf | None, away: bool) -> bytes:
    try:
        said = b"" if note is None else note(away)
    except Exception:
        log.exception("a lease is renewed without its note, which cannot be made")
        return b""
    return said if len(said) <= NOTE_BYTES_MAX else b""
