"""Shell: a connection that comes back by itself, for a client that awaits: connect, shake hands, notice silence.

One task makes connections, one after the other. Bytes go between the socket and the sans-I/O `ClientConnection`, which
knows what must be sent again. While a connection is silent, a fresh one is looked for beside it (see `pulse`), and
takes its place once the server speaks on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import ssl
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

import anyio

from store.calls import Cuts
from store.client.patience import LASTED, Patience
from store.client.pulse import Line, Pulse, Say
from store.errors import (
    AuthenticationError,
    ConnectionLost,
    LimitExceeded,
    ProtocolError,
    StoreError,
    StoreReplaced,
)
from store.net.absence import Outages, absence_told
from store.net.dialing import (
    NEVER_ANSWERED,
    SAYS_NOTHING,
    TcpDial,
    describe,
    lack_of,
    left_without_a_word,
)
from store.net.process import process_id
from store.net.sockets import forget, let_go_in_children, outstanding
from store.net.tasks import cancel_and_wait
from store.protocol.connection import ClientConnection
from store.protocol.wire import Bye, Events, Lagged, Reply, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from store.net.dialing import Dial
    from store.protocol.connection import Secret

__all__ = ["Link", "Reconnecting"]

log: logging.Logger = logging.getLogger(__name__)


class Link(asyncio.Protocol):
    """One connection: it carries bytes and takes its own pulse. Until its owner takes it up, it keeps what comes.

    Attributes:
        farewell: Why it is to end, as far as that was said.
        over: Done once it has ended, or another connection has taken its place.
    """

    def __init__(self, owner: Reconnecting) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self.transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._early: list[bytes] | None = []  # what came before the client took this connection up
        self._spoken: asyncio.Future[bool] = self._loop.create_future()  # the server has; or False, it has ended before
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.farewell: str = ""
        self._error: Exception | None = None  # that it ended with
        self.pulse: Pulse = Pulse(owner.patience, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None  # for the next look ...
        self._look_due = 0.0  # ... at this time; a handle of uvloop's does not say so of what is due at once
        self._looks_soon = False

    # ------------------------------------------------------------------------------------------ bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self.transport = cast("asyncio.Transport", transport)
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            let_go_in_children(self, self._socket)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._early is None:
            self._owner.received(self, data)
            return
        self._early.append(data)
        if not self._spoken.done():
            self._spoken.set_result(True)

    async def hear(self) -> bool:
        """Wait for the server's first word, or for the end; whether it has said any."""
        return await self._spoken

    def take_up(self) -> None:
        """The client converses on this connection from now on.

        The server speaks first, and has done so: the last packet of a TLS handshake can bring its greeting, before
        whoever awaits the handshake gets to run.
        """
        self.pulse = Pulse(self._owner.patience, self._loop.time())
        self.expect_answer()  # to come is to ask for a welcome
        early, self._early = self._early or [], None
        for data in early:
            self._owner.received(self, data)

    def write(self, data: bytes) -> None:
        """Send it, unless the connection is about to end: uvloop raises then, and what is in flight is sent again."""
        assert self.transport is not None, "it was made before anybody has something to say on it"
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        """The transport takes no more for now."""
        self._owner.may_write(self, writable=False)

    def resume_writing(self) -> None:
        """The transport takes more again."""
        self._owner.may_write(self, writable=True)

    # ------------------------------------------------------------------------------------------ its end

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        forget(self)
        self._socket, self._error = None, error
        if not self._spoken.done():
            self._spoken.set_result(False)
        self.end()

    def end(self) -> None:
        """Whoever converses on it is done: it has ended, or has a successor."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.over.done():
            self.over.set_result(None)

    def leave(self, reason: str) -> None:
        """Close it, once what was written has been sent."""
        self.farewell = reason
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close it at once."""
        self.end()
        if self.transport is not None:
            self.transport.abort()

    def reason(self) -> str:
        """Why it ended."""
        return self.farewell or describe(self.error)

    @property
    def error(self) -> Exception:
        """What it ended with."""
        error = self._error or ConnectionResetError()
        spoken = self._spoken.done() and self._spoken.result()
        if spoken or not isinstance(error, ConnectionResetError):
            return error
        return left_without_a_word(secure=self._owner._secure, met=self._owner.met)

    @property
    def ends(self) -> tuple[str, str] | None:
        """The addresses of this end and of the other, as this system names them; None where there are none."""
        if self.transport is None:
            return None
        ours, theirs = (self.transport.get_extra_info(which) for which in ("sockname", "peername"))
        return (ours[0], theirs[0]) if ours and theirs else None

    # ------------------------------------------------------------------------------------------ its pulse

    def expect_answer(self) -> None:
        """Something was asked: from now on silence counts, if it does not yet."""
        if self.pulse.asked_at is None:
            self.pulse.expect(self._loop.time())
            self._look_soon()

    def heard(self, *, expecting: bool) -> None:
        """The server has said something; `expecting` if it still has something to answer."""
        self.pulse.heard(self._loop.time(), expecting=expecting)
        if expecting:
            self._look_soon()

    def _look_soon(self) -> None:
        """Look in time for what was asked. A look that is of no use costs less than a timer for each request."""
        if not self._looks_soon:
            self._looks_soon = True
            self._look_at(self.pulse.first_look_at(self._loop.time()))

    def _look_at(self, at: float) -> None:
        if self.over.done() or (self._timer is not None and self._look_due <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._look_due, self._timer = at, self._loop.call_at(at, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        late, self._timer = now - self._look_due, None
        buffered = 0 if self.transport is None else self.transport.get_write_buffer_size()
        owner = self._owner
        line = Line(*outstanding(self._socket, buffered), welcomed=owner.connected, has_watches=bool(owner.watches))
        say, until = self.pulse.look(now, line, late=late)
        if say is Say.PING:
            self._owner.ask_ping()
        elif say is Say.SEEK:
            self._owner.seek_successor(self)
        elif say is Say.HANG_UP:
            self.farewell = f"it has been silent for {now - self.pulse.heard_at:.0f} s"
            self.abort()
        self._look_at(until)
        self._looks_soon = self.pulse.asked_at is not None and not self.pulse.seeking


class Reconnecting(ABC):
    """The connection of a `Client`, whose arguments these are: one at a time, made again when it is lost.

    Attributes:
        last_problem: What was last in the way of reaching the store.
        limits: Those that concern a client, by their names in `Limits`, as the store told.
        cuts: Tells of the ends of connections.
    """

    watches: Mapping[int, object]  # those open at the server, by request id

    def __init__(
        self,
        dial: Dial,
        *,
        name: str,
        token: Secret = None,
        rng: random.Random | None = None,
        process: bytes | None = None,
    ) -> None:
        self._dial = dial
        self._addresses = dial.addresses if isinstance(dial, TcpDial) else None  # in memory there are none
        self._secure = isinstance(dial, TcpDial) and dial.secure
        self.name = name
        self.patience: Patience = Patience(rng or random.Random(secrets.randbits(64)))  # less to read than by itself
        self._connection = ClientConnection(
            session_id=secrets.token_bytes(16),
            process=process_id() if process is None else process,
            token=token,
            name=name,
        )
        self._ready = False  # welcomed: requests may be written
        self._failed: StoreError | None = None  # why this client is of no more use
        self._link: Link | None = None  # on which we converse ...
        self._previous: Link | None = None  # ... in place of this one, which is kept until we are welcomed (R20)
        self._trying: Link | None = None  # the newest, while nothing was heard on it
        self._parked: set[int] = set()  # the waits among the requests in flight: they may last, and hold up nobody
        self._writable = True  # the socket takes more
        self._eased = asyncio.Event()  # there may be more room for requests than there was
        self._searches: set[asyncio.Task[Link]] = set()  # for a connection in place of a silent one
        self._attempt = 0  # how many have failed since the last welcome
        self._away_since = 0.0
        self.last_problem: str = NEVER_ANSWERED
        self._on_connection: list[Callable[[bool], None]] = []
        self._outages = Outages(name, self._what_is_wrong, log)
        self._cuts = Cuts(self.time)
        self.cuts: Cuts | None = self._cuts

    # What a subclass does.

    @abstractmethod
    def fail(self, error: StoreError) -> None:
        """Make this client useless: every call under way raises the error. The first error counts."""

    @abstractmethod
    def _take(self, item: Reply | Events | Lagged) -> None:
        """The server has said this."""

    @abstractmethod
    def _take_welcome(self, welcome: Welcome) -> None:
        """The conversation begins: what was asked before, and has no answer, is to be asked again in the same order."""

    @abstractmethod
    def _disconnected(self) -> None:
        """The connection is gone."""

    @abstractmethod
    def ask_ping(self) -> None:
        """Ask what any server answers at once, if it can be asked now."""

    # ------------------------------------------------------------------------------------------ life

    def _begin(self) -> None:
        """Connect from now on, until `_stop`."""
        self._loop = asyncio.get_running_loop()
        self._met_or_failed = asyncio.Event()
        self._task = asyncio.create_task(self._stay_connected(), name=f"store client of {self.name}")
        self._task.add_done_callback(self._task_ended)

    async def _first_welcome(self, within: float, ended_by: str) -> None:
        told = absence_told(self.name, self._what_is_wrong, within=within, ended_by=ended_by)
        with anyio.move_on_after(within), told:
            await self._met_or_failed.wait()
        if self._failed is not None:
            raise self._failed
        if not self._met_or_failed.is_set():
            why = f"no store at {self.name} within {within:g} s: {self._what_is_wrong()}"
            raise ConnectionLost(why, maybe_applied=False)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Nobody is to wait for what cannot come any more: its event loop ends, or a defect, which `_stop` raises."""
        error = None if task.cancelled() else task.exception()
        why = "has ended with its event loop" if error is None else f"has failed: {error!r}"
        self.fail(ConnectionLost(f"the client of {self.name} {why}", maybe_applied=False))

    async def _stop(self) -> None:
        self._outages.over()
        await cancel_and_wait(self._task)
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error

    def _what_is_wrong(self) -> str:
        """Why this client has not been welcomed. How an earlier connection ended says more than that this stands."""
        mute = self._trying is not None and not self.met
        problem = SAYS_NOTHING[self._secure] if mute and self.last_problem == NEVER_ANSWERED else self.last_problem
        return problem + ("" if self._addresses is None else self._addresses.where())

    @property
    def connected(self) -> bool:
        """Whether the store is in reach now."""
        return self._ready

    @property
    def met(self) -> bool:
        """Whether the store has been met: then it is known who it is, and what it speaks."""
        return self._connection.store_id is not None

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

    def bound_pauses(self, remaining: Callable[[], float]) -> None:
        """Reconnect more often when a lease may lapse soon; `remaining` tells in how many seconds, or infinity."""
        self.patience.bound_by(remaining)

    def time(self) -> float:
        """Seconds on the clock of the event loop that it was entered in."""
        return self._loop.time()

    def _tell_connection(self, connected: bool) -> None:
        for callback in self._on_connection:
            callback(connected)

    # ------------------------------------------------------------------------------------------ connecting

    async def _stay_connected(self) -> None:
        """Connect, and connect again whenever the connection is lost, until the client is closed or of no use."""
        self._away_since = self.time()
        successor: Link | None = None
        with contextlib.suppress(AuthenticationError):  # it has failed with that
            while self._failed is None:
                link = successor or await self._fresh_link()
                began = self.time()
                welcomed, successor = await self._converse(link)
                if welcomed:
                    self._attempt, self._away_since = 0, self.time()
                # The server takes who does not come back for dead (R20). One that has said why it hangs up does not;
                # and one that hangs up each time is not to be asked without a pause.
                at_once = welcomed and not link.farewell and self._away_since - began >= LASTED
                if successor is None and not at_once and self._failed is None:
                    await self._pause()

    async def _pause(self) -> None:
        await anyio.sleep(self.patience.pause(self._attempt, away=self.time() - self._away_since))
        self._attempt += 1

    async def _fresh_link(self) -> Link:
        """Connect, again and again, until a server speaks; the connection on which it did.

        Raises:
            AuthenticationError: The store was never met, and who answers has no certificate that we trust.
            TypeError: Or whatever else a defect in `dial` raises; after errors of the network it tries again.
        """
        while True:
            if self._addresses is not None:
                self._addresses.use_small_packets(self.patience.large_packets_seem_lost)
            try:
                link = await self._attempted_link()
            except (OSError, UnicodeError) as error:
                if isinstance(error, ssl.SSLCertVerificationError) and not self.met:
                    untrusted = f"{self.name} has no certificate that we trust: {error.verify_message}"
                    self.fail(AuthenticationError(untrusted))
                    raise AuthenticationError(untrusted) from None
                self.last_problem = describe(error)
                self._cuts.attempted(error)
                if lack_of(error) and not self.met:  # of this process: waiting for the store does not help
                    lost = ConnectionLost(f"{self.name} cannot be asked: {self.last_problem}", maybe_applied=False)
                    self.fail(lost)
                    raise lost from None
                await self._pause()
            else:
                self._cuts.attempted(None)
                if link is not None:
                    return link

    async def _attempted_link(self) -> Link | None:
        """Connect once, and wait for the server's first word; None if it has not come in time.

        What no system answers is given up soon: after a cut the next attempt passes at once, while the system would
        repeat its first packet only after seconds.
        """
        began, links = self.time(), list[Link]()

        def make_link() -> Link:
            """Called once the other side's system has answered, before any TLS."""
            scope.deadline = self.time() + self.patience.first_word()
            self.patience.connected(self.time() - began)
            self._trying = link = Link(self)
            links.append(link)
            return link

        try:
            with anyio.CancelScope(deadline=began + self.patience.attempt()) as scope:
                await self._dial(make_link)
                if await links[0].hear():
                    return links.pop()
                raise links[0].error
        finally:
            self._trying = None
            for link in links:
                link.abort()
        if links:
            self.patience.changed_connection()
            self.last_problem = describe(TimeoutError()) if self.met else SAYS_NOTHING[self._secure]
        else:
            self.last_problem = describe(TimeoutError())
        return None

    async def _converse(self, link: Link) -> tuple[bool, Link | None]:
        """Carry one connection from its first byte to its last, or until a fresh one is found in its place.

        Returns:
            Whether it got as far as a welcome, and the fresh connection.
        """
        self._link = link
        self._connection.connected(nonce=secrets.token_bytes(16))
        successor: Link | None = None
        try:
            link.take_up()
            await link.over
            found = [search for search in self._searches if search.done() and not search.cancelled()]
            if found:
                self._searches.remove(found[0])
                successor = found[0].result()  # or a defect
        finally:
            link.end()
            if successor is None:
                link.abort()
            else:
                link.farewell = link.farewell or "it was silent, and a fresh connection was not"
            self.last_problem = link.reason()
            welcomed, self._ready = self._ready, False
            self._drop_previous()
            self._link, self._writable = None, True
            self._eased.set()
            self._connection.disconnected()
            self._disconnected()
            if welcomed:
                log.debug("the connection to %s is lost: %s", self.name, self.last_problem)
                self._cuts.ended()
                self._tell_connection(False)
                if self._failed is None:
                    self._outages.lost(self._loop)
            await self._end_searches()
        if successor is not None:
            self._previous = link
            self.patience.changed_connection()
        return welcomed, successor

    def _drop_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.abort()

    # ------------------------------------------------------------------------------------------ a silent connection

    def seek_successor(self, link: Link) -> None:
        """Look for a fresh connection to take the place of this one, which is silent."""
        search = asyncio.create_task(self._fresh_link(), name="find a fresh connection")
        self._searches.add(search)

        def ended(search: asyncio.Task[Link]) -> None:
            if search.cancelled():
                self._searches.discard(search)
            else:
                link.end()

        search.add_done_callback(ended)

    async def _end_searches(self) -> None:
        """Search no more. What was found just now, nobody takes up."""
        searches, self._searches = self._searches, set()
        await cancel_and_wait(*searches)
        for search in searches:
            if not search.cancelled() and search.exception() is None:
                search.result().abort()

    # ------------------------------------------------------------------------------------------ bytes

    def may_write(self, link: Link, *, writable: bool) -> None:
        """The socket takes no more, or takes more again; called by a connection."""
        if link is self._link:
            self._writable = writable
            self._eased.set()

    def received(self, link: Link, data: bytes) -> None:
        """Bytes have come; called by a connection."""
        if link is not self._link:
            return
        try:
            for item in self._connection.receive(data):
                match item:
                    case Reply() | Events() | Lagged():
                        self._take(item)
                    case Welcome():
                        self._begin_conversation(item)
                    case Bye(reason=reason):
                        link.farewell = reason
                    case bytes():  # our hello
                        link.write(item)
        except LimitExceeded as error:
            # The server is full: it may have room later, so this is a reason to try again, within the caller's time.
            link.leave(str(error))
        except (AuthenticationError, ProtocolError, StoreReplaced) as error:
            # We cannot converse with whoever answers. It is the store only once it has proven to be, or was never met:
            # anybody may stand in its place for a while, a proxy that says 503, or a machine with its old address. Then
            # we try again, for as long as callers have time.
            if self.met and self._connection.welcomed is None and not isinstance(error, StoreReplaced):
                link.leave(str(error))
            else:
                self.fail(error)
        link.heard(expecting=not self._ready or len(self._connection.in_flight) > len(self._parked))
        for search in self._searches:
            search.cancel()

    def _begin_conversation(self, welcome: Welcome) -> None:
        self._ready = True
        self._outages.over(self.time())
        self._met_or_failed.set()
        self._drop_previous()
        self._take_welcome(welcome)
        self._tell_connection(True)
