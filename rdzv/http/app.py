"""Shell: the HTTP server beside a store. Needs the extra `http`.

    /healthz            the process is there
    /readyz             the store answers
    /metrics            for Prometheus
    /api/runs           all runs, in numbers
    /api/runs/RUN       one run, as rdzv status --json says it, and its last history
    /api/runs/RUN/timeline   its rounds and nodes as rows of a timeline
    /api/events?run=RUN both, again at each change, as server-sent events
    /                   a page that shows them

Nothing is changed over HTTP: that is the command's. Who may ask what is decided in `door`. The page is one file, and
its security policy lets it load nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import anyio
from aiohttp import web

from rdzv.display.pages import timeline_script
from rdzv.http.door import Door
from rdzv.http.listening import Visitors, listening
from rdzv.http.looking import NoSuchRun, Runs, client_of
from rdzv.http.metrics import Metrics
from store import StoreError
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

    from store.server.server import Server

__all__ = ["LAG_EVERY", "guarded", "serve"]

LOOK_EVERY = 1.0  # seconds between two looks for a page that is open
BEAT = b"event: beat\ndata: 1\n\n"  # a comment would not be told to the page
LISTENERS_MOST = 64  # pages that are followed at one time
LAG_EVERY = 1.0
WRONG_GUESS_COSTS = 0.5  # seconds
BODY_BYTES_MOST = 1024  # nobody sends any


@contextlib.asynccontextmanager
async def serve(
    server: Server,
    host: str,
    port: int,
    *,
    token: bytes | None,
    tls: ssl.SSLContext | None,
    loopback: bool,
    prefix: str,
) -> AsyncIterator[int]:
    """Serve HTTP about a store for as long as the context lasts; gives the port.

    Args:
        server: The store.
        host: Where to listen; "" is every address.
        port: Where; 0 takes a free one.
        token: The store's secret, if it has one.
        tls: The store's context, if it speaks TLS.
        loopback: Whether only this machine can connect.
        prefix: What the keys of all runs start with.
    """
    visitors = Visitors(server.table)
    async with client_of(server, token=token) as client, Runs(client, prefix=prefix) as runs:
        site = _Site(server, runs)
        application = site.application(Door(token=token, loopback=loopback, secure=tls is not None), visitors)
        measuring = asyncio.create_task(site.measure_lag(), name="measure the loop's lag")
        try:
            async with listening(application, visitors, server.table, host, port, tls) as bound:
                yield bound
                site.leave()
        finally:
            await cancel_and_wait(measuring)


class _Site:
    def __init__(self, server: Server, runs: Runs) -> None:
        self._server = server
        self._runs = runs
        self._metrics = Metrics()
        server.conversations.on_request = self._metrics.request
        self._listeners = 0
        self._leaving = asyncio.Event()
        page = resources.files("rdzv.http").joinpath("page.html").read_text(encoding="utf-8")
        self._page = page.replace("/*TIMELINE*/", timeline_script())
        self._policy = _policy(self._page)

    def application(self, door: Door, visitors: Visitors) -> web.Application:
        application = web.Application(middlewares=[visitors.serve_one, guarded(door)], client_max_size=BODY_BYTES_MOST)
        application.add_routes(
            [
                web.get("/", self.page),
                web.get("/healthz", self.health),
                web.get("/readyz", self.ready),
                web.get("/metrics", self.metrics),
                web.get("/api/runs", self.all_runs),
                web.get("/api/runs/{run_id}", self.one_run),
                web.get("/api/runs/{run_id}/timeline", self.timeline),
                web.get("/api/events", self.events),
            ]
        )
        return application

    def leave(self) -> None:
        """End the pages' streams."""
        self._leaving.set()

    async def measure_lag(self) -> None:
        """Measure how late this loop wakes sleepers, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time() + LAG_EVERY
            await anyio.sleep(LAG_EVERY)
            self._metrics.loop_lag.observe(max(loop.time() - asked, 0.0))

    async def page(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": self._policy}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(self, _: web.Request) -> web.Response:
        try:
            await self._runs.ping()
        except StoreError as error:
            return web.Response(status=503, text=f"the store does not answer: {error}\n")
        return web.Response(text="ok\n")

    async def metrics(self, _: web.Request) -> web.Response:
        runs = await self._runs.live()
        text = await self._metrics.text(self._server.figures(), runs, ended=self._runs.ended)
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=text.encode(), headers=headers)

    async def all_runs(self, _: web.Request) -> web.Response:
        return web.json_response({"version": 1, "runs": await self._runs.summaries()})

    async def one_run(self, request: web.Request) -> web.Response:
        return web.json_response(await self._runs.report(request.match_info["run_id"]))

    async def timeline(self, request: web.Request) -> web.Response:
        return web.json_response(await self._runs.timeline(request.match_info["run_id"]))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send what a page shows, and again whenever it has changed."""
        if self._listeners >= LISTENERS_MOST:
            raise web.HTTPServiceUnavailable(text=f"{LISTENERS_MOST} pages are open already, the most there may be")
        self._listeners += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        try:
            await response.prepare(request)
            sent = ""
            while not self._leaving.is_set():
                text = json.dumps(await self._shown(request.query.get("run", "")))
                # The page takes silence for a store that has gone, and a write finds a page that has.
                await response.write(BEAT if text == sent else f"data: {text}\n\n".encode())
                sent = text
                with anyio.move_on_after(LOOK_EVERY):
                    await self._leaving.wait()
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._listeners -= 1
        return response

    async def _shown(self, run_id: str) -> dict[str, Any]:
        runs = await self._runs.summaries()
        chosen = run_id or (runs[0]["run_id"] if runs else "")
        try:
            run = await self._runs.report(chosen) if chosen else None
        except NoSuchRun:
            run = None
        return {"store": self._server.store_id, "runs": runs, "chosen": chosen, "run": run}


def guarded(door: Door) -> Any:
    """Return a middleware that lets in whom the door does, and says what went wrong."""

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refusal = door.refuse(request.method, request.path, request.headers)
        response: web.StreamResponse
        if refusal is not None:
            if refusal.status == 401:
                await anyio.sleep(WRONG_GUESS_COSTS)
            response = web.Response(status=refusal.status, text=refusal.reason + "\n")
            if refusal.status == 401 and request.method == "GET":
                response.headers["WWW-Authenticate"] = 'Basic realm="rdzv: any name, and the token", charset="UTF-8"'
        else:
            try:
                response = await handler(request)
            except NoSuchRun as error:
                response = web.Response(status=404, text=f"the store has no run {str(error)!r:.200}\n")
            except ValueError as error:
                response = web.Response(status=400, text=f"{error}\n")
            except StoreError as error:
                response = web.Response(status=503, text=f"the store does not answer: {error}\n")
        if not response.prepared:
            response.headers["X-Content-Type-Options"] = "nosniff"
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    return guard


def _policy(page: str) -> str:
    """Let the page run its own script and style, and load or be framed by nothing else."""

    def hashed(tag: str) -> str:
        source = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src data:"
    )
