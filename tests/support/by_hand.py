"""The store without sockets, clocks or tasks: the test itself delivers messages and advances the time.

`Desk` is an engine that gets requests directly. `Town` adds the protocol: `Post` is a client whose bytes the test
carries to the server and back, in pieces of any size, or loses (as h11's `ConnectionPair` does).

These classes do the work of `server.py` and `client.py` for a connection, without the waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from store import (
    AuthenticationError,
    ConnectionLost,
    Entry,
    Event,
    Grant,
    LimitExceeded,
    ProtocolError,
    StoreError,
    StoreReplaced,
)
from store.engine.applied import EventBatch, WaitEnd, WatchLost
from store.engine.engine import Engine
from store.engine.processes import DisconnectKind
from store.messages import Failed, Granted, Listing, ListingPart, Request, Response
from store.protocol import wire
from store.protocol.connection import ClientConnection, InFlight, ServerConnection, error_of
from store.protocol.wire import Bye, Events, Hello, Lagged, Rejection, Reply, Welcome
from tests.support.limits import limits_with

START = 1000.0  # when a desk's clock begins; not 0, which no real clock shows
LOOK_EVERY = 0.1  # seconds, as the server looks

Stream = list[tuple[Event, ...]]


class Desk:
    """An engine, its clock, and what every peer was told without being asked."""

    def __init__(self, engine: Engine | None = None, /, **limits: Any) -> None:
        self.engine = engine or Engine(store_id="store-1", limits=limits_with(**limits))
        self.now = START
        self.told: dict[tuple[int, int], Stream] = defaultdict(list)  # by peer and watch
        self.answers: dict[tuple[int, int], Response] = {}  # to parked waits
        self.last_id: dict[int, int] = {}

    def connect(
        self, peer: int = 1, *, session: bytes | None = None, process: bytes = b""
    ) -> tuple[int, int | None] | None:
        """Let a peer say hello."""
        opened = self.engine.connect(
            peer, session_id=session or b"session of %07d" % peer, process=process, now=self.now
        )
        self.last_id.setdefault(peer, 0)
        return opened

    def disconnect(self, peer: int = 1, *, how: DisconnectKind = DisconnectKind.DROPPED) -> None:
        """Close a peer's connection."""
        self.engine.disconnect(peer, now=self.now, how=how)
        self.do_chores()

    def ask(
        self, request: Request[Any], *, peer: int = 1, request_id: int | None = None, acknowledged: int | None = None
    ) -> Any:
        """Hand in a request; its response, or None if it is parked. All earlier replies count as received."""
        if peer not in self.last_id:
            self.connect(peer)
        if request_id is None:
            request_id = self.last_id[peer] + 1
        self.last_id[peer] = max(request_id, self.last_id[peer])
        applied = self.engine.apply(
            request,
            peer=peer,
            request_id=request_id,
            acknowledged=request_id - 1 if acknowledged is None else acknowledged,
            now=self.now,
        )
        self.take(applied.deliveries)
        response, parts = applied.response, list[Any]()
        while applied.work is not None:
            if isinstance(applied.response, ListingPart):
                parts += applied.response.entries
            applied = self.engine.continue_long_request(applied.work)
            self.take(applied.deliveries)
            if isinstance(applied.response, Listing):
                response = applied.response.replace(entries=(*parts, *applied.response.entries))
        self.do_chores()
        return response

    def do_chores(self) -> None:
        """Do the work that the engine has put off, for example after a change that many clients wait for."""
        while self.engine.has_chores:
            self.take(self.engine.do_postponed_work())

    def fails(self, request: Request[Any], *, peer: int = 1) -> Failed:
        """Hand in a request that is to be refused."""
        response = self.ask(request, peer=peer)
        assert isinstance(response, Failed), response
        return response

    def take(self, deliveries: Iterable[EventBatch | WaitEnd | WatchLost]) -> None:
        """Record the deliveries of one step, with their recipients."""
        for delivery in deliveries:
            match delivery:
                case WaitEnd(peer=peer, request_id=request_id, response=response):
                    self.answers[peer, request_id] = response
                case EventBatch(watches=watches, events=events):
                    for peer, watch_ids in watches.items():
                        for watch_id in watch_ids:
                            self.told[peer, watch_id].append(events)

    def pass_time(self, seconds: float) -> None:
        """Let time pass on a server that keeps looking at its clock."""
        until = self.now + seconds
        while self.now < until:
            due_in = self.engine.state.leases.seconds_to_next_expiry()
            self.now = min(self.now + (LOOK_EVERY if due_in is None else min(due_in, LOOK_EVERY)), until)
            self.look()

    def stand_still(self, seconds: float) -> None:
        """Let time pass on a server that is stopped meanwhile."""
        self.now += seconds
        self.look()

    def look(self) -> None:
        """Do the engine's work that is due by now, as the server does after a look at its clock."""
        if self.engine.advance_lease_clock(now=self.now):
            self.take(self.engine.tick(now=self.now))

    def keys(self) -> list[str]:
        """Return the keys that exist."""
        return list(self.engine._keys.entries)

    def fingerprint(self) -> object:
        """All that a refused request must leave as it was."""
        figures = self.engine.figures()
        figures.pop("requests")
        del figures["replies_bytes"], figures["memory_bytes"]  # a refusal is kept as any reply is
        return figures, dict(self.engine._keys.entries), self.engine._keys.index.chunks_under("")[0], self.told.copy()


class Town(Desk):
    """A server of the protocol, for any number of clients."""

    def __init__(self, engine: Engine | None = None, /, *, token: bytes | None = None, **limits: Any) -> None:
        super().__init__(engine, **limits)
        self.token = token
        self.links: dict[int, StoreSession] = {}
        self._nonces = 0

    def accept(self) -> StoreSession:
        """Take a new connection."""
        peer = len(self.links) + 1
        self._nonces += 1
        connection = ServerConnection(
            store_id=self.engine.store_id,
            nonce=b"server nonce %03d" % self._nonces,
            token=self.token,
            limits=self.engine.limits,
        )
        link = self.links[peer] = StoreSession(self, peer, connection)
        link.to_client += connection.encode_greeting()
        return link

    def received(self, link: StoreSession, data: bytes) -> None:
        """Do what these bytes ask for."""
        try:
            for item in link.connection.receive(data):
                match item:
                    case (request_id, acknowledged, request):
                        self._apply(link.peer, request_id, acknowledged, request)
                    case Hello(session_id=session):
                        self._take_in(link, session)
                    case Bye():
                        link.says_goodbye = True
                        link.close()
                if not link.open:
                    break
        except (ProtocolError, AuthenticationError) as error:
            link.error = error
            kind = "authentication" if isinstance(error, AuthenticationError) else "protocol"
            link.to_client += wire.encode_rejection(Rejection(kind, str(error)))
            link.close()

    def _take_in(self, link: StoreSession, session: bytes) -> None:
        opened = self.connect(link.peer, session=session)
        assert opened is not None, "tests do not fill the sessions of a town"
        number, previous = opened
        if previous is not None:
            self.links[previous].close()
        link.to_client += link.connection.encode_welcome(
            session=number, address="10.0.0.1", revision=self.engine.revision
        )

    def _apply(self, peer: int, request_id: int, acknowledged: int, request: Request[Any]) -> None:
        applied = self.engine.apply(request, peer=peer, request_id=request_id, acknowledged=acknowledged, now=self.now)
        while True:
            if applied.response is not None:
                self.links[peer].to_client += wire.encode_response(request_id, applied.response)
            self.take(applied.deliveries)
            if applied.work is None:
                break
            applied = self.engine.continue_long_request(applied.work)

    def take(self, deliveries: Iterable[EventBatch | WaitEnd | WatchLost]) -> None:
        """Send the deliveries of one step to their clients."""
        for delivery in deliveries:
            match delivery:
                case WaitEnd(peer=peer, request_id=request_id, response=response):
                    self.links[peer].to_client += wire.encode_response(request_id, response)
                case EventBatch(watches=watches, events=events):
                    encoded = wire.encode_events(events)
                    for peer, watch_ids in watches.items():
                        for watch_id in watch_ids:
                            self.links[peer].to_client += wire.events_head(watch_id, len(encoded)) + encoded


class StoreSession:
    """One connection: the bytes under way in it, both ways."""

    def __init__(self, town: Town, peer: int, connection: ServerConnection) -> None:
        self.town = town
        self.peer = peer
        self.connection = connection
        self.to_server = bytearray()
        self.to_client = bytearray()
        self.open = True
        self.says_goodbye = False
        self.error: StoreError | None = None

    def carry_to_server(self, count: int | None = None) -> None:
        """Let the server read the next bytes that were sent to it: the given number, or all."""
        data = bytes(self.to_server[:count])
        del self.to_server[: len(data)]
        if data and self.open:
            self.town.received(self, data)

    def close(self) -> None:
        """The server sees it end."""
        if self.open:
            self.open = False
            self.town.disconnect(self.peer, how=DisconnectKind.GOODBYE if self.says_goodbye else DisconnectKind.CUT)


class Post:
    """A client, and the messages that it has received."""

    def __init__(self, *, session: bytes = b"a client's 16 by", token: bytes | None = None) -> None:
        self.connection = ClientConnection(session_id=session, token=token, name="tcp://town")
        self.link: StoreSession | None = None
        self.outcomes: dict[int, Response | StoreError] = {}
        self.failure: StoreError | None = None
        self.bye: str | None = None
        self.lost: StoreSession | None = None  # a connection that the server may not know to be lost
        self._nonces = 0

    @property
    def ready(self) -> bool:
        """True if requests may be sent."""
        return self.connection.welcomed is not None

    def dial(self, town: Town) -> StoreSession:
        """Make a connection; nothing has been carried yet."""
        assert self.link is None
        self._nonces += 1
        self.connection.start_connection(nonce=b"client nonce %03d" % self._nonces)
        self.link = town.accept()
        return self.link

    def cut(self, *, unnoticed: bool = False) -> None:
        """Lose the connection, and all bytes that are on their way to the client.

        With `unnoticed` the server has not seen the cut yet, and bytes on their way to it may still arrive (`lost`).
        """
        link, self.link = self.link, None
        assert link is not None
        if unnoticed:
            self.lost = link
        else:
            link.close()
        self.connection.end_connection()

    def ask(self, request: Request[Any]) -> InFlight:
        """Ask, now or as soon as there is a welcome."""
        item = self.connection.register_request(request, None)
        if self.ready:
            self._send(item)
        return item

    def carry_to_client(self, count: int | None = None) -> None:
        """Read the next bytes that the server has sent: the given number, or all."""
        assert self.link is not None
        data = bytes(self.link.to_client[:count])
        del self.link.to_client[: len(data)]
        if data:
            self.received(data)

    def received(self, data: bytes) -> None:
        """Process bytes that the server has sent."""
        assert self.link is not None
        try:
            for item in self.connection.receive(data):
                match item:
                    case bytes():
                        self.link.to_server += item
                    case Welcome():
                        self._take_welcome()
                    case Reply(request_id=request_id, response=response):
                        self._replied(request_id, response)
                    case Events():
                        pass  # the connection has noted how far it has seen
                    case Lagged():
                        raise AssertionError("a town lets nobody lag")
                    case Bye(reason=reason):
                        self.bye = reason
        except (ProtocolError, AuthenticationError, StoreReplaced, LimitExceeded) as error:
            self.failure = error

    def settle(self) -> None:
        """Carry everything there is to carry, both ways."""
        assert self.link is not None
        while self.link.to_server or self.link.to_client:
            self.link.carry_to_server()
            self.carry_to_client()

    def notice(self) -> None:
        """See whether the server has hung up, as it does for a hello that was long under way on an older connection."""
        if self.link is not None and not self.link.open:
            self.cut()

    def finish(self, town: Town) -> None:
        """Carry everything, through as many connections as it takes."""
        self.notice()
        while self.link is None:
            self.dial(town)
            self.settle()
            self.notice()
        self.settle()

    def meet(self, town: Town) -> StoreSession:
        """Connect, and carry everything."""
        link = self.dial(town)
        self.settle()
        return link

    def _send(self, item: InFlight) -> None:
        assert self.link is not None
        self.link.to_server += self.connection.encode(item)

    def _take_welcome(self) -> None:
        if not self.connection.resumed:
            for item in self.connection.take_lost_requests():
                self.outcomes[item.request_id] = ConnectionLost("the session is forgotten", maybe_applied=True)
        for item in list(self.connection.in_flight.values()):
            self._send(item)

    def _replied(self, request_id: int, response: Response) -> None:
        if self.connection.take_request(request_id) is not None:
            self.outcomes[request_id] = error_of(response) or response


def entry(key: str, value: bytes, created: int, changed: int | None = None, lease: int | None = None) -> Entry:
    """Return a store's entry for a key."""
    return Entry(
        key=key, value=value, create_revision=created, mod_revision=created if changed is None else changed, lease=lease
    )


def grant(desk: Desk, ttl: float, *, disconnect_ttl: float | None = None, peer: int = 1) -> int:
    """Have a lease granted; its id."""
    granted = desk.ask(Grant(ttl=ttl, disconnect_ttl=disconnect_ttl), peer=peer)
    assert isinstance(granted, Granted)
    assert granted.ttl == ttl
    return granted.lease
