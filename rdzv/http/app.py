"""Shell: the HTTP server beside a store. Needs the extra `http`.

    /healthz            the process is there
    /readyz             the store answers
    /metrics            for Prometheus
    /api/runs           all runs, in numbers
    /api/runs/RUN       one run, as rdzv status --json says it, and its last history
    /api/runs/RUN/timeline   its rounds and nodes as rows of a timeline
    /api/events?run=RUN both, again at each change, as server-sent events
    /                   a page that shows them
    POST /api/runs/RUN/close {"reason"}   and   /api/runs/RUN/ban {"node_id" or "where", "reason", "for", "now"}

Who may ask what is decided in `door`. The page is one file, and its security policy lets it load nothing else.
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

from rdzv.config.config_errors import shown
from rdzv.config.value_types import duration
from rdzv.core.state import Ban
from rdzv.display.pages import timeline_script
from rdzv.http.door import Door
from rdzv.http.looking import BY, NoSuchRun, Runs, client_of
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
BODY_BYTES_MOST = 64 * 1024


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
    closed_ttl: float,
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
        closed_ttl: Seconds for which a closing outlives the run's last node.
    """
    async with client_of(server, token=token) as client:
        site = _Site(server, Runs(client, prefix=prefix, closed_ttl=closed_ttl))
        door = Door(token=token, loopback=loopback, secure=tls is not None)
        runner = web.AppRunner(site.application(door), access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        measuring = asyncio.create_task(site.measure_lag(), name="measure the loop's lag")
        try:
            listening = web.TCPSite(runner, host or None, port, ssl_context=tls)
            await listening.start()
            yield runner.addresses[0][1]
        finally:
            site.leave()
            await cancel_and_wait(measuring)
            await runner.cleanup()


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

    def application(self, door: Door) -> web.Application:
        application = web.Application(middlewares=[guarded(door)], client_max_size=BODY_BYTES_MOST)
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
                web.post("/api/runs/{run_id}/close", self.close_run),
                web.post("/api/runs/{run_id}/ban", self.ban_node),
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
        text = self._metrics.text(self._server.figures(), await self._runs.summaries())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

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

    async def close_run(self, request: web.Request) -> web.Response:
        body = await _object_in(request)
        await self._runs.close(request.match_info["run_id"], _text_in(body, "reason", ""))
        return web.json_response({"closed": True})

    async def ban_node(self, request: web.Request) -> web.Response:
        body = await _object_in(request)
        node_id, where, reason = (_text_in(body, name, "") for name in ("node_id", "where", "reason"))
        if bool(node_id) == bool(where):
            raise web.HTTPBadRequest(text="either node_id is to be there, or where: attribute=value")
        ban = Ban(reason=reason, by=BY, now=_flag_in(body, "now"), lasts=_seconds_in(body, "for"))
        if where:
            here = await self._runs.ban_where(request.match_info["run_id"], where, ban)
            return web.json_response({"banned_where": where, "here": here, "for": ban.lasts})
        await self._runs.ban(request.match_info["run_id"], node_id, ban)
        return web.json_response({"banned": node_id, "for": ban.lasts})


async def _object_in(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body is no JSON object")
    return body


def _text_in(body: dict[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise web.HTTPBadRequest(text=f"{name} is missing, or no string")
    return value


def _flag_in(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise web.HTTPBadRequest(text=f"{name} must be true or false, and is neither")
    return value


def _seconds_in(body: dict[str, Any], name: str) -> float | None:
    """A duration, in seconds or as the command takes it; None if there is none."""
    value, kind = body.get(name), duration()
    if value is None:
        return None
    try:
        return float(kind.convert(value))
    except (TypeError, ValueError):
        raise web.HTTPBadRequest(text=f"{name}={shown(value)} must be {kind.limit}") from None


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
