"""Shell: what belongs to one connection of a node to one store, and ends with it.

A node has one connection. The follower of the head, both leases (of its membership, and of the role of coordinator if
it has that), the readiness to coordinate, and the run's own lease go over it. When the store is replaced all of this is
of no more use at once, so it is made and ended as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

import anyio

from rdzv.node.link.follower import Follower
from rdzv.node.run.lease import take_run_lease
from store import ConnectionLost, Lease, LeaseNotFound, StoreError, StoreTimeoutError
from store.keeping import Keeping
from store.messages import CHOSEN_LEASE_LEAST
from store.net.dialing import NOBODY_LISTENS
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Coroutine

    from rdzv.core.keys import Keys
    from store import Store

__all__ = ["Link", "StoreEndingError", "is_away"]

log: logging.Logger = logging.getLogger(__name__)

ROUND_TRIPS_TO_RECONNECT = 3  # the connection, the greeting, the welcome
SLOW = 0.5  # seconds for an answer, from which on that is said wherever a node waits
ANSWERS_KEPT = 3  # of which the quickest tells how far away the store is: the others may have been held up
IF_HOSTED = "if a node hosted this store, it ended with that node's process, as one of `rdzv serve` does not"
SAY_AWAY_AFTER = 2.9  # seconds for which the store is away before that is said, and then ever more rarely (R22)
ASK_EVERY = 1.0  # seconds, while somebody waits: whether the store is still there must be known for that ...
ASK_EVERY_PER_NODE = 0.01  # ... but it answers some 100 such questions a second, however many nodes there are ...
# ... each of which asks a little more or less often than that: all have last heard the same, at the same moment, and
# would all ask together when that is so long ago. A thousand would keep the store, and the last one to come, waiting.
ASK_SPREAD = (0.75, 1.25)
ASK_EARLY = 0.01  # seconds: so many are not worth another timer, which must not come at once for ever
RUN_RENEWALS_PER_TTL = 3  # of the run's lease, by each node
LOOK_WHETHER_GONE_EVERY = 0.2  # seconds, while the store is away; its client tries about as often
LOOK_FOR_RUN_AFTER = 1.0  # seconds, where the store does not say which lease is the run's


class StoreEndingError(StoreError):
    """The node that hosts the store is done, and nobody else is to come to it: the next store is to be found."""


class Link:
    """What belongs to one connection to one store.

    Args:
        store: The client; it is the caller's to close.
        keys: The run's keys.
        node_id: What this node is called.
        closed_ttl: How long the run's keys outlive its last node, if this node is the first to write any.
        rng: Spreads over time what many nodes do now and then.

    Attributes:
        known_run_lease: The lease that everything of the run is on but its nodes, if it is known.
        resign: Ends this node's readiness to coordinate, if it is ready.
        back_at: When the connection was made that stands, if there was one before.
        gone: Why the store was given up, if it was: its process is gone, and what was in it with that.
    """

    def __init__(self, store: Store, keys: Keys, *, node_id: str, closed_ttl: float, rng: random.Random) -> None:
        self.store = store
        self.keeping: Keeping = Keeping(store)
        self.follower: Follower = Follower(store, keys, node_id=node_id)
        self.known_run_lease: Lease | None = None
        self.resign: Callable[[], Awaitable[None]] | None = None
        self.back_at: float | None = None
        self.gone: ConnectionLost | None = None
        self._keys = keys
        self._closed_ttl = closed_ttl
        self._rng = rng
        self._keeping_run: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered_in: list[float] = []
        self._reach_changed = asyncio.Event()
        self._who_waits: Callable[[], str] = str
        self._is_counted: Callable[[], bool] = bool
        self._asks_share = rng.uniform(*ASK_SPREAD)
        self._asking: asyncio.TimerHandle | None = None
        self._telling: asyncio.Task[None] | None = None  # while the store is away
        self._give_up_if_gone: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._giving_up: asyncio.Task[None] | None = None  # while a store that was in memory only is away
        self._silent = False  # what was asked has had no answer for a while
        self._closed = False
        store.on_connection(self._note_connection)
        self.keeping.on_silence = self._note_silence

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something until the link is closed."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None and not isinstance(error, StoreError):
                log.error("%s has failed: %r", task.get_name(), error, exc_info=error)

    async def step_down(self) -> None:
        """Coordinate no more, nor be ready to."""
        resign, self.resign = self.resign, None
        if resign is not None:
            await resign()

    async def aclose(self) -> None:
        """End everything, the leases last: with them the node's record goes."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
        await self.step_down()
        await cancel_and_wait(*self._tasks)
        with anyio.CancelScope(shield=True):
            await self.keeping.release_all()

    # ------------------------------------------------------------------------------------------ whether it is there

    @property
    def in_reach(self) -> bool:
        """Whether the store is in reach now, as far as is known."""
        return self.store.connected

    @property
    def if_hosted(self) -> str:
        """What may have become of a store that is out of reach, to be said after that; nothing if it is not so.

        A node that hosted the store and has ended leaves a host that answers for it. One that does not answer at all
        may be cut off, and the store with it.
        """
        return f"; {IF_HOSTED}" if not self.in_reach and self.store.last_problem == NOBODY_LISTENS else ""

    async def in_reach_again(self, *, within: float, answering: bool = False) -> bool:
        """Wait until the store is in reach (and `answering`) again, or known to be lost; False if it is not in time."""
        with anyio.move_on_after(within) as limit:
            while self.store.failure is None and (not self.in_reach or (answering and self._silent)):
                self._reach_changed.clear()
                await self._reach_changed.wait()
        return not limit.cancelled_caught

    def say_when_away(self, who_waits: Callable[[], str], is_counted: Callable[[], bool]) -> None:
        """Warn from now on when the store has been out of reach, or silent, for a while, and say when it is back.

        `who_waits` says in words who waits now, and must hear of it soon; it is empty if nobody does. `is_counted`:
        whether the coordinator has counted this node. Until then it does not know among how many it waits, and leaves
        the question to its keep-alives.
        """
        self._who_waits, self._is_counted = who_waits, is_counted
        self._ask_in(self._asks_every)

    @property
    def _asks_every(self) -> float:
        progress = self.follower.head.progress
        nodes = progress.live + progress.joined + progress.spares if progress is not None else 0
        return max(ASK_EVERY, ASK_EVERY_PER_NODE * nodes) * self._asks_share

    def _ask_in(self, seconds: float) -> None:
        self._asking = asyncio.get_running_loop().call_later(seconds, self._ask)

    def _ask(self) -> None:
        """Ask whether the store is there, if somebody waits, and nothing was heard of it lately."""
        every, silent_for = self._asks_every, self.store.time() - self.follower.heard_at
        if silent_for < every - ASK_EARLY:
            self._ask_in(every - silent_for)
            return
        if self._is_counted() and self._who_waits():
            self.keeping.renew_now()
        self._ask_in(every)

    def _note_connection(self, connected: bool) -> None:
        """The connection was lost, or is back; or the client is of no more use."""
        self._reach_changed.set()
        if connected:
            self.back_at = self.store.time()
        else:
            self._tell_of_absence(self.store.time(), SAY_AWAY_AFTER)
            giving_up = self._giving_up is not None and not self._giving_up.done()
            if self._give_up_if_gone is not None and not (self.store.durable or self._closed or giving_up):
                self._giving_up = self.start(self._give_up_if_gone(), f"give up the store of {self._keys.run_id}")

    def _note_silence(self, since: float | None) -> None:
        """The store has not answered for a while; None: it has, or it is not asked any more."""
        self._silent = since is not None
        self._reach_changed.set()
        if since is not None:
            self._tell_of_absence(since, 0.0)

    def _tell_of_absence(self, since: float, first_after: float) -> None:
        if not self._closed and (self._telling is None or self._telling.done()):
            what = f"notice the store's absence from {self._keys.run_id}"
            self._telling = self.start(self._say_how_long_away(since, first_after), what)

    async def _say_how_long_away(self, since: float, pause: float) -> None:
        run_id, said = self._keys.run_id, False
        while not await self.in_reach_again(within=pause, answering=True):
            away, said = self.store.time() - since, True
            what = "not answered" if self.in_reach else "been out of reach"
            log.warning("run %s: the store has %s for %.0f s%s", run_id, what, away, self._who_waits())
            pause = max(SAY_AWAY_AFTER, away)
        if said and self.store.failure is None:
            log.warning("run %s: the store is back after %.0f s", run_id, self.store.time() - since)

    def give_up_when_gone(self, url: str, *, within: float) -> None:
        """From now on, give a store up that was in memory only, once nobody has listened at its URL for so long.

        A store with a data directory comes back with all it had. A host that cannot be reached says nothing of it.
        """
        self._give_up_if_gone = functools.partial(self._until_gone, url, within)

    async def _until_gone(self, url: str, within: float) -> None:
        since, told = None, False
        while not await self.in_reach_again(within=LOOK_WHETHER_GONE_EVERY):
            now = self.store.time()
            if self.store.last_problem != NOBODY_LISTENS:
                since = None
                continue
            since = now if since is None else since
            if not told:
                told = True
                log.warning(
                    "run %s: nobody listens at %s, where the store was, in memory only; waiting %g s for another one",
                    *(self._keys.run_id, url, within),
                )
            if now - since >= within:
                why = f"was in memory only, and its process is gone: nobody listens there for {within:g} s"
                self.gone = ConnectionLost(f"the store at {url} {why}", maybe_applied=True)
                self.store.fail(self.gone)
                return

    # ------------------------------------------------------------------------------------------ how far away it is

    def answered_in(self, seconds: float) -> None:
        """Note that the store has answered a request after so long."""
        self._answered_in = [*self._answered_in, seconds][-ANSWERS_KEPT:]

    @property
    def reconnects_in(self) -> float:
        """Seconds that coming back to the store takes a client that is well, on a network that works."""
        return ROUND_TRIPS_TO_RECONNECT * self.round_trip

    @property
    def round_trip(self) -> float:
        """How long the store takes to answer, in seconds, as far as was noted lately."""
        # The first answer of all counts until three others have come: any one of them may have been held up.
        opened_in = self.follower.opened_in if len(self._answered_in) < ANSWERS_KEPT else None
        return min((*self._answered_in, *(() if opened_in is None else (opened_in,))), default=0.0)

    def slowness(self) -> str:
        """What to add to whatever a node waits for, if the store answers slowly."""
        return f"; the store takes {self.round_trip:.1f} s to answer" if self.round_trip >= SLOW else ""

    # ------------------------------------------------------------------------------------------ leases

    def choose_lease(self) -> int:
        """An id for a lease that a transaction grants."""
        return CHOSEN_LEASE_LEAST + self._rng.getrandbits(62)

    async def run_lease(self) -> Lease:
        """The lease that everything of the run is on but its nodes, taken over or granted (promise R19)."""
        if self.known_run_lease is None:
            self.known_run_lease = await take_run_lease(self.store, self._keys, self._closed_ttl)
        return self.known_run_lease

    def keep_run(self) -> None:
        """Renew the run's lease from now on: a run lives as long as any of its nodes does."""
        if self._keeping_run is None or self._keeping_run.done():
            self._keeping_run = self.start(self._renew_run(), f"keep run {self._keys.run_id}")

    def release_run(self) -> None:
        """Renew it no more; what others do not keep will lapse some day."""
        if self._keeping_run is not None:
            self._keeping_run.cancel()
            self._keeping_run = None

    async def _renew_run(self) -> None:
        """Renew it, also once the run is closed: its members may be at work, and go by what is on it."""
        while True:
            try:
                lease = await self.run_lease()
                await anyio.sleep(lease.ttl / RUN_RENEWALS_PER_TTL * self._rng.uniform(0.8, 1.0))
                await lease.keep_alive()
            except LeaseNotFound:
                self.known_run_lease = None  # the store was away for too long; whoever arrives next begins anew
                return
            except StoreError:  # there are two more times before it matters
                await anyio.sleep(LOOK_FOR_RUN_AFTER)


def is_away(error: BaseException, link: Link) -> bool:
    """Whether a store that fails us is merely out of reach, and may come back."""
    return isinstance(error, ConnectionLost | StoreTimeoutError) and link.store.failure is None
