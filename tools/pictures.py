"""Make the recording of the demo and the pictures in docs/pictures: needs Chromium, and the extras `http` and `live`.

    python -m tools.pictures docs/pictures

`demo.cast` is the demo as asciinema plays it, `demo.svg` what it wrote; `page.png` is the page of a store after one of
four nodes was killed, `timeline.png` the timeline of a longer run.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import pty
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import rdzv
import store
from rdzv.core.history import Chapter, History, Incident
from rdzv.display.history import account, timeline
from rdzv.display.pages import timeline_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import ClientWebSocketResponse

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
COLUMNS, LINES = 120, 40
NOON = 1_800_000_000.0


def story(nodes: int, rounds: int) -> History:
    """Return a run in which a node is lost in each round, and comes back in the next but one."""
    names = [f"gpu-{number:03}" for number in range(nodes)]
    chapters: list[Chapter] = []
    at = NOON
    for number in range(rounds):
        lost, before = names[(7 * number + 3) % nodes], names[(7 * number - 4) % nodes]
        members = tuple(name for name in names if number == 0 or name != before)
        trained, away = 3000.0 + 400 * (number % 5), 20.0 + 90 * (number % 3)
        why = ("its process ended", "nothing was heard of it for its ttl")[number % 2]
        gone = Incident(kind="lost", after=trained, count=1, node_ids=(lost,), reason=why, at=at + trained)
        chapters.append(
            Chapter(
                number=number,
                size=len(members),
                node_ids=members,
                joined=nodes if number == 0 else 1,
                joined_ids=(),
                after=None if number == 0 else at - chapters[-1].at,  # type: ignore[operator]
                incidents=(gone,),
                at=at,
                stopped=trained,
                short=max(away - 30, 0.0),
            )
        )
        at += trained + away
    return History(chapters=tuple(chapters))


def write_timeline(path: Path, nodes: int, rounds: int) -> None:
    """Write the page of a timeline."""
    history = story(nodes, rounds)
    path.write_text(timeline_page(timeline("job-7", history), account("job-7", history)), encoding="utf-8")


DRAWN = """new Promise((done) => {
    const look = () => document.querySelector("#timeline canvas") ? done() : setTimeout(look, 50);
    look();
})"""
SETTLED = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 300)))"


class Page:
    """A page in a browser, over its debugging protocol.

    Attributes:
        problems: What it has complained of, while it was asked something.
    """

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._asked = 0
        self.problems: list[Any] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method."""
        self._asked += 1
        await self._socket.send_json({"id": self._asked, "method": method, "params": params})
        while (told := await self._socket.receive_json()).get("id") != self._asked:
            if told.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.problems.append(told["params"])
        result: dict[str, Any] = told["result"]
        return result

    async def resize(self, width: int, height: int = 800) -> None:
        """Have a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def evaluate(self, expression: str) -> Any:
        """Evaluate an expression there, and await it."""
        told = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        return told["result"].get("value")


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """Run a browser without a window; gives its page."""
    import aiohttp

    if CHROMIUM is None:
        sys.exit("Chromium is not installed")
    switches = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(CHROMIUM, *switches, f"--user-data-dir={folder}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            with anyio.fail_after(60):
                while not (listens := re.search(rb"listening on ws://([^/]+)/", await process.stderr.readline())):
                    if process.stderr.at_eof():
                        sys.exit("Chromium has ended")
            rest = asyncio.create_task(process.stderr.read())  # or it would stand still once nobody has read for long
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{listens[1].decode()}/json/list") as answer:
                    (target,) = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            process.kill()
            await process.wait()
        await rest


async def shoot(url: str, path: Path, *, height: int) -> None:
    """Take a picture of a page once its timeline is drawn.

    A page that listens for events is never done loading, so that `chromium --screenshot` takes it too early, or late.
    """
    async with browser() as page:
        await page.resize(1100, height)
        await page.call("Page.navigate", url=url)
        for expression in (DRAWN, SETTLED):
            await page.evaluate(expression)
        picture = base64.b64decode((await page.call("Page.captureScreenshot", format="png"))["data"])
    await anyio.Path(path).write_bytes(picture)


async def shoot_page(path: Path) -> None:
    """Take a picture of a store's page on which a node is missing."""
    from rdzv.http import app

    async with (
        store.serve() as server,
        app.serve(server, "127.0.0.1", 0, token=None, tls=None, prefix="/rdzv") as page,
    ):
        url = f"{server.url}/job-7?min_nodes=4"
        handlers = [await rdzv.connect(url, node_id=f"gpu-{number:03}", is_host=False) for number in range(4)]
        try:
            await asyncio.gather(*(handler.next_rendezvous() for handler in handlers))
            await handlers.pop(2).aclose()
            await anyio.sleep(2)
            await shoot(f"{page}/", path, height=1000)
        finally:
            for handler in handlers:
                await handler.aclose()


def record(folder: Path) -> None:
    """Record the demo on a terminal of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(LINES))
        os.execv(sys.executable, [sys.executable, "-m", "rdzv", "demo"])  # noqa: S606  that is what is recorded
    began, events, written = time.monotonic(), [], b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        written += data
        events.append([round(time.monotonic() - began, 3), "o", data.decode(errors="replace")])
    os.waitpid(pid, 0)
    header = {"version": 2, "width": COLUMNS, "height": LINES, "title": "rdzv demo"}
    lines = [json.dumps(header), *map(json.dumps, events)]
    (folder / "demo.cast").write_text("\n".join(lines) + "\n", encoding="utf-8")

    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115  for as long as this runs
    console.print(Text.from_ansi(written.decode(errors="replace").replace("\r\n", "\n")))
    # Without the fonts that Rich has a browser load from elsewhere: whoever looks at the picture tells nobody.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="rdzv demo"), flags=re.DOTALL)
    (folder / "demo.svg").write_text(picture, encoding="utf-8")


def main() -> None:
    """Make all of them."""
    parser = argparse.ArgumentParser(description="Make the recording and the pictures for the documentation.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    record(folder)
    with tempfile.TemporaryDirectory() as pages:
        page = Path(pages) / "timeline.html"
        write_timeline(page, 16, 24)
        asyncio.run(shoot(page.as_uri(), folder / "timeline.png", height=500))
    asyncio.run(shoot_page(folder / "page.png"))


if __name__ == "__main__":
    main()
