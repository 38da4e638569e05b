"""Shell: connect, reconnect, requests as awaitables, watches as async iterators.

One task makes connections, one after the other, each with a jittered pause before it, except for the first one after a
loss; bytes go between the socket and the sans-I/O `ClientConnection`, which knows what must be sent again. A call is a
future in its `InFlight` record, so a caller neither sees nor minds a reconnect that happens while it waits. What it can
see, at the end of its own timeout, is `ConnectionLost`, which says whether the request may have been applied. Watches
are in a room of their own, `watch`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import secrets
import ssl
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio

from store import interface, messages
from store.client.coming_back import greeted_link, server_answers
from store.client.link import Link
from store.client.outcomes import no_room, out_of_time, settle, with_doubt
from store.client.patience import LASTED, Patience
from store.client.room import Room
from store.client.silence import Silence
from store.client.watch import Watch
from store.errors import (
    AuthenticationError,
    ConnectionLost,
    LimitExceeded,
    ProtocolError,
    StoreError,
    StoreReplaced,
    UsedAfterFork,
    unsent,
)
from store.interface import DEFAULT_TIMEOUT
from store.messages import Cancel, Ping, Pong, Request, Response, Watching, waits
from store.net.absence import wait_for_store
from store.net.dialing import NEVER_ANSWERED, SAYS_NOTHING, describe, where
from store.net.process import process_id
from store.net.tasks import cancel_and_wait
from store.protocol import wire
from store.protocol.connection import ClientConnection, InFlight, error_of
from store.protocol.wire import Bye, Events, Lagged, Reply, Welcome
from store.watch_cursor import WatchCursor

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from store.net.dialing import Dial

__all__ = ["Client"]

log: logging.Logger = logging.getLogger(__name__)

IN_FLIGHT_MAX = 2048  # requests; fewer if the server keeps replies for less than twice as many

R = TypeVar("R", bound=Response)


class Client(interface.Store):
    """A connection to a store that comes back by itself; use it as `async with store.connect(url) as client`.

    Args:
        dial: How to connect.
        name: The address, for error messages.
        token: What is proven to the server, and asked of it.
        timeout: Seconds that every call without its own `timeout` may take.
        connect_timeout: Seconds that the first connection may take; without it, as `timeout`.
        timeout_name: What those who read of a wait for it know it by.
        rng: For the jitter of reconnecting.
        process: The process that it is in, for tests that play several; without it, this one.
        opening: The prefix of a watch, with a snapshot, that is asked for together with the hello: whoever calls
            `watch` for it first need not wait for another round trip.

    Attributes:
        answered_in: Seconds that the server took to answer when we first came.
    """

    watch_kind: type[Watch] = Watch  # what its watches are made of

    def __init__(
        self,
        dial: Dial,
        *,
        name: str,
        token: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float | None = None,
        timeout_name: str = "the timeout",
        rng: random.Random | None = None,
        process: bytes | None = None,
        opening: str | None = None,
    ) -> None:
        self._dial = dial
        self.name = name
        self._timeout = timeout
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        self._timeout_name = timeout_name
        self._patience = Patience(rng or random.Random(secrets.randbits(64)))  # less to read than by itself
        self._token = token
        self._connection = ClientConnection(
            session_id=secrets.token_bytes(16),
            process=process_id() if process is None else process,
            token=token,
            name=name,
        )
        self._link: Link | None = None
        self._ready = self._flushing = False  # ready: welcomed, requests may be written
        self._out: list[bytes] = []
        self._watching: dict[Watch, None] = {}  # every watch between its opening and its closing
        self._watches: dict[int, Watch] = {}  # those open at the server, by request id
        self._opening = opening
        self._begun: Watch | None = None  # that nobody has taken yet
        self._failed: StoreError | None = None  # why this client is of no more use
        self.last_problem: str = NEVER_ANSWERED
        self.answered_in: float = 0.0
        self._came_at = self._hello_at = 0.0  # when we began to connect, and when we said hello
        self._silence: Silence | None = None  # of the connection on which we converse
        self._previous: Link | None = None  # kept until we are welcomed on the one in its place
        self._pid = os.getpid()
        self._welcomed: asyncio.Future[bool] | None = None  # or failed; while somebody waits for it
        self.limits: dict[str, float] = {}  # those that concern a client, by their names in `Limits`, as the store told
        self._writable = True  # the socket takes more
        self._parked: set[int] = set()  # the waits among the requests in flight: they may last, and hold up nobody
        self._room = Room(self._has_room)
        self._task: asyncio.Task[None] | None = None
        self._on_connection: list[Callable[[bool], None]] = []

    # ------------------------------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._stay_connected(), name=f"store client of {self.name}")
        self._task.add_done_callback(self._task_ended)
        if self._opening is not None:
            self._begun = self.watch(self._opening, snapshot=True).begin()
        try:
            await self._first_welcome()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _first_welcome(self) -> None:
        self._welcomed = self._loop.create_future()
        await wait_for_store(
            self._welcomed, self.name, self._what_is_wrong, within=self._connect_timeout, ended_by=self._timeout_name
        )
        if self._failed is not None:
            raise self._failed

    def _end_first_wait(self) -> None:
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_result(True)

    def _what_is_wrong(self) -> str:
        """Why this client has not been welcomed. How an earlier connection ended says more than that this stands."""
        mute = self._link is not None and self._link.mute
        problem = SAYS_NOTHING if mute and self.last_problem == NEVER_ANSWERED else self.last_problem
        return problem + where(self._dial)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Nobody is to wait for what cannot come any more: its event loop ends, or a defect, which `aclose` raises."""
        error = None if task.cancelled() else task.exception()
        why = "has ended with its event loop" if error is None else f"has failed: {error!r}"
        self.fail(ConnectionLost(f"the client of {self.name} {why}", maybe_applied=False))

    async def aclose(self) -> None:
        """Hang up for good; everything that still waits gets `ConnectionLost`."""
        if self._ready and self._link is not None and self._link.transport is not None:
            self._flush()
            self._link.write(wire.encode_bye("done"))
        if self._begun is not None:
            self._begun.give_up()
        self.fail(ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False))
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    @property
    def connected(self) -> bool:
        """Whether the store is in reach now."""
        return self._ready

    @property
    def met(self) -> bool:
        """Whether the store has been met: then it is known who it is, and what it speaks."""
        return self._connection.store_id is not None

    def bound_pauses(self, remaining: Callable[[], float]) -> None:
        """Reconnect more often when a lease may lapse soon; `remaining` tells in how many seconds, or infinity."""
        self._patience.bound_by(remaining)

    @property
    def store_id(self) -> str | None:
        """The identity of the store, once it has been met."""
        return self._connection.store_id

    @property
    def seen_as(self) -> str | None:
        """The address from which the store sees this client come."""
        welcomed = self._connection.welcomed
        return welcomed.address if welcomed else None

    @property
    def ends(self) -> tuple[str, str] | None:
        """The addresses of the two ends of the connection, ours and the store's, as this system names them."""
        return self._link.ends if self._link is not None else None

    @property
    def failure(self) -> StoreError | None:
        """Why this client is of no more use, if so: the store was replaced, say, or refused it."""
        return self._failed

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        """Call back with True after each welcome, with False after each loss, and when the client is of no more use."""
        self._on_connection.append(callback)

    def time(self) -> float:
        """Seconds on the clock of the event loop that it was entered in."""
        return self._loop.time()

    async def _stay_connected(self) -> None:
        """Connect, and connect again whenever the connection is lost, until the client is closed or of no use."""
        attempt, away_since = 0, self.time()
        while self._failed is None:
            at_once = False
            try:
                link: Link | None = await self._open()
            except ssl.SSLCertVerificationError as error:
                reason = f"{self.name} has no certificate that we trust: {error.verify_message}"
                self._refused(AuthenticationError(reason))
            except (OSError, UnicodeError) as error:
                self.last_problem = describe(error)
            else:
                previous: Link | None = None
                while link is not None:  # each is followed by a fresh one if it falls silent
                    began = self.time()
                    welcomed, fresh_link = await self._converse(link, previous, heartbeats=2.0 ** min(attempt, 4))
                    if welcomed:
                        attempt, away_since = 0, self.time()
                        # The server takes who does not come back for dead (R20). One that has said why it hangs up
                        # does not; and one that hangs up each time is not to be asked without a pause.
                        at_once = not link.farewell and away_since - began >= LASTED
                    previous, link = link, fresh_link
            if not at_once and self._failed is None:
                await anyio.sleep(self._patience.pause(attempt, away=self.time() - away_since))
                attempt += 1

    async def _open(self) -> Link:
        """Make one connection, within the time limit of a call; a store that was met greets on it."""
        if self.met:
            return await self.find_fresh_link()
        self._came_at = began = self.time()
        with anyio.CancelScope(deadline=began + self._timeout):  # `fail_after` would cost three times as much
            _, link = await self._dial(lambda: Link(self))
            self._patience.connected(self.time() - began)
            assert isinstance(link, Link), "dialing gives what its factory makes"
            return link
        raise TimeoutError

    async def _converse(
        self, link: Link, previous: Link | None, *, heartbeats: float = 1.0
    ) -> tuple[bool, Link | None]:
        """Carry one connection from its first byte to its last, or until a fresh one is greeted in its place.

        Args:
            link: The connection.
            previous: The connection in whose place this one came. It is kept until we are welcomed: what its end would
                mean to the server (a process that died) is not so.
            heartbeats: How many of them a server that greets nobody is given: more each time, since whoever hangs up on
                one that is busy stands last in its queue again.

        Returns:
            Whether it got as far as a welcome, and the fresh connection.
        """
        self._link, self._previous = link, previous
        self._silence = silence = Silence(link, self._patience, self, heartbeats)
        self._connection.connected(nonce=secrets.token_bytes(16))
        if self.met:
            silence.expect_answer()  # the greeting may be here, the welcome is not
        try:
            link.take_up()
            await link.over
        finally:
            silence.stop()
            if silence.successor.done():
                link.farewell = link.farewell or "it was silent, and a fresh connection was not"
            else:
                link.abort()
            self.last_problem = link.reason()
            welcomed = self._ready
            self._abort_previous()
            self._disconnected(link)
            await silence.aclose()
        if not silence.successor.done():
            return welcomed, None
        self._patience.changed_connection()
        return welcomed, silence.successor.result()

    def _abort_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.abort()

    @property
    def has_watches(self) -> bool:
        """Whether any watch is open at the server."""
        return bool(self._watches)

    def ask_ping(self) -> None:
        """Ask what any server answers at once, if it can be asked now."""
        if self._ready:
            self._send(self._connection.ask(Ping(), None))

    async def find_fresh_link(self) -> Link:
        """Give a connection on which the store has greeted us, however long that takes."""
        return await greeted_link(self._dial, self, self._patience, partial(setattr, self, "last_problem"))

    async def probe(self) -> None:
        """Return once the store has answered a newcomer."""
        await server_answers(self._dial, self._patience, token=self._token, name=self.name)

    def _disconnected(self, link: Link) -> None:
        if self._link is not link:
            return
        self._link = self._silence = None
        was_ready, self._ready = self._ready, False
        self._out.clear()
        self._writable = True
        self._connection.disconnected()
        self._room.changed()
        for watch in self._watching:
            watch.interrupted()
        if was_ready:
            log.debug("the connection to %s is lost: %s", self.name, self.last_problem)
            for callback in self._on_connection:
                callback(False)

    def fail(self, error: StoreError) -> None:
        """Make this client useless: every call under way raises the error. The first error counts."""
        if self._failed is not None:
            return
        self._failed = error
        self._end_first_wait()
        self._room.let_all_in()
        for item in list(self._connection.in_flight.values()):
            self._connection.answered(item.request_id)
            settle(item, with_doubt(error, item))
        for watch in self._watching:
            watch.end(error)
        if self._link is not None and self._link.transport is not None:
            self._link.transport.close()
        for callback in self._on_connection:
            callback(False)

    # ------------------------------------------------------------------------------------------ bytes in

    def received(self, link: Link, data: bytes) -> None:
        """Bytes have come; called by a connection."""
        if link is not self._link:
            return
        try:
            for item in self._connection.receive(data):
                match item:
                    case Reply(request_id=request_id, response=response):
                        self._replied(request_id, response)
                    case Events(request_id=watch_id, events=events):
                        if watch_id in self._watches:
                            self._watches[watch_id].deliver(events)
                    case Lagged(request_id=watch_id, revision=revision):
                        if watch_id in self._watches:
                            self._watches[watch_id].lagged(revision)
                    case Welcome():
                        self._take_welcome(item)
                    case Bye(reason=reason):
                        link.farewell = reason
                    case bytes():  # our hello
                        self._hello_at = self.time()
                        link.write(item + self._connection.encode_first())
        except LimitExceeded as error:
            # The server is full: it may have room later, so this is a reason to try again, within the caller's time.
            self._leave(link, str(error))
        except (AuthenticationError, ProtocolError, StoreReplaced) as error:
            self._refused(error, link)
        silence = self._silence
        if silence is not None:
            silence.heard(expecting=not self._ready or len(self._connection.in_flight) > len(self._parked))

    def _refused(self, error: StoreError, link: Link | None = None) -> None:
        """We cannot converse with whoever answers. It is the store only once it has proven to be, or was never met.

        Anybody may stand in its place for a while: a proxy that says 503, a machine with its old address. So if we have
        met the store, who has not been welcomed by it tries again, for as long as its callers have time.
        """
        unproven = self._connection.welcomed is None and not isinstance(error, StoreReplaced)
        if self.met and unproven:
            self.last_problem = str(error)
            if link is not None:
                self._leave(link, str(error))
        else:
            self.fail(error)

    def _leave(self, link: Link, reason: str) -> None:
        link.farewell = reason
        assert link.transport is not None
        link.transport.close()

    def _take_welcome(self, welcome: Welcome) -> None:
        """The conversation begins: what was asked before, and has no answer, is asked again in the same order."""
        self._ready = True
        if not self.answered_in:  # a cut makes it long to connect, and the welcome waits for the disk: seldom both
            self.answered_in = min(self._hello_at - self._came_at, self.time() - self._hello_at)
        assert self._silence is not None, "we converse"
        self._patience.was_silent(self.time() - self._silence.pulse.began, now=self.time())
        self.limits = dict(welcome.limits)
        self.operations_max: int = int(welcome.limits.get("operations_max", self.operations_max))
        self.writes_max: int = int(welcome.limits.get("writes_max", self.writes_max))
        self.lease_ttl_max: float = welcome.limits.get("lease_ttl_max", self.lease_ttl_max)
        self._end_first_wait()
        self._abort_previous()
        if not self._connection.resumed:
            for item in self._connection.lost_for_good():
                why = "broke, and the server has since forgotten this client's session"
                settle(item, ConnectionLost(f"the connection to {self.name} {why}", maybe_applied=True))
        for item in self._connection.to_send_again():
            self._send(item)
        if len(self._connection.in_flight) > len(self._parked):
            self._silence.expect_answer()  # to what went with the hello
        for watch in self._watching:
            watch.resume()
        for callback in self._on_connection:
            callback(True)

    def _replied(self, request_id: int, response: Response) -> None:
        item = self._connection.answered(request_id)
        self._parked.discard(request_id)
        self._room.changed()
        self._patience.answered()
        if item is None:
            return
        if isinstance(response, Pong):
            # Every event up to this revision was sent before it: watches that saw none need not ask for them again.
            for watch in self._watches.values():
                watch.nothing_before(response.revision)
        if isinstance(response, Watching) and request_id in self._watches:
            self._watches[request_id].opened(response.revision)
        error = error_of(response)
        settle(item, error if error is not None else response)

    # ------------------------------------------------------------------------------------------ bytes out

    async def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and give its response; see `Store.call`."""
        if timeout is None and not waits(request):
            timeout = self._timeout
        self._check_usable()
        if not self._room.free:
            await self._wait_for_room(timeout)
            self._check_usable()
        item, answer = self._ask(request, timeout)
        try:
            return await answer
        except asyncio.CancelledError:
            self.abandon(item)
            raise

    def _ask(self, request: Request[R], timeout: float | None) -> tuple[InFlight, asyncio.Future[R]]:
        """Send a request now, or as soon as there is a connection; its answer, or its error, is the future's."""
        answer: asyncio.Future[R] = self._loop.create_future()
        item = self._connection.ask(request, answer)
        if waits(request):
            self._parked.add(item.request_id)
        if timeout is not None:
            item.timer = self._loop.call_later(timeout, self._time_out, item, timeout)
        if self._ready:
            self._send(item)
        return item, answer

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise UsedAfterFork(f"this client of {self.name} was made before fork(); make a new one in the child")
        if self._failed is not None:
            raise unsent(self._failed)

    def _has_room(self, about_to_ask: int) -> bool:
        asked = len(self._connection.in_flight) - len(self._parked)
        most = self._connection.limits.get("session_replies_max", math.inf)  # half of it may await acknowledgement
        return self._writable and asked + about_to_ask < min(IN_FLIGHT_MAX, max(most // 2, 1))

    async def _wait_for_room(self, timeout: float | None) -> None:
        """Hold a caller back while too much is in flight, or the socket takes no more."""
        if not await self._room.wait(timeout):
            raise no_room(len(self._connection.in_flight), timeout, self.name)

    def may_write(self, link: Link, *, writable: bool) -> None:
        """The socket takes no more, or takes more again; called by a connection."""
        if link is self._link:
            self._writable = writable
            self._room.changed()

    def _send(self, item: InFlight) -> None:
        """Queue a request; all that is asked in one turn of the loop is written at once."""
        try:
            self._out.append(self._connection.encode(item))
        except StoreError as error:
            self._parked.discard(item.request_id)
            settle(item, error)
        else:
            silence = self._silence
            if silence is not None and silence.pulse.asked_at is None and item.request_id not in self._parked:
                silence.expect_answer()
            if not self._flushing:
                self._flushing = True
                self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._out and self._failed is None and self._link is not None and self._link.transport is not None:
            out, self._out = self._out, []
            self._link.write(out[0] if len(out) == 1 else b"".join(out))

    def _time_out(self, item: InFlight, timeout: float) -> None:
        """A caller's time is over."""
        trouble = None if self._ready else f"the connection is lost, {self._what_is_wrong()}"
        error = out_of_time(item, timeout, self.name, trouble)
        self.abandon(item)
        settle(item, error)

    def abandon(self, item: InFlight) -> None:
        """Nobody waits for this reply any more."""
        if item.timer is not None:
            item.timer.cancel()
        self._connection.abandon(item)
        if isinstance(item.request, messages.Watch) or item.request_id in self._parked:
            # It would stay at the server, and for ever if it were asked again after a reconnect.
            self._parked.discard(item.request_id)
            self._connection.answered(item.request_id)
            if item.sent and (self._ready or self._connection.asked_early(item)):
                cancel = self._connection.ask(Cancel(target=item.request_id), None)
                if self._ready:
                    self._send(cancel)
        elif not self._ready:
            self._connection.disconnected()  # once more: what is abandoned meanwhile is not asked again, either
        self._room.changed()

    # ------------------------------------------------------------------------------------------ watches

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """Watch all keys that start with `prefix`; see `Store.watch`."""
        if self._begun is not None and snapshot and start_revision is None and prefix == self._opening:
            begun, self._begun = self._begun, None
            return begun
        return self.watch_kind(self, WatchCursor(prefix, start_revision=start_revision, snapshot=snapshot))

    def add_watch(self, watch: Watch) -> None:
        """Tell this watch of reconnects from now on."""
        self._check_usable()
        self._watching[watch] = None

    def remove_watch(self, watch: Watch) -> None:
        """Tell it nothing more."""
        self._watching.pop(watch, None)

    def ask_to_watch(
        self, watch: Watch, request: messages.Watch, *, limited: bool
    ) -> tuple[InFlight, asyncio.Future[Watching]]:
        """Open it at the server; its events are delivered by the id of the request."""
        item, answer = self._ask(request, self._timeout if limited else None)
        self._watches[item.request_id] = watch
        return item, answer

    def awaits_answer(self, request_id: int) -> bool:
        """Whether this request has no answer yet."""
        return request_id in self._connection.in_flight

    def end_watch(self, request_id: int, *, at_server: bool) -> None:
        """Deliver no more events of this request, and end it at the server, too, if that is in reach."""
        if at_server and self._ready:
            self._send(self._connection.ask(Cancel(target=request_id), None))
        self._watches.pop(request_id, None)
