"""A node: it connects, takes part in its run, and answers its callers.

A node runs in an event loop that no caller can block (`NodeLoop`). Other threads call only "thread-safe" methods.

From `get_session` to `aclose`, it has a `StoreSession`, its connection to a store. If another store replaces it, the
link and the node's membership end, and `next_rendezvous` makes a new link.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import random
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio

from rdzv.core.decision import JoinClock
from rdzv.core.keys import Keys
from rdzv.core.state import Head
from rdzv.errors import RendezvousConnectionError, RendezvousError, RendezvousSettingsError, RendezvousStateError
from rdzv.listeners import Listeners
from rdzv.node.coordinator.election import start_candidacy
from rdzv.node.link.ports import HeldPort
from rdzv.node.link.store_session import StoreEndingError, StoreSession
from rdzv.node.member.joining import JoinAttempt
from rdzv.node.member.leaving import RecordRemover, announce_store_move
from rdzv.node.member.lost_store import carry_over_run, save_known_run
from rdzv.node.member.membership_watcher import MembershipWatcher
from rdzv.node.member.node_state import NodeState
from store import StoreError, StoreReplaced, StoreUsageError
from store.errors import NotPicklable
from store.keeping import RELEASE_WITHIN
from store.net.process import host_name
from store.printable import make_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rdzv.config.settings import Settings
    from rdzv.membership import Membership
    from rdzv.node.link.node_loop import NodeLoop
    from store import Store

log: Final = make_logger(__name__)

START_AGAIN = "start all nodes again; a store that outlives its process is served by `rdzv serve --data-dir`"
ANOTHER_STORE_WITHIN = 1.0  # seconds of an attempt to connect after the last store was given up
GIVES_WAY_FOR = 3.0  # seconds, at most, that a leaving node waits for another to host the next store
EARLIER_CALLER = 0.1  # seconds beyond `join_timeout` for a call that first awaits another call's attempt to connect
NEXT_STORE_EVERY = (0.1, 0.3)  # seconds, at random, between attempts to find the successor of an ending store

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class JoinHandle:
    """A handle of one call of `next_rendezvous`, by which `Node.undo_join` undoes that call."""

    task: asyncio.Task[Any] | None = None
    abandoned: bool = False


class Node(NotPicklable):
    """One node of a run.

    `open_store` makes the client of each store that the node connects to. `rng` is for jitter, and for the node's name
    if the settings give none. `port` is the port to listen on as rank 0; by default, a free one of this machine.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        loop: NodeLoop,
        open_store: Callable[[], contextlib.AbstractAsyncContextManager[Store]],
        rng: random.Random | None = None,
        port: HeldPort | None = None,
    ) -> None:
        rng = rng or random.Random(secrets.randbits(64))  # without a seed `Random` reads 2.5 kB of entropy
        self.settings = settings
        self.run_id: str = settings.run_id
        self.keys: Keys = Keys(settings.prefix, settings.run_id, settings.endpoint.has_successors)
        self.node_id: str = settings.node_id or f"{host_name()}-{os.getpid()}-{rng.getrandbits(24):06x}"
        self.loop = loop
        self.listeners: Listeners = Listeners()  # called at each change of the node's state; any thread may add one
        self.part: NodeState = NodeState(
            settings,
            self.keys,
            node_id=self.node_id,
            listeners=self.listeners,
            loop=loop,
            rng=rng,
            port=port or HeldPort(settings.master_port),
        )
        self._leaving = RecordRemover(self.part)
        self._leaving_call = asyncio.Lock()
        self._open_store = open_store
        self._rng = rng
        self._link: StoreSession | None = None
        self._link_stack: contextlib.AsyncExitStack | None = None
        self._stack = contextlib.AsyncExitStack()
        self._connecting = asyncio.Lock()
        self._connecting_scope: anyio.CancelScope | None = None
        self._join: JoinHandle | None = None  # the ticket of the last call of `next_rendezvous`, which may be under way
        # Set once a closing node has left its round, although a store that it hosts may still serve others.
        self.withdrawn: asyncio.Event = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._closed = False
        self.time: Callable[[], float] = lambda: 0.0  # the node's clock; 0.0 until connecting begins; thread-safe
        self.hosts_store: Callable[[], bool] = lambda: False  # True if this node hosts the store; thread-safe
        self.store_settings: Callable[[], Settings] = lambda: settings  # the settings, with the present store as host
        self.handed_on: bool = False  # True while this node looks for another store, as the last one is shutting down
        self._store_gone: StoreError | None = None  # the error of the last store, if given up; see `StoreSession.gone`
        self._unreached: Exception = TimeoutError()  # the error of the last failed attempt to connect

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close` after the node has closed. Callbacks run in the reverse order of their registration."""
        self._stack.push_async_callback(close)

    def call_on_lease_lost(self, callback: Callable[[], None]) -> None:
        """Call back when this node's lease has ended by the node's clock, unless the run is known to be closed."""
        self.part.on_lease_lost = lambda: callback() if self.head.closed is None else None

    def close_when_loop_closes(self, caller: asyncio.AbstractEventLoop) -> None:
        """If the caller's event loop is closed without closing this node, close the node."""

        def close_if_loop_closed() -> None:
            if caller.is_closed() and not self._closed:
                log.error("run %s: the event loop of node %s was closed; the node leaves", self.run_id, self.node_id)
                self.loop.spawn(self.aclose()).over.call_when_set(self.loop.stop_using)

        self.part.on_keep_alive = close_if_loop_closed

    async def aclose(self) -> None:
        """Leave the round, stop coordinating, and disconnect for good. May be called twice, also concurrently."""
        if self._closing is None:
            self._closed = True
            self.listeners.notify()
            self._closing = asyncio.create_task(self._close(), name=f"close node {self.node_id}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._connecting_scope is not None:
            self._connecting_scope.cancel()
        try:
            await self._cancel_join()
            if self._link is not None and self._link.follower.head.closed is None:
                with anyio.move_on_after(RELEASE_WITHIN), contextlib.suppress(StoreError):
                    await announce_store_move(self.part, self._link)
            await self._leaving.withdraw(self._link)
        finally:
            self.withdrawn.set()
            try:
                await self._disconnect()
            finally:
                await self._stack.aclose()

    async def get_session(self) -> StoreSession:
        """Return the link to the store. If the node has none, or its store is lost, make a new link."""
        self.check_usable()
        if self._link is not None and self._link.follower.error is None:
            return self._link
        self.time = asyncio.get_running_loop().time
        # After another call's failed attempt, this call has the remaining time for its own; `_new_session` limits it.
        until = self.time() + self.settings.join_timeout + EARLIER_CALLER if self._connecting.locked() else math.inf
        async with self._connecting:
            self.check_usable()
            if self._link is not None and self._link.follower.error is not None:
                await self._disconnect(self._link.follower.error)
            if self._link is None:
                within = until - self.time() if self._store_gone is None else ANOTHER_STORE_WITHIN
                with anyio.move_on_after(within) as self._connecting_scope:
                    self._link = await self._new_session()
                self._connecting_scope = None
                self.check_usable()  # raises if the node was closed while connecting
                if self._link is None:
                    raise self.translate_store_error(self._store_gone or self._unreached)
            return self._link

    async def _new_session(self) -> StoreSession:
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(self._open_store())
                link = StoreSession(
                    client, self.keys, node_id=self.node_id, closed_ttl=self.settings.closed_ttl, rng=self._rng
                )
                link.host, link.hosts_store = self.store_settings().endpoint.url, self.hosts_store
                stack.push_async_callback(link.aclose)
                link.follower.on_change = functools.partial(self.part.update_membership, link)
                link.follower.listeners.add(self.listeners)
                link.spawn(link.follower.run(), f"follow run {self.run_id}")
                link.spawn(MembershipWatcher(self.part, link).run(), f"watch over node {self.node_id}")
                link.log_outages(self._describe_wait, self._is_known_to_coordinator)
                if self.hosts_store():
                    link.spawn(self._keep_naming_host(link.store), f"name the host of the store to run {self.run_id}")
                link.gives_up_after = self.settings.store_gone_timeout
                with anyio.CancelScope(deadline=client.time() + self.settings.join_timeout):
                    await link.follower.synced.wait()
                if not link.follower.synced.is_set():
                    raise link.follower.unanswered or TimeoutError
                if link.follower.error is not None:
                    raise link.follower.error
                self._link_stack = stack.pop_all()
        except StoreReplaced:  # another store has replaced the first: connect to the new one
            return await self._new_session()
        except (StoreError, TimeoutError) as error:
            self._unreached = error
            raise self.translate_store_error(error) from error
        return link

    async def _keep_naming_host(self, store: Store) -> None:
        host = f"run {self.run_id}, node {self.node_id} (process {os.getpid()} on {host_name()})"
        async with store.kept_lease(self.settings.ttl) as lease:
            await store.put(self.keys.host, host.encode(), lease=lease.id)
            await anyio.sleep_forever()

    def _describe_wait(self) -> str:
        what = f"a round, for {self.settings.join_timeout:g} s" if self.is_joining else "the others in its round"
        waits = self.is_joining or (self.membership is not None and self.membership.beats.longest_store_wait)
        return f"; node {self.node_id} waits for it, and for {what}" if waits else ""

    def _is_known_to_coordinator(self) -> bool:
        progress = self.head.progress
        return progress is not None and (not self.is_joining or progress.last_arrival >= self.part.arrival.revision > 0)

    async def _disconnect(self, error: Exception | None = None) -> None:
        if self._link is not None:
            if error is not None:
                save_known_run(self.part, self._link)
                self.part.end_membership(f"the store is lost: {error}", dropped=True)
                self.part.arrival.on_lease_lost()
                if self.head.round is not None:  # rounds in the next store must get higher numbers
                    self.part.known_round = max(self.part.known_round, self.head.round.number)
            self._store_gone = self._link.gone
        stack, self._link_stack, self._link = self._link_stack or contextlib.AsyncExitStack(), None, None
        with anyio.CancelScope(shield=True):
            await stack.aclose()

    def translate_store_error(self, error: BaseException) -> RendezvousError:
        """Return the error of this package for a failure of the store."""
        what = str(error) or "the store does not answer"
        if self.store_loss is not None:
            what += f"; {START_AGAIN}"
        elif self._link is not None:
            what += self._link.no_listener_hint
        return RendezvousConnectionError(f"run {self.run_id}, node {self.node_id}: {what}")

    def check_usable(self) -> None:
        """Raise RendezvousStateError if this node is closed; thread-safe."""
        if self._closed:
            raise RendezvousStateError(f"this handler of run {self.run_id} is closed; connect again")

    @property
    def is_connected(self) -> bool:
        """True if this node is connected to the store; thread-safe."""
        link = self._link
        return link is not None and link.store.connected

    @property
    def store_loss(self) -> StoreError | None:
        """The error with which the store was given up (`StoreSession.gone`), until the node has a new link."""
        link = self._link
        return self._store_gone if link is None else link.gone

    @property
    def connected_for(self) -> float:
        """Seconds since the store was reconnected; infinite if never disconnected. Thread-safe."""
        link = self._link
        return math.inf if link is None else self.time() - link.back_at

    async def next_rendezvous(
        self, ticket: JoinHandle, examine: Callable[[], Awaitable[str | None]] | None = None
    ) -> Membership:
        """Join the next round; see `Handler.next_rendezvous`.

        `ticket` is for `undo_join`, which undoes this call. `examine` returns why the health check failed, or None.
        """
        if not self.settings.can_join:
            raise RendezvousSettingsError(
                f"min_nodes is missing: without it run {self.run_id} can be looked at, but not joined; "
                f"add ?min_nodes=2, say"
            )
        clock = JoinClock(self.settings.join_timeout, now=anyio.current_time())
        with anyio.move_on_after(self.settings.join_timeout) as limit:
            await self._cancel_join(abandoned_only=True)
            async with self._leaving_call:  # wait for a cancelled `leave`, which still completes
                pass
        if limit.cancelled_caught:
            raise self.part.timeout_error(self._link)
        if self.is_joining:
            raise RendezvousStateError(f"node {self.node_id} is joining run {self.run_id} already; one call at a time")
        if ticket.abandoned:
            raise asyncio.CancelledError
        self._join = ticket
        ticket.task = asyncio.current_task()
        try:
            return await self._join_any_store(clock, examine)
        except asyncio.CancelledError:
            if self._closed and not ticket.abandoned:
                self.check_usable()  # raises: `aclose` has cancelled this call
            raise
        finally:
            ticket.task = None

    async def _join_any_store(
        self, clock: JoinClock, examine: Callable[[], Awaitable[str | None]] | None
    ) -> Membership:
        link = await self.get_session()
        while True:
            try:
                joining = JoinAttempt(self.part, self._leaving, link, clock, start_candidacy=start_candidacy)
                return await joining.join(examine)
            except StoreReplaced as error:
                # Join in the new store (S10), where rounds have higher numbers than the caller knows (S13).
                log.warning("run %s, node %s: %s; it joins the run in the new one", self.run_id, self.node_id, error)
                lost: Exception = error
            except StoreEndingError as error:
                log.warning("run %s, node %s: %s; it waits for the next one", self.run_id, self.node_id, error)
                self.part.set_wait_reason(f"{error}; waiting for the next one")
                self.handed_on, lost = True, error
            except StoreError as error:
                raise self.translate_store_error(error) from error
            clock.set_suspended(suspended=False, now=anyio.current_time())
            with anyio.move_on_after(clock.seconds_left(anyio.current_time())) as limit:
                link = await self._find_next_store(link, lost)
            if limit.cancelled_caught:
                raise self.part.timeout_error(self._link)

    async def _find_next_store(self, link: StoreSession, error: Exception) -> StoreSession:
        while True:
            async with self._connecting:
                if self._link is link:
                    await self._disconnect(error)
            if self.handed_on:
                await anyio.sleep(self._rng.uniform(*NEXT_STORE_EVERY))
            link = await self.get_session()
            with contextlib.suppress(StoreError):
                if self.handed_on:
                    ending = link.follower.head.moves or await link.store.get(self.keys.ending) is not None
                    self.handed_on = ending and link.follower.head.closed is None
            if not self.handed_on:
                return link
            error = StoreEndingError("it is ending")

    async def undo_join(self, ticket: JoinHandle) -> None:
        """Undo the call of `next_rendezvous` with this ticket: cancel it, or leave the round that it joined."""
        ticket.abandoned = True
        if self._join is not ticket:
            return  # the call has not begun, or a later call has followed it
        if ticket.task is not None:
            await self._cancel_join()
        elif not self._closed:
            # The call has joined a round that its caller did not see: leave the round. The next call waits for that.
            ticket.task = asyncio.current_task()
            try:
                await self._leaving.leave(self._link)
            finally:
                ticket.task = None

    async def _cancel_join(self, *, abandoned_only: bool = False) -> None:
        """Cancel a `next_rendezvous` and await its end; with `abandoned_only`, only await an abandoned one."""
        join = self._join
        if join is None or join.task is None or (abandoned_only and not join.abandoned):
            return
        task = join.task
        if not abandoned_only and not task.cancelling():  # a second cancel would interrupt the clean-up
            task.cancel()
        await asyncio.wait([task])

    async def leave(self) -> None:
        """Leave this round; raise RendezvousStateError while a call of `next_rendezvous` is under way."""
        self.check_usable()
        await self._cancel_join(abandoned_only=True)
        async with self._leaving_call:
            if self.is_joining:
                raise RendezvousStateError(
                    f"node {self.node_id} is joining run {self.run_id}; cancel that call instead"
                )
            await self._leaving.leave(self._link)

    @property
    def head(self) -> Head:
        """The last known head of the run (the keys that every node watches); thread-safe."""
        link = self._link
        return link.follower.head if link is not None else Head()

    @property
    def membership(self) -> Membership | None:
        """This node's membership in its last round; thread-safe."""
        return self.part.membership

    @property
    def finished_step(self) -> int | None:
        """The last step that this node has finished; None if it counts no steps."""
        return self.part.finished_step

    @finished_step.setter
    def finished_step(self, step: int | None) -> None:
        self.part.finished_step = step

    async def carry_over_run(self, link: StoreSession) -> None:
        """Write this node's knowledge of a lost store to the store of `link`."""
        await carry_over_run(self.part, link)

    @property
    def least_store_generation(self) -> int:
        """The least generation of the store that this node looks for: one more than the lost store's."""
        return 1 if self.part.known is None else self.part.known.lost.generation + 1

    def send_step_report(self) -> None:
        """Report this node's steps to the store now; thread-safe."""
        self.loop.call_soon(self.part.own_beats.send)

    @property
    def is_joining(self) -> bool:
        """True if a call of `next_rendezvous` is under way; thread-safe."""
        return self._join is not None and self._join.task is not None

    @property
    def needs_store(self) -> bool:
        """True if this node is joining or in a round, is not closing, and does not know that the run is closed."""
        return (self.is_joining or self.part.is_member) and self.head.closed is None and not self._closed

    @property
    def has_lost_store(self) -> bool:
        """True if the node's store is lost for good; thread-safe."""
        link = self._link
        return link is not None and link.follower.error is not None

    @property
    def is_draining(self) -> bool:
        """True if a drain of this node was announced; thread-safe."""
        return self.part.announced_drain(self.head) is not None

    def may_host(self, away: float) -> bool:
        """Return True if this node may serve its run's next store, after `away` seconds without a store.

        A leaving node first gives way to other hosts. A closing node serves no store: the store would soon end, too.
        """
        gives_way = away < min(GIVES_WAY_FOR, self.settings.store_gone_timeout / 2)
        return not self._closed and not (gives_way and (self.is_draining or self.part.leaves_because))

    async def call_store(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Run `work` with the store client; raise errors of this package for those of the store."""
        link = await self.get_session()
        try:
            return await work(link.store)
        except StoreUsageError as error:
            raise RendezvousSettingsError(f"run {self.run_id}, node {self.node_id}: {error}") from error
        except StoreError as error:
            raise self.translate_store_error(error) from error
