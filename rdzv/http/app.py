"""The read-only HTTP server beside a store; docs/operating.md lists the paths."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import socket
from typing import TYPE_CHECKING, Any

import anyio
from aiohttp import web

from rdzv.core.live.changes import server_sent_event
from rdzv.core.report import run_cost
from rdzv.display.history import history_as_json, timeline
from rdzv.display.pages import live_page
from rdzv.http.access_rules import access_rules_for
from rdzv.http.listening import health, serve_routes
from rdzv.http.metrics import CONTENT_TYPE, StoreMetrics
from rdzv.http.run_reader import SPACED, RunReader, connect_to_own_store
from rdzv.node.link.wakeup import Wakeup
from store.net.address import join_host_port
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from store.protocol.connection import Secret
    from store.server.server import Server

LOOK_EVERY = 1.0  # seconds, at most, between two messages to an open page
LISTENERS_MOST = 64  # pages that may be open at a time


@contextlib.asynccontextmanager
async def serve(
    server: Server,
    host: str,
    port: int,
    *,
    token: Secret,
    tls: ssl.SSLContext | None,
    insecure: bool = False,
    prefix: str,
) -> AsyncIterator[str]:
    """Serve HTTP, with the store's token and TLS, for the runs whose keys begin with `prefix`; yield the URL."""
    host, door = access_rules_for(host, token=token, secure=tls is not None, insecure=insecure)
    async with connect_to_own_store(server, token=token) as client:
        site = _MonitoringPages(server, RunReader(client, prefix=prefix))
        measuring = asyncio.create_task(site.metrics.process.measure_loop_lag(), name="measure the loop's lag")
        try:
            async with serve_routes(site.routes(), door, server.table, host, port, tls) as bound:
                yield f"{'http' if tls is None else 'https'}://{join_host_port(host or socket.gethostname(), bound)}"
                site.leaving = True
                site.runs.followed.listeners.notify()
        finally:
            await cancel_and_wait(measuring)
            await site.runs.followed.drop_unused(unused_for=0.0)


class _MonitoringPages:
    def __init__(self, server: Server, runs: RunReader) -> None:
        self._server = server
        self.runs = runs
        self.metrics = StoreMetrics()
        self.leaving: bool = False  # True: end the streams of events to pages
        server.add_request_callback(self.metrics.observe_request)
        self._listeners = 0
        self._page = live_page()
        self._policy = security_policy_of(self._page)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._show_page),
            web.get("/healthz", health),
            web.get("/readyz", self._answer_ready),
            web.get("/metrics", self._answer_metrics),
            web.get("/api/runs", self._answer_all_runs),
            web.get("/api/runs/{run_id:[^/]+}", self._answer_one_run),
            web.get("/api/runs/{run_id:[^/]+}/{what:timeline|history}", self._answer_history),
            web.get("/api/events", self._stream_events, allow_head=False),
        ]

    async def _show_page(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": self._policy}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _answer_ready(self, request: web.Request) -> web.Response:
        await self.runs.client.ping(timeout=2.0)  # if the ping fails, `listening` answers with 503
        return await health(request)

    async def _answer_metrics(self, _: web.Request) -> web.Response:
        runs = await self.runs.list_live_runs()
        text = await self.metrics.text(self._server.figures(), runs, ended=len(self.runs.over))
        return web.Response(body=text.encode(), headers=CONTENT_TYPE)

    async def _answer_all_runs(self, _: web.Request) -> web.Response:
        return web.json_response({"version": 1, "runs": await self.runs.list_live_and_ended()})

    async def _answer_one_run(self, request: web.Request) -> web.Response:
        return web.json_response(await self.runs.report(request.match_info["run_id"]))

    async def _answer_history(self, request: web.Request) -> web.Response:
        run_id = request.match_info["run_id"]
        history, now = await self.runs.history(run_id)
        if request.path.endswith("/timeline"):
            return web.json_response(timeline(run_id, history, now=now))
        return web.json_response(history_as_json(run_id, history, run_cost(run_id, history, now=now)))

    async def _stream_events(self, request: web.Request) -> web.StreamResponse:
        if self._listeners >= LISTENERS_MOST:
            raise web.HTTPServiceUnavailable(text=f"{LISTENERS_MOST} pages are open already, the most there may be")
        self._listeners += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        try:
            await response.prepare(request)
            before, loop = None, asyncio.get_running_loop()
            with self.runs.followed.listeners.subscribed(wakeup := Wakeup()):
                while not self.leaving:
                    now = await self._current_page_state(request.query.get("run", ""))
                    # Write even without changes: a page takes a silent store for lost; a failed write ends this loop.
                    await response.write(server_sent_event(before, now))
                    before = now
                    pause = min(LOOK_EVERY, max(self.runs.seconds_until_due(now["chosen"]), SPACED))
                    if await wakeup.sleep_until(loop.time() + pause):
                        await anyio.sleep(SPACED)  # collect further changes for the same message
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._listeners -= 1
        return response

    async def _current_page_state(self, run_id: str) -> dict[str, Any]:
        runs = await self.runs.list_live_and_ended()
        going_on = [one for one in runs if one["closed"] is None] or runs
        chosen = run_id or (going_on[0]["run_id"] if runs else "")
        run = await self.runs.web_page_state(chosen) if chosen else None
        now = self.runs.followed.unix_time(chosen)
        return {"now": now, "store": self._server.store_id, "chosen": chosen, "runs": runs, "run": run}


def security_policy_of(page: str) -> str:
    """Return the page's Content-Security-Policy: only the page's own script and style run, and no page may frame it."""

    def csp_hash(tag: str) -> str:
        source = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {csp_hash('script')}; style-src {csp_hash('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src data:"
    )
