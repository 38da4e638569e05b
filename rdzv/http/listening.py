"""Accepts HTTP connections within the limits of a connection table, and applies the access rules.

aiohttp's own listener keeps any number of silent connections, which would use up the process's file
descriptors. So each HTTP connection is in the store's connection table, as unauthenticated. A full table closes
unauthenticated connections that are silent.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
from aiohttp import web

from rdzv.http.run_reader import NoSuchRun
from store import StoreError
from store.limits import Limits
from store.net.sockets import listen_on
from store.server.accept.connection_table import BESIDE_SHARE, ConnectionTable
from store.server.accept.listener import TcpListener
from store.server.accept.tls import TLS_BYTES, TlsLayer

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from rdzv.http.access_rules import AccessRules

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

VISITOR_BYTES: Final = 16 * 1024  # bytes counted per connection
ASKS_WITHIN: Final = 10.0  # seconds for a TLS handshake, and for a new connection's first request
ASKS_AGAIN_WITHIN: Final = 75.0  # seconds from an answer to the next request
WRONG_GUESS_COSTS: Final = 0.5  # seconds before the answer to a wrong or missing token
BODY_BYTES_MOST: Final = 1024  # limit of a request's body, as no request needs one
VISITORS_MOST: Final = 256  # HTTP connections to a process that serves no store


def make_connection_table() -> ConnectionTable:
    """Return a connection table for a process that serves no store; call this in the loop that listens."""
    most = 2 * BESIDE_SHARE * VISITORS_MOST  # half is for unauthenticated ones, 1 / BESIDE_SHARE of that half for HTTP
    limits = Limits(connections_max=most, address_connections_max=VISITORS_MOST, handshake_timeout=ASKS_WITHIN)
    table = ConnectionTable(limits, asyncio.get_running_loop().time)
    table.connections_max = VISITORS_MOST
    return table


async def health(_: web.Request) -> web.Response:
    """Answer that the process is alive."""
    return web.Response(text="ok\n")


@dataclass
class _HttpConnections:
    _table: ConnectionTable
    _by_handler: dict[asyncio.BaseProtocol, _HttpConnection] = field(default_factory=dict)

    @web.middleware
    async def serve_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request; the request's connection counts as authenticated until the answer is sent."""
        visitor = self._by_handler.get(request.protocol)
        if visitor is None:  # the connection has closed
            return await handler(request)
        self._table.begin_request(visitor)
        try:
            return await handler(request)
        finally:
            self._table.mark_unauthenticated(visitor)
            self._table.limit_handshake(visitor, ASKS_AGAIN_WITHIN, visitor.abort)

    def protocol(self, handler: asyncio.Protocol, tls: ssl.SSLContext | None) -> asyncio.BaseProtocol:
        """Return a new connection's protocol: aiohttp's `handler`, registered in the table, under TLS if given."""
        cost = VISITOR_BYTES + (TLS_BYTES if tls is not None else 0)
        visitor = _HttpConnection(self._table, handler, self._by_handler, cost)
        if tls is None:
            return visitor
        farewell = b"HTTP/1.1 400 this is HTTPS\r\n\r\n"
        return TlsLayer(visitor, tls, self._table, farewell=farewell, beside=True)


@dataclass(eq=False)
class _HttpConnection(asyncio.Protocol):
    _table: ConnectionTable
    _inner: asyncio.Protocol
    _by_handler: dict[asyncio.BaseProtocol, _HttpConnection]
    _cost: int  # the connection's memory, in bytes
    _transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: Any) -> None:
        peername = transport.get_extra_info("peername")
        address = str(peername[0]) if peername else ""
        self._transport = transport
        self._by_handler[self._inner] = self
        self._inner.connection_made(transport)
        if self._table.refusal_reason(address) is not None:
            self._table.refused += 1
            self.abort()
            return
        self._table.register(self, address, cost=self._cost, beside=True)
        self._table.limit_handshake(self, ASKS_WITHIN, self.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._table.unregister(self)
        self._by_handler.pop(self._inner, None)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def abort(self) -> None:
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()


@contextlib.asynccontextmanager
async def serve_routes(
    routes: Iterable[web.RouteDef],
    door: AccessRules,
    table: ConnectionTable,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
) -> AsyncIterator[int]:
    """Serve routes on `host` ("" is every address), and yield the port; raise OSError if `port` cannot be bound."""
    visitors = _HttpConnections(table)
    # The access rules run first: a client with a wrong token does not count as authenticated.
    application = web.Application(
        middlewares=[_access_middleware(door), visitors.serve_request], client_max_size=BODY_BYTES_MOST
    )
    application.add_routes(routes)
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        server = runner.server
        assert server is not None, "it is set up"
        listener = TcpListener(
            table,
            await anyio.to_thread.run_sync(listen_on, host, port),
            lambda: visitors.protocol(server(), tls),
            beside=True,
        )
        bound = listener.socks[0].getsockname()[1]
        listener.open()
        try:
            yield bound
        finally:
            listener.close()
            await listener.wait_closed()
    finally:
        await runner.cleanup()


def _access_middleware(door: AccessRules) -> Any:

    @web.middleware
    async def guard_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = door.find_refusal(request.method, request.path, request.headers)
        response: web.StreamResponse
        if refusal is None:
            try:
                response = await handler(request)
            except NoSuchRun as error:
                response = web.Response(status=404, text=f"the store has no run {str(error)!r:.200}\n")
            except ValueError as error:
                response = web.Response(status=400, text=f"{error}\n")
            except StoreError as error:
                response = web.Response(status=503, text=f"the store does not answer: {error}\n")
        else:
            response = web.Response(status=refusal.status, text=refusal.reason + "\n")
            if refusal.status == 401:
                await anyio.sleep(WRONG_GUESS_COSTS)
                response.headers["WWW-Authenticate"] = 'Basic realm="rdzv: any name, and the token", charset="UTF-8"'
        if not response.prepared:
            response.headers["X-Content-Type-Options"] = "nosniff"
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    return guard_request
