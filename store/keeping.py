"""Shell: how a lease is kept: renewed in time, and known to be lost when it may be.

A lease is known to be ours until its TTL has passed since the *sending* of the last keep-alive that was acknowledged,
on our own clock (promise R9). From then on it may be gone, whatever the network says later, and its holder is told.

`kept_lease` and `BlockingKeptLease` are for users of the store alone. Their leases may have been granted to end soon
after their connection has ended. Then they are believed in for no longer than that, once the client knows of it.

A node of a run has its leases kept in a thread, by the same `Keeping`.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import logging
import math
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import anyio

from store.calls import AtOnce, Lease, finished
from store.errors import ConnectionLost, LeaseNotFound, StoreError, StoreTimeoutError
from store.messages import NOTE_BYTES_MAX
from store.net.process import process_id
from store.net.tasks import Cancelling, cancel_and_wait, to_the_end
from store.net.threads import Flag

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType
    from typing import Self, Unpack

    from store.calls import BlockingCalls, Calls, Cuts, LeaseTerms

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
LOOK_SHARE = 0.1  # of what a lease has left once its connection has ended: how often a blocking client looks for that
LOOK_LEAST = 0.03  # seconds between two such looks, at least
RELEASE_WITHIN = 2.0  # seconds to revoke a lease whose holder is leaving; else it lapses by itself
RELEASE_SOON = 0.2  # seconds for which that is waited for if the block ends because the store did not answer in time


class Belief:
    """Until when a lease may be believed in, on the client's clock."""

    def __init__(self, sent_at: float, ttl: float, cuts: Cuts | None = None, *away_ttls: float | None) -> None:
        self.renewed_at: float = sent_at  # the last renewal that was acknowledged
        self.ttl: float = ttl
        self.cut_at: float = math.inf  # the first end of a connection that no renewal has made up for
        # Without `cuts` the store heeds no end of a connection.
        self.away_ttl: float = min((each for each in away_ttls if each is not None and cuts), default=math.inf)

    @property
    def until(self) -> float:
        """When it ends."""
        return min(self.renewed_at + self.ttl, self.cut_at + self.away_ttl)

    def heard(self, cut_at: float) -> None:
        """A connection has ended; infinity: no server is there. See `Cuts`."""
        self.cut_at = cut_at if cut_at == math.inf else min(self.cut_at, cut_at)

    def renewed(self, sent_at: float, *, cut_before: float) -> None:
        """Note that a renewal was acknowledged, which makes up for a cut before that time."""
        self.renewed_at = sent_at
        if self.cut_at <= cut_before:
            self.cut_at = math.inf

    def lost(self, now: float) -> str | None:
        """Say why the lease must be taken for lost, if it must."""
        if now < self.until:
            return None
        if now < self.renewed_at + self.ttl:
            return f"its connection has ended, and it was not renewed on another within {self.away_ttl:g} s"
        return not_renewed(self.ttl)


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
        if store.cuts is not None:
            store.cuts.listeners[self._connection_ended] = None
        store.on_connection(self._connection_changed)
        store.bound_pauses(self._remaining)

    def _connection_changed(self, connected: bool) -> None:
        if connected or self.store.failure is not None:
            self.renew_now()

    def _connection_ended(self, at: float) -> None:
        for lease in tuple(self._kept):
            lease.heard(at)

    def _remaining(self) -> float:
        """Seconds until the first lease may lapse; infinity if there is none."""
        return min((lease.ours_until for lease in self._kept), default=math.inf) - self.store.time()

    def renew_now(self) -> None:
        """Renew all leases at once: there is something new to say with it."""
        for lease in self._kept:
            lease.renew_now()

    async def hold(self, ttl: float, on_lapse: Callable[[str], None], **terms: Unpack[LeaseTerms]) -> HeldLease:
        """Grant a lease and keep it until it is released; `on_lapse` is as of `HeldLease.keep`."""
        cuts, before = self.store.cuts, self.store.cuts and self.store.cuts.last
        granting = asyncio.create_task(_granted(self.store, ttl, terms))
        try:
            lease, sent_at = await asyncio.shield(granting)
        except asyncio.CancelledError:
            await to_the_end(_forget(granting))
            raise
        held = HeldLease(self, id=lease.id, ttl=lease.ttl)
        held.keep(sent_at=sent_at, on_lapse=on_lapse, terms=terms)
        if cuts is not None and cuts.last != before:  # while the grant was under way
            held.heard(cuts.last)
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
        lost: Why it must be taken for lost, once it must.
        task: What renews it.
    """

    def __init__(self, keeping: Keeping, *, id: int, ttl: float) -> None:
        self._keeping = keeping
        self._lease = Lease(keeping.store, id=id, ttl=ttl)
        self.id: int = id
        self.ttl: float = ttl
        self.kept: bool = False
        self.lost: str | None = None
        self.task: asyncio.Task[None] | None = None
        self._wanted = False  # whether it is to be renewed at once
        self._sleeping: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # while its connection has ended

    def keep(
        self,
        *,
        sent_at: float,
        on_lapse: Callable[[str], None],
        note: NoteOf | None = None,
        terms: LeaseTerms | None = None,
    ) -> None:
        """Keep it until it is released: it has been granted by what was sent at `sent_at`.

        Args:
            sent_at: On the client's clock.
            on_lapse: Told once why it must be taken for lost.
            note: Says what goes with a keep-alive, given whether the store was out of reach until then.
            terms: With what it was granted, if it is not to be believed in for longer than that.
        """
        assert not self.kept, "a lease is granted once"
        self.kept = True
        self._belief = Belief(sent_at, self.ttl, self._keeping.store.cuts, *_away_ttls(terms or {}))
        self._on_lapse = on_lapse
        self._keeping.add(self)
        self.task = asyncio.create_task(self._keep(note), name=f"keep lease {self.id}")

    @property
    def ours_until(self) -> float:
        """When it may no longer be believed in, on the client's clock."""
        return self._belief.until

    def heard(self, cut_at: float) -> None:
        """A connection has ended: renew it at once, on another one, or give it up in time. See `Belief`."""
        self._belief.heard(cut_at)
        self.renew_now()
        self._look()

    def _look(self) -> None:
        """Give it up if it may be gone; else look again when it may, as long as its connection is not made up for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._keeping.store.time()
        if (lost := self._belief.lost(now)) is not None:
            self._lapse(lost)
        elif self._belief.cut_at < math.inf:
            self._timer = asyncio.get_running_loop().call_later(self.ours_until - now, self._look)

    def _lapse(self, why: str) -> None:
        if self._keeping.drop(self):
            self.lost = why
            if self.task is not None and self.task is not asyncio.current_task():
                self.task.cancel()
            self._on_lapse(why)

    def renew_now(self) -> None:
        """Renew it at once."""
        self._wanted = True
        if self._sleeping is not None:
            _wake(self._sleeping)

    async def _keep(self, note: NoteOf | None) -> None:
        """Renew until it is lost."""
        keeping, belief, now = self._keeping, self._belief, self._keeping.store.time
        renew_every = self.ttl / RENEWALS_PER_TTL
        pause = (belief.until - now()) / RENEWALS_PER_TTL
        while self.lost is None:
            # A new connection must say at once that it keeps the lease.
            await self._sleep(min(pause, belief.until - now()))
            sent_at = now()
            self._wanted = False
            if sent_at < belief.until:
                try:
                    said = _note_of(note, sent_at - belief.renewed_at > renew_every + LATE)
                    keeping.expect_answer(sent_at)
                    await self._lease.keep_alive(note=said, timeout=max(belief.until - sent_at, 0.001))
                    keeping.heard()
                    belief.renewed(sent_at, cut_before=now())
                    # Reckoned from the sending: if the answer was long under way, a cut may have held it up, and
                    # the next cut must find the lease as fresh as the first one did.
                    pause = max(sent_at + renew_every - now(), 0.0)
                    if self._wanted:  # while this one was under way, without what is to be said since
                        pause = 0.0
                except LeaseNotFound:
                    keeping.heard()
                    self._lapse(LAPSED)
                except Exception as error:  # noqa: BLE001 - also of a defect its holder is to hear, in time
                    how = logging.DEBUG if isinstance(error, StoreError) else logging.ERROR
                    log.log(how, "lease %d was not renewed: %r", self.id, error)
                    pause = retry_pause(self.ttl)  # and again, still listening for a new connection
                    if keeping.store.failure is not None:
                        self._lapse(str(keeping.store.failure))
            if self.lost is None:
                self._look()

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

    async def release(self, *, within: float = RELEASE_WITHIN) -> None:
        """Stop keeping it and revoke it; wait so long until that is done. Also one whose grant nobody knows of."""
        if self.kept and not self._keeping.drop(self):
            return  # it is lost, or was released before
        await to_the_end(self._revoke(), within=within)

    async def _revoke(self) -> None:
        with anyio.move_on_after(RELEASE_WITHIN), contextlib.suppress(StoreError):
            if self.task is not None:
                await cancel_and_wait(self.task)
            await self._lease.revoke(timeout=RELEASE_WITHIN)


async def _forget(granting: asyncio.Future[tuple[Lease, float]]) -> None:
    """Revoke a lease whose caller was cancelled before it was granted."""
    with anyio.move_on_after(RELEASE_WITHIN), contextlib.suppress(StoreError):
        lease, _ = await granting
        await lease.revoke(timeout=RELEASE_WITHIN)


async def _granted(store: Calls, ttl: float, terms: LeaseTerms) -> tuple[Lease, float]:
    """Grant a lease, and return it with the time from which it is to be reckoned."""
    sent_at, timeout = store.time(), terms.get("timeout")
    asked: LeaseTerms = {"gone_ttl": None, **terms}
    lease = await store.grant(ttl, **asked)
    left = None if timeout is None else max(sent_at + timeout - store.time(), 0.001)
    return lease, await renewed_if_old(lease, sent_at, store.time, timeout=left)


def _away_ttls(terms: LeaseTerms) -> tuple[float | None, float | None]:
    return terms.get("disconnect_ttl"), terms.get("gone_ttl")


async def renewed_if_old(
    lease: Lease, sent_at: float, time: Callable[[], float], *, timeout: float | None = None
) -> float:
    """Renew a lease whose grant was long under way; when was sent what it is now known by.

    So it is after an outage, in which the request waited: by our clock the lease may have lapsed before we heard of it.
    As nobody relies on it yet, it may be renewed.

    Raises:
        LeaseNotFound: It has lapsed indeed.
    """
    now = time()
    if now < sent_at + lease.ttl / RENEWALS_PER_TTL:
        return sent_at
    await lease.keep_alive(timeout=timeout)
    return now


def _release_within(ended_with: type[BaseException] | None) -> float:
    did_not_answer = ended_with is not None and issubclass(ended_with, StoreTimeoutError | ConnectionLost)
    return RELEASE_SOON if did_not_answer else RELEASE_WITHIN


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
async def kept_lease(keeping: Keeping, ttl: float, **terms: Unpack[LeaseTerms]) -> AsyncIterator[HeldLease]:
    """Keep a lease for as long as a block lasts, and revoke it then.

    If the lease is lost, the task that has entered is cancelled until the block is left, which raises `LeaseNotFound`:
    what it held is another's by then. The block may be left in another task.

    The caller's event loop does the keeping. A caller that blocks the loop for longer than the TTL loses the lease.
    """
    loss = Cancelling()
    lease = await keeping.hold(ttl, loss.begin, **terms)
    try:
        try:
            yield lease
        finally:
            loss.end()
            await lease.release(within=_release_within(sys.exc_info()[0]))
    except asyncio.CancelledError:
        if not loss.was_all:
            raise
    lease.check()


class _Keeper:
    """Grants a lease in a thread, renews it, and revokes it once its holder has left or is no more.

    This thread hears no signals. So an exception out of a signal's handler, in the thread of the holder, tears nothing.

    Attributes:
        known: Set once there is a `lease`, or an `error`.
        left: Set by the holder, whose end counts as a leave, too.
        over: Set once nothing more is done.
    """

    lease: Lease

    def __init__(
        self, store: BlockingCalls, ttl: float, terms: LeaseTerms, holder: weakref.ref[BlockingKeptLease]
    ) -> None:
        self._store, self._ttl, self._terms, self._holder = store, ttl, terms, holder
        self.belief: Belief = Belief(store.time(), math.inf, store.cuts, *_away_ttls(terms))
        self.known, self.left, self.over = Flag(), Flag(), Flag()
        self.error: Exception | None = None
        self._lost: str | None = None
        self._due = 0.0  # when the next renewal is

    @property
    def lost(self) -> str | None:
        """Why the lease must be taken for lost: known by the clock, also while the thread waits for an answer."""
        if self._lost is None and not self.left.is_set():
            self._lost = self.belief.lost(self._store.time())
        return self._lost

    def start(self) -> None:
        """Begin, in a thread that hears no signals: one could tear `Thread.start`, which waits."""
        try:
            threading.Thread(target=self._run, name="keep a lease", daemon=True).start()
        except Exception as error:  # noqa: BLE001 - whatever it is, the holder must not wait for ever
            self.error = error
            self.known.set()
            self.over.set()

    def _run(self) -> None:
        cuts = self._store.cuts
        if cuts is not None:
            cuts.listeners[self._heard] = None
        try:
            self.lease, renewed_at = finished(_granted(AtOnce(self._store), self._ttl, self._terms))
            self.belief.renewed_at, self.belief.ttl = renewed_at, self.lease.ttl
            self.known.set()
            threading.current_thread().name = f"keep lease {self.lease.id}"
            self._renew()
            if self.lost is None:
                finished(self.lease.revoke(timeout=RELEASE_WITHIN))
        except Exception as error:  # noqa: BLE001 - the holder raises it, if it still waits for the grant
            self.error = error
        finally:
            if cuts is not None:
                cuts.listeners.pop(self._heard, None)
            self.known.set()
            self.over.set()

    def _heard(self, cut_at: float) -> None:
        self.belief.heard(cut_at)
        self._due = 0.0

    def _renew(self) -> None:
        """Renew until it is released or lost. A connection that broke may only be seen by asking: ask often enough."""
        belief, cuts, time = self.belief, self._store.cuts, self._store.time
        renew_every = min(belief.ttl, self._terms.get("disconnect_ttl") or math.inf) / RENEWALS_PER_TTL
        look_every = max(belief.away_ttl * LOOK_SHARE, LOOK_LEAST)
        self._due = time() + renew_every
        while not self.left.wait(max(min(self._due - time(), look_every), 0.0)):
            if self._holder() is None or self.lost is not None:
                return
            if cuts is not None and look_every < math.inf:
                cuts.look()
            sent_at = time()
            if sent_at < self._due:
                continue
            self._due = sent_at + renew_every
            try:
                finished(self.lease.keep_alive(timeout=max(belief.until - sent_at, 0.001)))
            except LeaseNotFound:
                self._lost = LAPSED
            except Exception as error:  # noqa: BLE001 - also of a defect its holder is to hear, in time
                how = logging.DEBUG if isinstance(error, StoreError) else logging.ERROR
                log.log(how, "lease %d was not renewed: %r", self.lease.id, error)
                self._due = time() + retry_pause(belief.ttl)
            else:
                belief.renewed(sent_at, cut_before=sent_at)


class BlockingKeptLease(contextlib.AbstractContextManager["BlockingKeptLease"]):
    """The blocking twin of `kept_lease`: a thread does the keeping, and nothing can cancel the block.

    So a long block calls `check` before what counts, or puts the lease's key among the conditions of its writes. A
    block whose lease was lost ends with `LeaseNotFound`. The thread ends with this object, also if the block is never
    left.

    Attributes:
        id: The lease's id, to put keys on; known in the block.
        ttl: Seconds, as granted.
    """

    id: int

    def __init__(self, store: BlockingCalls, ttl: float, **terms: Unpack[LeaseTerms]) -> None:
        self.ttl: float = ttl
        self._keeper = keeper = _Keeper(store, ttl, terms, weakref.ref(self, lambda _: keeper.left.set()))
        self._made_in = process_id()

    @property
    def lost(self) -> str | None:
        """Why the lease must be taken for lost, once it must."""
        return self._keeper.lost

    def check(self) -> None:
        """Raise `LeaseNotFound` if it must be taken for lost."""
        _check(self.id, self.lost)

    def __enter__(self) -> Self:
        keeper = self._keeper
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = self.lost  # before the clock stops counting
        self._keeper.left.set()
        if self._made_in is process_id():  # a forked child has no such thread
            self._keeper.over.wait(_release_within(kind))
        if kind is None:
            _check(self.id, lost)


def _note_of(note: NoteOf | None, away: bool) -> bytes:
    """Return what goes with a keep-alive: nothing if it cannot be made or sent, since the lease is renewed anyway."""
    try:
        said = b"" if note is None else note(away)
    except Exception:  # a defect of whoever makes notes
        log.exception("a lease is renewed without its note, which cannot be made")
        return b""
    return said if len(said) <= NOTE_BYTES_MAX else b""
