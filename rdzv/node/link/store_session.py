"""The part of a node's state that belongs to its connection to one store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any

import anyio

from rdzv.node.link.head_watcher import HeadWatcher
from rdzv.node.run.lease import get_or_grant_run_lease
from store import ConnectionLost, Lease, LeaseNotFound, StoreError
from store.keeping import RELEASE_WITHIN, KeptLeases
from store.messages import CHOSEN_LEASE_LEAST
from store.net.dialing import NOBODY_LISTENS
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Coroutine

    from rdzv.core.keys import Keys
    from store import Store

log: logging.Logger = logging.getLogger(__name__)

ROUND_TRIPS_TO_RECONNECT = 3  # round trips of a reconnection: the connection, the greeting, the welcome
SLOW = 0.5  # if the store takes this many seconds to answer, a waiting node's reason says so
ANSWERS_KEPT = 3  # answer times that a session keeps; the shortest counts as the round trip: longer ones have delays
IF_HOSTED = "if a node hosted this store, it ended with that node's process; a store of `rdzv serve` does not"
SAY_AWAY_AFTER = 2.9  # seconds before a warning of a disconnected store (R22), or of an unanswered arrival
ASK_EVERY = 1.0  # least seconds, times `ASK_SPREAD`, between checks of the store while a caller waits
ASK_EVERY_PER_NODE = 0.01  # seconds per node of the run between checks: the store gets at most some 100 a second
ASK_SPREAD = (0.75, 1.25)  # random factor of the seconds between checks, so that nodes do not check together
ASK_EARLY = 0.01  # seconds by which a check may be early: a timer for the remainder might fire at once, repeatedly
RUN_RENEWALS_PER_TTL = 3  # each node's renewals of the run's lease per TTL, at least
LOOK_WHETHER_GONE_EVERY = 0.2  # seconds between checks whether a disconnected in-memory store's process is gone
LOOK_FOR_RUN_AFTER = 1.0  # seconds to pause after a failed request about the run's lease


class StoreEndingError(StoreError):
    """The host of the store is shutting down: the node must find the next store."""


class StoreSession:
    """The state of one connection to one store."""

    def __init__(self, store: Store, keys: Keys, *, node_id: str, closed_ttl: float, rng: random.Random) -> None:
        self.store = store  # the store client, which the caller closes
        self.keeping: KeptLeases = KeptLeases(store)
        self.follower: HeadWatcher = HeadWatcher(store, keys, node_id=node_id)
        self.known_run_lease: Lease | None = None  # the run's own lease; None if unknown or lost
        # Ends this node's candidacy for coordinator within a number of seconds; None if the node is no candidate.
        self.resign: Callable[[float], Awaitable[None]] | None = None
        self.back_at: float = -math.inf  # when the store last reconnected; -inf if never
        self.gone: ConnectionLost | None = None  # the error with which the store was given up
        self.host: str = ""  # this store's URL, without the run; the run's next store may have another
        self.release_within: float = RELEASE_WITHIN  # seconds to revoke the role's lease; fewer if withdrawing failed
        self.hosts_store: Callable[[], bool] = lambda: False  # True if this node hosts the store
        # Seconds without a listener at the store's URL until the node gives the store up; never with a data directory.
        self.gives_up_after: float = math.inf
        self.has_knowledge: bool = False  # True if this store has at least this node's knowledge of a lost store
        self.has_arrived: bool = False  # True once the store has accepted this node, whose settings are then the run's
        self._keys = keys
        self._closed_ttl = closed_ttl  # seconds: the TTL of the run's lease, if this node grants that lease
        self._rng = rng
        self._keeping_run: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered_in: list[float] = []
        self._reach_changed = asyncio.Event()
        self._who_waits: Callable[[], str] = str
        self._is_counted: Callable[[], bool] = bool
        self._asks_share = rng.uniform(*ASK_SPREAD)
        self._asking: asyncio.TimerHandle | None = None
        self._silence_task: asyncio.Task[None] | None = None
        self._silent = False  # True while a keep-alive has been unanswered for long: see `KeptLeases`
        self._closed = False
        store.on_connection_change(self._handle_connection_change)
        self.keeping.on_silence = self._note_silence

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine until it ends or this session is closed."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None and not isinstance(error, StoreError):
                log.error("%s has failed: %r", task.get_name(), error, exc_info=error)

    async def step_down(self, *, within: float = RELEASE_WITHIN) -> None:
        """Stop coordinating or being a candidate; wait at most `within` seconds until the role's lease is revoked."""
        resign, self.resign = self.resign, None
        if resign is not None:
            await resign(within)

    async def aclose(self) -> None:
        """End all tasks, then revoke the node's leases, with which its record is deleted."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
        await self.step_down(within=self.release_within)
        await cancel_and_wait(*self._tasks)
        with anyio.CancelScope(shield=True):
            await self.keeping.release_all()

    @property
    def no_listener_hint(self) -> str:
        """If no process listens at the store's address, a hint that a node may have hosted the store; else ""."""
        return f"; {IF_HOSTED}" if not self.store.connected and self.store.last_problem == NOBODY_LISTENS else ""

    async def wait_until_connected(self, *, within: float, answering: bool = False) -> bool:
        """Wait until the store is connected (if `answering`: answers) or lost; return False after `within` seconds."""
        with anyio.move_on_after(within) as limit:
            while self.store.failure is None and (not self.store.connected or (answering and self._silent)):
                self._reach_changed.clear()
                await self._reach_changed.wait()
        return not limit.cancelled_caught

    def log_outages(self, who_waits: Callable[[], str], is_counted: Callable[[], bool]) -> None:
        """From now on, log when the store has been disconnected or silent for a while, and when it returns.

        `who_waits` returns in words what this node waits for, or "". Once the coordinator has counted this node
        (`is_counted`), the session also checks between keep-alives that the store answers.
        """
        self._who_waits, self._is_counted = who_waits, is_counted
        self._schedule_probe(self._probe_interval)

    @property
    def _probe_interval(self) -> float:
        progress = self.follower.head.progress
        nodes = progress.live + progress.joined if progress is not None else 0
        return max(ASK_EVERY, ASK_EVERY_PER_NODE * nodes) * self._asks_share

    def _schedule_probe(self, seconds: float) -> None:
        self._asking = asyncio.get_running_loop().call_later(seconds, self._probe_store)

    def _probe_store(self) -> None:
        """If a caller waits and the head's watch is quiet, send a keep-alive, which the store must answer."""
        every, silent_for = self._probe_interval, self.store.time() - self.follower.heard_at
        if silent_for < every - ASK_EARLY:
            self._schedule_probe(every - silent_for)
            return
        if self._is_counted() and self._who_waits():
            self.keeping.renew_now()
        self._schedule_probe(every)

    def _handle_connection_change(self, connected: bool) -> None:
        self._reach_changed.set()
        if connected:
            self.back_at = self.store.time()
        else:
            self._start_outage_watch(self.store.time(), SAY_AWAY_AFTER)

    def _note_silence(self, since: float | None) -> None:
        self._silent = since is not None
        self._reach_changed.set()
        if since is not None:
            self._start_outage_watch(since, 0.0)

    def _start_outage_watch(self, since: float, first_after: float) -> None:
        if not self._closed and (self._silence_task is None or self._silence_task.done()):
            what = f"notice the store's absence from {self._keys.run_id}"
            self._silence_task = self.spawn(self._watch_outage(since, self.store.time() + first_after), what)

    async def _watch_outage(self, since: float, say_at: float) -> None:
        """From `say_at` on, warn ever more rarely; log the store's return; give the store up if its process is gone."""
        run_id, within, said = self._keys.run_id, self.gives_up_after, False
        gone_since, told = math.inf, False
        while not await self.wait_until_connected(
            within=min(say_at - self.store.time(), math.inf if self.store.durable else LOOK_WHETHER_GONE_EVERY),
            answering=True,
        ):
            now = self.store.time()
            if now >= say_at:
                said, say_at = True, now + max(SAY_AWAY_AFTER, now - since)
                what = "not answered" if self.store.connected else "been out of reach"
                log.warning("run %s: the store has %s for %.0f s%s", run_id, what, now - since, self._who_waits())
            is_gone = not (self.store.connected or self.store.durable) and self.store.last_problem == NOBODY_LISTENS
            gone_since = min(gone_since, now) if is_gone else math.inf
            if is_gone and not told:
                told = True
                text = "run %s: no process listens at %s, where the store was, in memory only; waiting %g s for another"
                log.warning(text, run_id, self.host, within)
            if now - gone_since >= within:
                why = f"was in memory only, and its process is gone: nobody listens there for {within:g} s"
                self.gone = ConnectionLost(f"the store at {self.host} {why}", maybe_applied=True)
                self.store.fail(self.gone)
        if said and self.store.failure is None and (self.keeping.kept or self.back_at >= since):
            log.warning("run %s: the store is back after %.0f s", run_id, self.store.time() - since)

    def note_answer_time(self, seconds: float) -> None:
        """Record the seconds that the store took for a request."""
        self._answered_in, self.release_within = [*self._answered_in, seconds][-ANSWERS_KEPT:], RELEASE_WITHIN

    @property
    def reconnect_seconds(self) -> float:
        """The seconds that a healthy client on a working network takes to reconnect."""
        return ROUND_TRIPS_TO_RECONNECT * self.round_trip

    @property
    def round_trip(self) -> float:
        """The seconds that the store takes to answer: the shortest time of its last answers."""
        # Until three answer times are known, the time to open the watch counts as one: a single answer may be delayed.
        opened_in = self.follower.opened_in if len(self._answered_in) < ANSWERS_KEPT else None
        return min((*self._answered_in, *(() if opened_in is None else (opened_in,))), default=0.0)

    def describe_slowness(self) -> str:
        """Return words to add to a node's reason for waiting if the store is slow; else ""."""
        return f"; the store takes {self.round_trip:.1f} s to answer" if self.round_trip >= SLOW else ""

    def new_lease_id(self) -> int:
        """Return a random id for a lease that a transaction will grant."""
        return CHOSEN_LEASE_LEAST + self._rng.getrandbits(62)

    async def run_lease(self) -> Lease:
        """Return the run's own lease, found or granted (promise R19)."""
        if self.known_run_lease is None:
            self.known_run_lease = await get_or_grant_run_lease(self.store, self._keys, self._closed_ttl)
        return self.known_run_lease

    def start_renewing_run(self) -> None:
        """Renew the run's lease from now on, so that the run stays in the store while it has nodes."""
        if self._keeping_run is None or self._keeping_run.done():
            self._keeping_run = self.spawn(self._renew_run(), f"keep run {self._keys.run_id}")

    def stop_renewing_run(self) -> None:
        """Stop renewing the run's lease. If no other node renews it, the lease expires."""
        if self._keeping_run is not None:
            self._keeping_run.cancel()
            self._keeping_run = None

    async def _renew_run(self) -> None:
        """Renew the run's lease, even if the run is closed: its members may still need keys on that lease."""
        while True:
            try:
                lease = await self.run_lease()
                await anyio.sleep(lease.ttl / RUN_RENEWALS_PER_TTL * self._rng.uniform(0.8, 1.0))
                await lease.keep_alive()
            except LeaseNotFound:
                self.known_run_lease = None  # the lease expired; the next arrival grants another one
                return
            except StoreError:  # the renewal failed; the lease lasts for two more attempts
                await anyio.sleep(LOOK_FOR_RUN_AFTER)
