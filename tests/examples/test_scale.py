"""`examples/kubernetes/scale.py` against a server that answers as Kubernetes does, and a real run."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trustme
from aiohttp import web

import rdzv
import store
from tests.support.processes import ROOT, start_python

SCRIPT = ROOT / "examples" / "kubernetes" / "scale.py"
TOKEN = "of the service account"


class Kubernetes:
    """Serves one Job and its changes. Each watch ends after the first change, as real watches end at some time."""

    def __init__(self) -> None:
        self.parallelism = 3
        self.asked: list[tuple[str, dict[str, str]]] = []
        self._changed = asyncio.Condition()

    async def scale(self, parallelism: int) -> None:
        async with self._changed:
            self.parallelism = parallelism
            self._changed.notify_all()

    async def watch(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized
        self.asked.append((request.path, dict(request.query)))
        response = web.StreamResponse()
        await response.prepare(request)
        for kind in ("ADDED", "MODIFIED"):
            event = {"type": kind, "object": {"spec": {"parallelism": self.parallelism}}}
            await response.write(json.dumps(event).encode() + b"\n")
            async with self._changed:
                await self._changed.wait()
        return response


@asynccontextmanager
async def served(kubernetes: Kubernetes, account: Path) -> AsyncIterator[dict[str, str]]:
    """Return the environment of a pod with a mounted service account."""
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(account / "ca.crt")
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text("jobs-of-ours")
    application = web.Application()
    application.router.add_get("/{path:.*}", kubernetes.watch)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        port = str(runner.addresses[0][1])
        yield {"SERVICE_ACCOUNT": str(account), "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    finally:
        await runner.cleanup()


async def test_a_run_is_resized_when_its_job_is_scaled(tmp_path: Path) -> None:
    kubernetes = Kubernetes()
    async with (
        asyncio.timeout(60),
        store.serve() as server,
        served(kubernetes, tmp_path) as environment,
        rdzv.connect(f"{server.url}/train?min_nodes=1&max_nodes=2&last_call_timeout=0.1", is_host=False) as handler,
    ):
        await handler.next_rendezvous()
        async with start_python(str(SCRIPT), f"{server.url}/train", "train", env=environment) as script:
            for parallelism in (3, 6, 5):
                await kubernetes.scale(parallelism)
                await script.says(f"resized to at most {parallelism} nodes", timeout=30)
                async with handler.changes() as changes:
                    async for change in changes:
                        if isinstance(change, rdzv.Resized) and change.max_nodes == parallelism:
                            assert change.min_nodes == 1
                            break
            script.kill()
    path, query = kubernetes.asked[0]
    assert path == "/apis/batch/v1/namespaces/jobs-of-ours/jobs"
    assert query == {"watch": "1", "fieldSelector": "metadata.name=train"}
    assert len(kubernetes.asked) > 1, "a watch that has ended is begun again"
