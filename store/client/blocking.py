"""The blocking client of a store. Each call takes a free channel or a new one, so threads do not queue."""

from __future__ import annotations

import contextlib
import random
import ssl
import time
from typing import TYPE_CHECKING, Any, TypeVar

from store import interface
from store.calls import checked_timeout
from store.client.channel import Channel, ChannelsState
from store.errors import ConnectionLost, StoreError, StoreTimeoutError, StoreUsageError, WaitEndedError, WatchCompacted
from store.interface import DEFAULT_TIMEOUT, NOT_OPEN
from store.limits import Limits
from store.messages import Event, Grant, KeepAlive, Pong, Request, Response, Revoke, Transact, waits
from store.net.racing import Addresses
from store.net.sockets import raised_by_signal
from store.protocol.wire import Events, Lagged, Reply
from store.watch_cursor import WatchCursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from store.calls import DisconnectNotifier
    from store.net.address import Address
    from store.protocol.connection import Secret

IDLE_MOST = 60.0  # seconds; a channel idle for longer is closed, unless no other is free
GIVEN_BACK_AT_ONCE = 8  # the most idle channels that one `Client.call` closes
PASSED_ON_WITHIN = (
    1.0  # seconds for each of two pings that move an idle channel's leases to another; it stays open if one fails
)
LEASED = frozenset({Grant, KeepAlive, Revoke, Transact})  # requests that may change which connection keeps a lease

R = TypeVar("R", bound=Response)


class Client(interface.BlockingStore):
    """The blocking client of the store at `address`; safe to use from several threads.

    `token` may be a function, called for each connection. `renew` reads the files of token and certificates again
    before each connection, and returns the TLS context.
    """

    operations_max: int = Limits.operations_max
    writes_max: int = Limits.writes_max

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
        self.shared: ChannelsState = ChannelsState(
            Addresses(address.host, address.port),
            (tls or ssl.create_default_context()) if address.secure else None,
            name=self.name,
            token=token,
            renew=renew,
            rng=rng or random.Random(),
        )
        self.cuts: DisconnectNotifier | None = self.shared.cuts
        self._free: list[Channel] = []  # each access is atomic
        self._waiting: set[Channel] = set()  # each access is atomic

    @property
    def failure(self) -> StoreError | None:
        """See `Calls.failure`."""
        return self.shared.failed

    @property
    def store_id(self) -> str | None:
        """See `Store.store_id`."""
        return self.shared.store_id

    def call(self, request: Request[R], *, timeout: float | None = None) -> R:
        """See `Calls.call`."""
        shared, parks = self.shared, waits(request)
        shared.check_usable()
        timeout = checked_timeout(timeout, None if parks else self.timeout)
        channel = self._acquire_channel()
        if parks:
            self._waiting.add(channel)
        try:
            # Check again: `interrupt` and `end_waits` miss a channel that is not registered yet.
            shared.check_usable_for(request)
            answer = channel.call(request, timeout)[0]
            if type(request) in LEASED:
                self._note_channel_leases(request, answer, channel)
            return answer
        finally:
            if parks:
                self._waiting.discard(channel)
            channel.idle_since = time.monotonic()
            self._free.append(channel)
            if shared.failed is not None:
                self._close_all_idle()
            else:
                self._close_idle_channels(channel.idle_since)

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        """See `Store.watch`."""
        return Watch(self, WatchCursor(prefix, start_revision=start_revision, snapshot=snapshot))

    def close(self) -> None:
        """Close the client; calls under way in other threads raise `ConnectionLost`."""
        self.interrupt(ConnectionLost(f"the client of {self.name} is closed"))
        self._close_all_idle()

    def __copy__(self) -> Client:
        # A forked child copies the client, as it cannot use the parent's connections.
        shared = self.shared
        client = Client(self.address, token=shared.token, tls=self.tls, renew=shared.renew, timeout=self.timeout)
        client.shared.store_id = self.store_id
        return client

    def interrupt(self, error: StoreError) -> None:
        """Make all calls raise `error`, also those under way."""
        self.shared.fail(error)
        for channel in list(self.shared.channels):
            if channel not in self._free:
                channel.interrupt()

    def end_waits(self) -> None:
        """See `BlockingStore.end_waits`."""
        self.shared.waits_ended = True
        for channel in tuple(self._waiting):
            channel.interrupt()  # this closes the connection; the channel's next call makes another

    def _acquire_channel(self) -> Channel:
        try:
            return self._free.pop()
        except IndexError:
            channel = Channel(self.shared)
            self.shared.channels.append(channel)
            return channel

    def _note_channel_leases(self, request: Request[Any], answer: Any, channel: Channel) -> None:
        """Note in `channel.leases` the leases that may end early if the channel's connection is lost."""
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
            if len(channel.leases).bit_count() == 1:  # at 1, 2, 4, 8, ... leases, drop the expired ones
                channel.leases = {each: until for each, until in channel.leases.items() if until > now}

    def _close_idle_channels(self, now: float) -> None:
        for _ in range(GIVEN_BACK_AT_ONCE):
            try:
                if len(self._free) < 2 or now - self._free[0].idle_since < IDLE_MOST:
                    return
                channel = self._free[0]
                if channel.leases and not self._move_leases(channel):
                    channel.idle_since = now  # retry later
                    return
                self._free.remove(channel)
            except (IndexError, ValueError):
                return
            self.shared.discard_channel(channel)

    def _move_leases(self, channel: Channel) -> bool:
        other = self._acquire_channel()
        try:
            leases = dict(channel.leases)
            if other is channel or not other.renew_leases(leases, PASSED_ON_WITHIN):
                return False
            other.leases.update(leases)
            for lease in leases:
                channel.leases.pop(lease, None)
        except BaseException as error:
            if isinstance(error, StoreError) and not raised_by_signal(error):
                return False
            other.abandon_connection()
            raise
        finally:
            self._free.append(other)
        return not channel.leases

    def _close_all_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._free.pop().close(farewell=True)


class Watch(interface.BlockingWatch):
    """A watch on a connection of its own."""

    def __init__(self, client: Client, cursor: WatchCursor) -> None:
        self._client, self._shared = client, client.shared
        self._cursor = cursor
        self._channel = Channel(self._shared)
        self._id = 0
        self._reset: Event | None = None  # the `reset` to yield once the watch is open again, if changes were lost
        self._batch: tuple[Event, ...] = ()  # the events to yield next; if `_given`, those yielded last
        self._given = False  # True if `_batch` was yielded, and is not yet noted in the cursor

    def __enter__(self) -> Self:
        self._shared.channels.append(self._channel)
        try:
            self._open()
        except BaseException:
            self._shared.discard_channel(self._channel)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.ended = True
        self._shared.discard_channel(self._channel)

    def close(self) -> None:
        """End the watch and its iteration; any thread may call this."""
        self._channel.ended = True
        self._channel.interrupt()

    def batches(self) -> Iterator[list[Event]]:
        """See `interface.Watch.batches`."""
        if not self._id:
            raise StoreUsageError(NOT_OPEN)
        for event in self._rest:
            yield [event]
        # Mark a yielded batch by an assignment, in which no signal's handler can raise; move the cursor afterwards.
        while not self._channel.ended:
            if self._given:
                self._cursor.note_delivered(self._batch)
                self._batch, self._given = (), False
            if not self._batch:
                self._read_batch()
            else:
                batch = list(self._batch)
                self._given = True
                yield batch

    def _read_batch(self) -> None:
        channel = self._channel
        try:
            if channel.pushed:
                self._handle_pushed(channel.pushed.popleft())
            elif channel.sock is None:
                self._reopen()
            else:
                for item in channel.receive():
                    if isinstance(item, (Events, Lagged)):
                        channel.pushed.append(item)
                    elif isinstance(item, Reply):
                        channel.connection.take_request(item.request_id)
                        if isinstance(item.response, Pong):
                            channel.pushed.append(item.response)
        except BaseException as error:
            if not isinstance(error, OSError) or raised_by_signal(error):
                channel.abandon_connection()
                raise
            channel.note_disconnect(error)

    def _handle_pushed(self, pushed: Events | Lagged | Pong) -> None:
        if isinstance(pushed, Pong):
            # Before a pong, the server sends every event up to the pong's revision.
            self._cursor.note_progress(pushed.revision)
        elif pushed.request_id == self._id:  # the message is not of an earlier opening of the watch
            if isinstance(pushed, Events):
                self._batch = pushed.events
            else:
                self._channel.pushed.clear()  # the server closed the watch: later pongs confirm nothing
                self._cursor.note_progress(pushed.revision)
                self._reopen()

    def _reopen(self) -> None:
        """Reopen the watch, without a time limit; the next batch may be a `reset`."""
        while not self._channel.ended:
            try:
                self._open()
            except WatchCompacted:
                if not self._cursor.note_compacted():
                    raise
            except WaitEndedError:
                return
            except ConnectionLost:
                self._shared.check_usable()
            except StoreTimeoutError as error:
                if raised_by_signal(error):
                    raise
                self._channel.close()  # else the server may still open the watch on this connection
            else:
                if self._reset is not None:
                    self._batch, self._reset = (self._reset,), None
                return

    def _open(self) -> None:
        request, reset = self._cursor.opening_request()
        self._reset = reset or self._reset  # keep an earlier `reset` until it is yielded: the call below may fail
        watching, self._id = self._channel.call(request, self._client.timeout)
        self._cursor.note_opened(watching.revision)
