"""Shell: the client of a store for callers who block, on sockets of its own.

A call writes to its socket and reads from it: one round trip, no event loop, no other thread. The protocol, and what
happens after a reconnect, is `ClientConnection`'s, exactly as for the async client. A call takes a free channel, or
makes another one, so threads do not wait for each other's waits. A call that is interrupted, by Ctrl-C or by a signal
handler that raises, gets out at once; its channel is closed, since nobody knows how far it had come.
"""

from __future__ import annotations

import contextlib
import random
import ssl
import time
from typing import TYPE_CHECKING, Any, TypeVar

from store import interface
from store.client.channel import Channel, Shared
from store.errors import (
    ConnectionLost,
    StoreError,
    StoreTimeoutError,
    WaitEnded,
    WatchCompacted,
)
from store.interface import DEFAULT_TIMEOUT
from store.messages import Event, Grant, KeepAlive, Pong, Request, Response, Revoke, Transact, waits
from store.net.racing import Addresses
from store.net.sockets import raised_by_handler
from store.protocol.wire import Events, Lagged, Reply
from store.watch_cursor import WatchCursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self

    from store.calls import Cuts
    from store.net.address import Address
    from store.protocol.connection import Secret

__all__ = ["Client", "Watch"]

IDLE_MOST = 60.0  # seconds; a connection that no call has needed for so long is closed, but for the last one ...
GIVEN_BACK_AT_ONCE = 8  # ... and so many by one call, which waits for it
PASSED_ON_WITHIN = 1.0  # seconds until another connection keeps the leases of one that is to be closed
LEASED = frozenset({Grant, KeepAlive, Revoke, Transact})  # requests after which another connection may keep a lease

R = TypeVar("R", bound=Response)


class Client(interface.BlockingStore):
    """The blocking client of a store; safe to use from several threads, and reconnecting by itself.

    What its calls raise: see `store.Store`.

    Args:
        address: Where the store is.
        token: What is proven to the server, and asked of it; or returns that for each connection.
        tls: A client-side context for `tcps`; without it the system's certificates are trusted.
        renew: Reads the files of token and certificates again before each connection, and returns the context.
        timeout: Seconds that the first connection, and every call without its own `timeout`, may take.
        rng: For the jitter of reconnecting.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: Secret = None,
        tls: ssl.SSLContext | None = None,
        renew: Callable[[], ssl.SSLContext | None] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        rng: random.Random | None = None,
    ) -> None:
        self.address = address
        self.name: str = str(address)
        self.tls = tls
        self.timeout = timeout
        self.shared: Shared = Shared(
            Addresses(address.host, address.port),
            (tls or ssl.create_default_context()) if address.secure else None,
            name=self.name,
            token=token,
            renew=renew,
            rng=rng or random.Random(),
        )
        self.cuts: Cuts | None = self.shared.cuts
        self._free: list[Channel] = []  # appending and popping are atomic, so threads need no lock
        self._waiting: set[Channel] = set()  # adding, discarding and copying are atomic, so threads need no lock

    @property
    def store_id(self) -> str | None:
        """The identity of the store, once it has been met."""
        return self.shared.store_id

    def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """Make one request and give its response; see `BlockingStore.call`."""
        shared, parks = self.shared, waits(request)
        shared.check_usable()
        if timeout is None and not parks:
            timeout = self.timeout
        channel = self._free_channel()
        if parks:
            self._waiting.add(channel)
        try:
            # Once the channel is taken, and known to wait, so that `interrupt` and `end_waits` miss nobody.
            if shared.failed is not None or shared.waits_ended:
                shared.check(request)
            answer = channel.call(request, timeout)[0]
            if type(request) in LEASED:
                self._note_lease(request, answer, channel)
            return answer
        finally:
            if parks:
                self._waiting.discard(channel)
            channel.idle_since = time.monotonic()
            self._free.append(channel)
            if shared.failed is not None:
                self._close_free()
            elif len(self._free) > 1:
                self._give_back(channel.idle_since)

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """Watch all keys that start with `prefix`; see `Store.watch`. Each watch has a connection of its own."""
        return Watch(self, WatchCursor(prefix, start_revision=start_revision, snapshot=snapshot))

    def time(self) -> float:
        """Seconds on this machine's monotonic clock."""
        return time.monotonic()

    def close(self) -> None:
        """Hang up for good; calls under way in other threads get `ConnectionLost`."""
        self.interrupt(ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False))
        self._close_free()

    def __copy__(self) -> Client:
        """Return another client of the same store, on sockets of its own: for a forked child, say."""
        shared = self.shared
        client = Client(self.address, token=shared.token, tls=self.tls, renew=shared.renew, timeout=self.timeout)
        client.shared.store_id = self.store_id
        return client

    def interrupt(self, error: StoreError) -> None:
        """Make this client useless: every call under way, and every later one, raises `error`. From any thread."""
        self.shared.fail(error)
        for channel in list(self.shared.channels):
            if channel not in self._free:
                channel.interrupt()

    def end_waits(self) -> None:
        """End every wait, now and later; see `BlockingStore.end_waits`."""
        self.shared.waits_ended = True
        for channel in tuple(self._waiting):
            channel.interrupt()  # should it have been answered meanwhile, the next call makes another connection

    def _free_channel(self) -> Channel:
        """A free channel, or a new one."""
        try:
            return self._free.pop()
        except IndexError:
            channel = Channel(self.shared)
            self.shared.channels.append(channel)
            return channel

    def _note_lease(self, request: Request[Any], answer: Any, channel: Channel) -> None:
        """Note that this channel keeps a lease from now on, if the lease would end early with its connection."""
        granted: dict[int, float] = {}
        match request:
            case Grant() if request.disconnect_ttl is not None:
                granted = {answer.lease: answer.ttl}
            case Transact(grants=grants):
                granted = {grant.id: grant.ttl for grant in grants if grant.id and grant.disconnect_ttl is not None}
            case KeepAlive() | Revoke():
                kept = [each.leases.pop(request.lease, None) for each in tuple(self.shared.channels)]
                if any(kept) and isinstance(request, KeepAlive):
                    granted = {request.lease: answer.ttl}
        now = time.monotonic()
        for lease, ttl in granted.items():
            channel.leases[lease] = now + ttl
            if len(channel.leases).bit_count() == 1:  # each time that there are twice as many
                channel.leases = {each: until for each, until in channel.leases.items() if until > now}

    def _give_back(self, now: float) -> None:
        """Close some of the channels that nobody has needed for long: at a busier moment there were more callers.

        The last that was put back is the next that is taken, so the first has been idle for longest. Here, since this
        client has no thread of its own: one that makes no calls keeps what it has. Leases that end with a connection
        pass to another one before.
        """
        for _ in range(GIVEN_BACK_AT_ONCE):
            try:
                if len(self._free) < 2 or now - self._free[0].idle_since < IDLE_MOST:
                    return
                channel = self._free[0]
                if channel.leases and not self._pass_on(channel):
                    channel.idle_since = now  # it is tried again later
                    return
                self._free.remove(channel)
            except (IndexError, ValueError):  # other threads have taken them meanwhile
                return
            self.shared.drop(channel)

    def _pass_on(self, channel: Channel) -> bool:
        """Have another connection keep the leases that a channel keeps; return whether it does."""
        other = self._free_channel()
        try:
            leases = dict(channel.leases)
            if other is channel or not other.keep(leases, PASSED_ON_WITHIN):  # other threads have taken the others
                return False
            other.leases.update(leases)
            for lease in leases:
                channel.leases.pop(lease, None)
        except BaseException as error:
            if isinstance(error, StoreError) and not raised_by_handler(error):
                return False
            other.reset()
            raise
        finally:
            self._free.append(other)
        return not channel.leases

    def _close_free(self) -> None:
        with contextlib.suppress(IndexError):  # another thread closes them, too
            while True:
                self._free.pop().close(farewell=True)


class Watch(interface.BlockingWatch):
    """A watch with a connection of its own; see `store.BlockingWatch`."""

    def __init__(self, client: Client, cursor: WatchCursor) -> None:
        self._client, self._shared = client, client.shared
        self._cursor = cursor
        self._channel = Channel(self._shared)
        self._id = 0
        self._reset: Event | None = None  # what the reader must be told once it is open again
        self._batch: tuple[Event, ...] = ()  # the next one for the reader ...
        self._given = False  # ... or the last one that it was given, which the cursor does not know of yet

    def __enter__(self) -> Self:
        self._shared.check_usable()
        self._shared.channels.append(self._channel)
        try:
            self._open()
        except BaseException:
            self._shared.drop(self._channel)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.ended = True
        self._shared.drop(self._channel)

    def close(self) -> None:
        """End it from another thread: its reader's loop ends."""
        self._channel.ended = True
        self._channel.interrupt()

    def batches(self) -> Iterator[list[Event]]:
        """One list of events per revision; see `interface.BlockingWatch`."""
        for event in self._rest:
            yield [event]
        # The handler of a signal may raise wherever something is called. So what comes counts as given by an assignment
        # just before it is, and is noted in the cursor later, as often as it takes.
        while not self._channel.ended:
            if self._given:
                self._cursor.delivered(self._batch)
                self._batch, self._given = (), False
            if not self._batch:
                self._take_batch()
            else:
                batch = list(self._batch)
                self._given = True
                yield batch

    def _take_batch(self) -> None:
        """Take what has come, or wait for it; open the watch again if its connection is lost."""
        channel = self._channel
        try:
            if channel.pushed:
                self._take(channel.pushed.popleft())
            elif channel.sock is None:
                self._reopen()
            else:
                for item in channel.receive():
                    if isinstance(item, (Events, Lagged)):
                        channel.pushed.append(item)
                    elif isinstance(item, Reply):
                        channel.connection.answered(item.request_id)
                        if isinstance(item.response, Pong):
                            channel.pushed.append(item.response)
        except BaseException as error:
            if not isinstance(error, OSError) or raised_by_handler(error):
                channel.reset()
                raise
            channel.disconnected(error)

    def _take(self, pushed: Events | Lagged | Pong) -> None:
        if isinstance(pushed, Pong):
            # Every event up to this revision was sent before it: it need not be asked for again.
            self._cursor.nothing_before(pushed.revision)
        elif pushed.request_id == self._id:  # else of an earlier opening
            if isinstance(pushed, Events):
                self._batch = pushed.events
            else:
                self._cursor.nothing_before(pushed.revision)
                self._reopen()

    def _reopen(self) -> None:
        """Open it again, however long that takes; the next batch is a `reset` if history is gone."""
        while not self._channel.ended:
            try:
                self._open()
            except WatchCompacted:
                if not self._cursor.compacted():
                    raise
            except WaitEnded:
                return
            except ConnectionLost:
                self._shared.check_usable()
            except StoreTimeoutError as error:
                if raised_by_handler(error):
                    raise
                self._channel.close()  # the server may open it yet, and would then send everything twice
            else:
                if self._reset is not None:
                    self._batch, self._reset = (self._reset,), None
                return

    def _open(self) -> None:
        request, reset = self._cursor.opening()
        self._reset = reset or self._reset  # kept until it is told: this attempt may fail, and the next knows of none
        watching, self._id = self._channel.call(request, self._client.timeout)
        self._cursor.opened(watching.revision)
