"""Sans-I/O: the client's and the server's side of a connection, from hello to goodbye.

`ClientConnection` outlives its connections: it numbers the requests, and keeps unanswered ones, which the client
repeats after a reconnect (promises S2, S10).

Client and server prove that they know the token (promise S8): see docs/protocol.md.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from store.errors import (
    AuthenticationError,
    ConnectionLost,
    LimitExceeded,
    ProtocolError,
    StoreError,
    StoreReplaced,
    StoreTimeoutError,
    unsent_error,
)
from store.limits import Limits
from store.messages import ERRORS, Failed, FailureKind, Grant, Granted, Listing, ListingPart, Response, Revoke, mutates
from store.printable import printable
from store.protocol import wire
from store.protocol.frames import FrameReader
from store.protocol.wire import Bye, Events, Greeting, Hello, Lagged, Rejection, Reply, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from store.messages import Entry, Request

    Secret: TypeAlias = bytes | Callable[[], bytes | None] | None

FRAME_BYTES_AT_FIRST = Limits().frame_bytes_max  # a client's limit until the welcome tells the server's

LIMITS_TOLD = ("operations_max", "writes_max", "session_replies_max", "lease_ttl_max")
"""The limits in a welcome that the client applies itself."""


def _token_proof(token: bytes, role: str, greeting: Greeting, hello: Hello) -> bytes:
    parts = (
        role.encode(),
        b"%d" % hello.version,
        b"%d-%d" % (greeting.version_min, greeting.version_max),  # an attacker could otherwise force an old version
        greeting.store_id.encode(),
        greeting.nonce,
        hello.nonce,
        hello.session_id,
    )
    message = b"".join(len(part).to_bytes(2, "big") + part for part in (b"rdzv token proof", *parts))
    return hmac.digest(token, message, "sha256")


class ServerConnection:
    """The server's side of a client's connection; `nonce` is 16 fresh random bytes."""

    def __init__(self, *, store_id: str, nonce: bytes, token: Secret, limits: Limits, generation: int = 1) -> None:
        self._token = token() if callable(token) else token
        self._greeting = Greeting(wire.VERSION_MIN, wire.VERSION, store_id, nonce, self._token is not None, generation)
        self._limits = limits
        self._elements_max = wire.elements_max(limits.operations_max)
        self._reader = FrameReader(wire.HANDSHAKE_BYTES_MAX)
        self._hello: Hello | None = None
        self._last_id = 0
        self.is_welcomed: bool = False

    @property
    def held_bytes(self) -> int:
        """See `FrameReader.held_bytes`."""
        return self._reader.held_bytes

    def free_incomplete_frame(self) -> None:
        """Free the bytes of an incomplete frame."""
        self._reader = FrameReader(wire.HANDSHAKE_BYTES_MAX)

    def encode_greeting(self) -> bytes:
        """Return the server's greeting as a frame."""
        return wire.encode_opening(self._greeting)

    def decode_single_request(self, data: bytes) -> tuple[int, int, Request[Any]] | None:
        """Return the request if the bytes are exactly one request; otherwise None, and the caller calls `receive`."""
        if self._hello is None or len(data) > wire.STEP_BYTES:
            return None
        body = self._reader.single_frame(data)
        item = None if body is None else wire.decode_request(body)
        if item is None or isinstance(item, Bye):
            return None
        self._check_request_id(item[0])
        return item

    def receive(self, data: bytes | memoryview) -> Iterator[Hello | Bye | tuple[int, int, Request[Any]] | None]:
        """Yield the client's messages. After a `Hello` the caller calls `welcome` before the next item.

        None marks a pause in decoding a large request: the caller serves other peers meanwhile.
        """
        for body in self._reader.feed(data):
            if self._hello is None:
                hello = wire.decode_opening(body, Hello)
                assert isinstance(hello, Hello), "only servers reject"
                self._check_hello(hello)
                self._hello = hello
                self._reader.bytes_max = self._limits.frame_bytes_max
                yield hello
                continue
            if len(body) <= wire.STEP_BYTES:
                item = wire.decode_request(body)
            else:
                item = yield from wire.decode_request_in_steps(body, elements_max=self._elements_max)
            if not isinstance(item, Bye):
                self._check_request_id(item[0])
            yield item

    def _check_request_id(self, request_id: int) -> None:
        if request_id <= self._last_id:
            raise ProtocolError(f"request {request_id} comes after request {self._last_id}; ids count upwards")
        self._last_id = request_id

    def encode_welcome(self, *, session: int, address: str, revision: int, durable: bool = True) -> bytes:
        """Return the welcome that answers a hello, as a frame; `session` is the session's number."""
        assert self._hello is not None, "a welcome answers a hello"
        self.is_welcomed = True
        proof = b"" if self._token is None else _token_proof(self._token, "server", self._greeting, self._hello)
        limits = {name: getattr(self._limits, name) for name in LIMITS_TOLD}
        frame_bytes_max = self._limits.frame_bytes_max
        return wire.encode_opening(Welcome(session, address, revision, frame_bytes_max, proof, limits, durable))

    def _check_hello(self, hello: Hello) -> None:
        if not wire.VERSION_MIN <= hello.version <= wire.VERSION:
            raise ProtocolError(wire.version_error_text(hello.version, hello.version, server=False))
        if self._token is None:
            return
        if not hello.proof:
            raise AuthenticationError("this server wants a token, and the client has none")
        if not hmac.compare_digest(hello.proof, _token_proof(self._token, "client", self._greeting, hello)):
            raise AuthenticationError("the client's token is not the server's")


@dataclass(slots=True, eq=False)
class InFlight:
    """A request without a reply, with its caller's future (`waiter`) and `timer`."""

    request_id: int
    request: Request[Any]
    waiter: Any
    mutates: bool
    sent: bool = False
    abandoned: bool = False
    timer: Any = None  # ends the caller's wait
    parts: list[Entry | None] = field(default_factory=list)  # the received parts of a long listing

    @property
    def maybe_applied(self) -> bool:
        """True if the request may take effect although no answer arrives."""
        return self.mutates and self.sent

    def settle(self, outcome: Response | StoreError) -> None:
        """Give a waiting caller its response or its error."""
        if self.timer is not None:
            self.timer.cancel()
        if self.waiter is None or self.waiter.done():
            return
        if isinstance(outcome, StoreError):
            self.waiter.set_exception(outcome)
        else:
            self.waiter.set_result(outcome)

    def revoke_request(self, response: Response) -> Revoke | None:
        """Return the request that revokes the lease of an abandoned grant, as no caller knows this lease; else None."""
        if self.abandoned and isinstance(self.request, Grant) and isinstance(response, Granted):
            return Revoke(lease=response.lease)
        return None

    def error_for_request(self, error: StoreError) -> StoreError:
        """Return a copy of the client's error for this request, with the request's own `maybe_applied`."""
        mine = unsent_error(error)
        if isinstance(error, ConnectionLost | ProtocolError | AuthenticationError):
            mine.maybe_applied = self.maybe_applied
        return mine

    def timeout_error(self, timeout: float, name: str, trouble: str | None) -> StoreError:
        """Return the error of a request that `name` did not answer in time; `trouble`: of the connection, or None."""
        what, maybe = f"{type(self.request).__name__} at {name}", self.maybe_applied
        if trouble is None:
            return StoreTimeoutError(f"no answer to {what} within {timeout:g} s", maybe_applied=maybe)
        return ConnectionLost(f"{what} was not answered within {timeout:g} s: {trouble}", maybe_applied=maybe)


class ClientConnection:
    """A client's side of its connections to one store."""

    def __init__(
        self, *, session_id: bytes, process: bytes = b"", token: Secret, name: str, generation: int = 1
    ) -> None:
        self._session_id = session_id  # 16 random bytes, constant for this client
        self._process = process  # 16 random bytes, constant for this process; empty if not given
        self._secret = token  # the shared secret, or a function that returns it for each connection
        self._token: bytes | None = None
        self._name = name
        self._generation = generation  # see `Hello`
        self._greeting: Greeting | None = None
        self._hello: Hello | None = None
        self._last_id = 0
        self._session: int | None = None  # the session's number in the last welcome
        self._unanswered: OrderedDict[int, None] = OrderedDict()  # ids of unanswered mutations, oldest first
        self.in_flight: dict[int, InFlight] = {}  # unanswered requests, sent or not, by id, oldest first
        self.welcomed: Welcome | None = None
        self.resumed: bool = False  # True if the last welcome continued the previous session
        self.store_id: str | None = None
        self.seen_revision: int = 0  # the highest revision that the server has sent
        self._frame_bytes_max = FRAME_BYTES_AT_FIRST
        self.limits: dict[str, float] = {}  # the server's limits, from its last welcome

    def start_connection(self, *, nonce: bytes) -> None:
        """Start a connection; `nonce` is 16 fresh random bytes."""
        self._reader = FrameReader(wire.HANDSHAKE_BYTES_MAX)
        self._nonce = nonce
        self._token = self._secret() if callable(self._secret) else self._secret
        self._greeting = self._hello = self.welcomed = None

    def end_connection(self) -> None:
        """End the connection; forget abandoned requests, except grants, whose leases `revoke_request` revokes."""
        self.welcomed = None
        for item in tuple(self.in_flight.values()):
            item.parts.clear()  # a repeated request gets all parts again
            if item.abandoned and not isinstance(item.request, Grant):
                self._forget_request(item)

    @property
    def has_greeting(self) -> bool:
        """True if the server's greeting has arrived on this connection."""
        return self._greeting is not None

    def is_error_retryable(self, error: StoreError) -> bool:
        """Return True if another attempt may succeed: the server was full, or a proxy may have answered instead."""
        in_place_of_it = self.store_id is not None and self.welcomed is None
        return isinstance(error, LimitExceeded) or (in_place_of_it and not isinstance(error, StoreReplaced))

    def receive(self, data: bytes | memoryview) -> Iterator[bytes | Welcome | Reply | Events | Lagged | Bye]:
        """Yield the server's messages; the caller must send any bytes among them at once."""
        for body in self._reader.feed(data):
            item = self._decode(body)
            if isinstance(item, Reply):
                whole = self._assemble_listing(item)
                if whole is None:
                    continue
                self._unanswered.pop(whole.request_id, None)
                self._note_revision(whole.response)
                yield whole
            elif isinstance(item, Events):
                if item.events:  # ignore events of kinds that this release does not know
                    self.seen_revision = max(self.seen_revision, item.events[-1].revision)
                    yield item
            elif isinstance(item, Rejection):
                kinds: dict[str, type[StoreError]] = {"authentication": AuthenticationError, "protocol": ProtocolError}
                raise kinds.get(item.kind, LimitExceeded)(f"{self._name} refused the connection: {item.message}")
            elif isinstance(item, Greeting):
                yield self._answer_greeting(item)
                if item.token_wanted and self._token is None:
                    # The hello without a proof is already sent, so that the server logs the missing token, too.
                    raise AuthenticationError(
                        f"{self._name} wants a token, and none was given: pass token=, or a run's token_file="
                    )
            else:
                yield self._check_welcome(item) if isinstance(item, Welcome) else item

    def _decode(self, body: memoryview) -> Greeting | Welcome | Reply | Events | Lagged | Bye | Rejection:
        if self.welcomed is not None:
            return wire.decode_server_frame(body)
        if self._greeting is not None:
            return wire.decode_opening(body, Welcome)
        return wire.decode_opening(body, Greeting)

    def decode_exact_frame(self, data: bytes, item: InFlight) -> Response | None:
        """Return the answer to `item` if the bytes are exactly its frame; else None, and the caller calls `receive`."""
        body = None if self.welcomed is None else self._reader.single_frame(data)
        if body is None:
            return None
        reply = wire.decode_server_frame(body)
        if type(reply) is not Reply or reply.request_id != item.request_id:
            return None
        if type(reply.response) is ListingPart or item.parts:
            return None
        self._forget_request(item)
        self._note_revision(reply.response)
        return reply.response

    def _assemble_listing(self, reply: Reply) -> Reply | None:
        item = self.in_flight.get(reply.request_id)
        match reply.response:
            case ListingPart(entries=entries):
                if item is not None:
                    item.parts.extend(entries)
                return None
            case Listing(entries=entries, revision=revision) if item is not None and item.parts:
                return Reply(reply.request_id, Listing(entries=(*item.parts, *entries), revision=revision))
        return reply

    def _note_revision(self, response: Response) -> None:
        revision = getattr(response, "revision", 0)
        if (entry := getattr(response, "entry", None)) is not None:
            revision = entry.mod_revision
        self.seen_revision = max(self.seen_revision, revision)

    def _answer_greeting(self, greeting: Greeting) -> bytes:
        version = min(greeting.version_max, wire.VERSION)
        if version < max(greeting.version_min, wire.VERSION_MIN):
            said = wire.version_error_text(greeting.version_min, greeting.version_max, server=True)
            raise ProtocolError(f"{self._name} is not for us: {said}")
        if self._token is not None and not greeting.token_wanted:
            raise AuthenticationError(
                f"{self._name} asks for no token, so it cannot prove that it knows the one given: it is not the server "
                f"meant, or was started without --token-file"
            )
        hello = Hello(version, self._session_id, self._nonce, b"", self._process, self._generation)
        if self._token is not None:
            hello = hello.replace(proof=_token_proof(self._token, "client", greeting, hello))
        self._greeting, self._hello = greeting, hello
        return wire.encode_opening(hello)

    def _check_welcome(self, welcome: Welcome) -> Welcome:
        assert self._greeting is not None
        assert self._hello is not None
        if self._token is not None and not hmac.compare_digest(
            welcome.proof, _token_proof(self._token, "server", self._greeting, self._hello)
        ):
            raise AuthenticationError(
                f"{self._name} could not prove that it knows the token: it is not the server meant"
            )
        if self.store_id is not None and self._greeting.store_id != self.store_id:
            # Compare ids only once the server has proved that it knows the token: any server can send a greeting.
            raise StoreReplaced(
                f"the store at {self._name} is not the one this client knew: {self.store_id} has been replaced by "
                f"{self._greeting.store_id}, so its data is gone"
            )
        if welcome.revision < self.seen_revision:
            raise StoreReplaced(
                f"the store at {self._name} has gone back in time: {self._greeting.store_id} had come to revision "
                f"{self.seen_revision} and is at {welcome.revision} now, as after an old copy was put in its place, "
                f"so later writes are gone"
            )
        self.seen_revision = welcome.revision
        self.resumed = welcome.session == self._session
        self._session = welcome.session
        self.store_id = self._greeting.store_id
        self._frame_bytes_max = welcome.frame_bytes_max
        known = {name: most for name, most in welcome.limits.items() if type(most) in (int, float)}
        welcome = welcome.replace(limits=known)
        self.limits = known
        self._reader.bytes_max = wire.RESPONSE_BYTES_MAX
        self.welcomed = welcome
        return welcome

    def register_request(self, request: Request[Any], waiter: Any) -> InFlight:
        """Number a request and keep it until it is answered."""
        self._last_id += 1
        item = InFlight(self._last_id, request, waiter, mutates(request))
        self.in_flight[item.request_id] = item
        return item

    def encode(self, item: InFlight) -> bytes:
        """Return a request as a frame; after `LimitExceeded` or `StoreUsageError`, forget the request."""
        if item.mutates:
            self._unanswered[item.request_id] = None
        oldest = next(iter(self._unanswered), item.request_id)
        try:
            frame = wire.encode_request(item.request_id, oldest - 1, item.request, bytes_max=self._frame_bytes_max)
        except StoreError:
            self._forget_request(item)
            raise
        item.sent = True
        return frame

    def take_lost_requests(self) -> list[InFlight]:
        """After a welcome to a new session, forget and return the sent mutations: each may have been applied."""
        lost = [item for item in self.in_flight.values() if item.maybe_applied and not self.resumed]
        for item in lost:
            self._forget_request(item)
        return lost

    @property
    def session_forgotten_error(self) -> ConnectionLost:
        """The error of the requests that `take_lost_requests` returns."""
        why = "broke, and the server has since forgotten this client's session"
        return ConnectionLost(f"the connection to {self._name} {why}", maybe_applied=True)

    def take_request(self, request_id: int) -> InFlight | None:
        """Remove and return the request with this id, or None."""
        return self.in_flight.pop(request_id, None)

    @property
    def abandoned_grants(self) -> list[InFlight]:
        """The unanswered grants that no caller waits for: see `InFlight.revoke_request`."""
        return [item for item in self.in_flight.values() if item.abandoned and isinstance(item.request, Grant)]

    def abandon_request(self, item: InFlight) -> None:
        """Note that no caller waits for a request: it is repeated after a reconnect only if it is a sent grant."""
        item.abandoned = True
        if not item.sent or (self.welcomed is None and not isinstance(item.request, Grant)):
            self._forget_request(item)

    def _forget_request(self, item: InFlight) -> None:
        self.in_flight.pop(item.request_id, None)
        self._unanswered.pop(item.request_id, None)


def error_of(response: Response) -> StoreError | None:
    """Return the error that a response stands for, or None."""
    if type(response) is not Failed:
        return None
    message = printable(response.message)
    if response.kind is FailureKind.FORGOTTEN:
        return ConnectionLost(message, maybe_applied=True)
    return ERRORS[response.kind](message)
