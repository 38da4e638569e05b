"""Make every picture of docs/pictures, each with the digest of the files that it shows.

    python -m tools.pictures                 all of them
    python -m tools.pictures page demo       those of some subjects only

`demo.cast` is the demo as asciinema plays it, `demo.svg` the same as a picture. `page-4.png` is the page of a store
after one of four nodes was killed. `page-300.png` and `page-10000.png` are of played runs. Each of them has a dark one
beside it. `timeline.png` is the timeline of a longer run. `bench-*.svg`
are drawn from docs/benchmarks.json. `SUBJECTS` names the files that each of them shows. A test compares the digests:
after a change of one of these files, run this again. It needs Chromium, and the extras `http` and `live`.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

import rdzv
import store
from rdzv.core.history import Chapter, History, Incident
from rdzv.core.report import run_cost
from rdzv.display.history import timeline
from rdzv.display.pages import timeline_page
from tools import stamps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp import ClientWebSocketResponse

FOLDER: Final = stamps.ROOT / "docs" / "pictures"
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
    path.write_text(timeline_page(timeline("job-7", history), run_cost("job-7", history)), encoding="utf-8")


DRAWN = """new Promise((done) => {
    const look = () => document.querySelector("#timeline canvas") ? done() : setTimeout(look, 50);
    look();
})"""
NAMED = """new Promise((done) => {
    const look = () => at("trouble").innerText.match(/LOST/) && drawn.timeline ? done() : setTimeout(look, 50);
    look();
})"""
SETTLED = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 1500)))"


class Page:
    """A page in a browser, over its debugging protocol.

    Attributes:
        problems: Errors that the page reported during a call.
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
    # It asks no other host for anything.
    switches += ["--disable-quic", "--no-first-run", "--disable-background-networking"]
    switches += ["--disable-component-update", "--disable-sync"]
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
            rest = asyncio.create_task(process.stderr.read())  # a full pipe would block the browser
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{listens[1].decode()}/json/list") as answer:
                    (target,) = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            process.kill()
            await process.wait()
        await rest


async def shoot(url: str, path: Path, *, height: int, ready: str, width: int = 1100, dark: bool = False) -> None:
    """Take a picture of a page once it is ready.

    A page that listens for events is never done loading, so that `chromium --screenshot` takes it too early, or late.

    Args:
        url: Of the page.
        path: Of the picture.
        height: Of the window, in pixels.
        width: The same.
        ready: An expression whose promise resolves when the page shows everything.
        dark: Whether the viewer prefers dark pages.
    """
    async with browser() as page:
        await page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.call("Emulation.setEmulatedMedia", features=[scheme])
        await page.call("Page.navigate", url=url)
        for expression in (ready, SETTLED):
            await page.evaluate(expression)
        picture = base64.b64decode((await page.call("Page.captureScreenshot", format="png"))["data"])
    await anyio.Path(path).write_bytes(picture)


NODE = """
import asyncio, itertools, sys
import rdzv

async def main():
    async for round in rdzv.rounds(sys.argv[1], node_id=sys.argv[2], is_host=False):
        async with round:
            for step in itertools.count(0 if round.newest is None else round.newest[1] + 1):
                await round.check(step)
                await asyncio.sleep(0.05)

asyncio.run(main())
"""
TRAINS: Final = 12.0  # seconds of steps before a node is killed
GOES_ON: Final = 4.0  # seconds of steps after that


async def shoot_page(folder: Path) -> None:
    """Take pictures of a store's page: four nodes have trained, one was killed, and three go on; and of played runs."""
    from rdzv.http import app
    from tools.page_states import play

    names = [f"gpu-{number:03}" for number in range(4)]
    lost = names[2]
    async with (
        store.serve() as server,
        app.serve(server, "127.0.0.1", 0, token=None, tls=None, prefix="/rdzv") as page,
        contextlib.AsyncExitStack() as started,
    ):
        url = f"{server.url}/job-7?min_nodes=3&max_nodes=4&last_call_timeout=60"
        nodes = {}
        for name in names:
            nodes[name] = await asyncio.create_subprocess_exec(sys.executable, "-c", NODE, url, name)
            started.push_async_callback(nodes[name].wait)
            started.callback(_kill, nodes[name])
        async with rdzv.connect(url, is_host=False) as onlooker:
            with anyio.fail_after(60):
                while (await onlooker.status()).world_size != len(names):  # noqa: ASYNC110  an observer gets no events
                    await anyio.sleep(0.1)
        await anyio.sleep(TRAINS)
        nodes[lost].kill()
        await anyio.sleep(GOES_ON)
        await shoot_both(f"{page}/#job-7", folder / "page-4", height=760, ready=NAMED.replace("LOST", lost))
    for run_id, width, height in (("stuck-300", 1600, 1000), ("loss-10000", 1920, 1080)):
        async with play((run_id, "train-4")) as played:
            size = run_id.rpartition("-")[2]
            ready = NAMED.replace("LOST", "gpu-")
            await shoot_both(
                f"{played.url}/#{run_id}", folder / f"page-{size}", height=height, ready=ready, width=width
            )


async def shoot_both(url: str, path: Path, *, height: int, ready: str, width: int = 1600) -> None:
    """Take a light and a dark picture of a page."""
    for ending, dark in ((".png", False), ("-dark.png", True)):
        await shoot(url, path.with_name(path.name + ending), width=width, height=height, ready=ready, dark=dark)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def record(folder: Path) -> None:
    """Record the demo on a terminal of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(LINES))
        os.execv(sys.executable, [sys.executable, "-m", "rdzv", "demo"])  # noqa: S606  the demo is recorded
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
    # Without the fonts that Rich makes a browser load from another host: a view of the picture causes no request.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="rdzv demo"), flags=re.DOTALL)
    (folder / "demo.svg").write_text(picture, encoding="utf-8")


def make_page(folder: Path) -> None:
    """Make the pictures of a store's page."""
    asyncio.run(shoot_page(folder))


def make_timeline(folder: Path) -> None:
    """Make the picture of a timeline."""
    with tempfile.TemporaryDirectory() as pages:
        page = Path(pages) / "timeline.html"
        write_timeline(page, 16, 24)
        asyncio.run(shoot(page.as_uri(), folder / "timeline.png", height=500, ready=DRAWN))


def draw_results(folder: Path) -> None:
    """Draw the figures of the benchmarks."""
    from benchmarks.whole import pictures
    from benchmarks.whole.results import Results

    for name, text in pictures.svgs(Results.load(stamps.ROOT / RESULTS)).items():
        (folder / name).write_text(text, encoding="utf-8")


RESULTS: Final = "docs/benchmarks.json"
PAGE_NAMES: Final = ("page.html", "page.css", "text.js", "states.js", "data.js", "map.js", "rounds.js", "page.js")
PAGE: Final = (*(f"rdzv/display/page/{name}" for name in PAGE_NAMES), "rdzv/display/pages.py")


@dataclass(frozen=True)
class Subject:
    """Pictures that are made together.

    Attributes:
        pattern: Of the names of their files.
        shows: The files whose change makes them out of date.
        make: Makes them in a folder.
    """

    pattern: str
    shows: tuple[str, ...]
    make: Callable[[Path], None]


SUBJECTS: Final = {
    "demo": Subject("demo.*", ("rdzv/cli/demo.py",), record),
    "page": Subject("page*.png", PAGE, make_page),
    "timeline": Subject("timeline*.png", ("rdzv/display/timeline.html", "rdzv/display/timeline.js"), make_timeline),
    "bench": Subject("bench-*.svg", (RESULTS,), draw_results),
}


def main() -> None:
    """Make the pictures of all subjects, or of those that are named."""
    parser = argparse.ArgumentParser(description="Make the pictures and the recording for the documentation.")
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; all if none is named"
    )
    names = parser.parse_args().subjects or list(SUBJECTS)
    if unknown := set(names) - set(SUBJECTS):
        parser.error(f"no subject is called {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    for name in names:
        subject = SUBJECTS[name]
        mark = stamps.digest(subject.shows)
        with tempfile.TemporaryDirectory() as new:
            subject.make(Path(new))
            for old in FOLDER.glob(subject.pattern):
                old.unlink()
            for made in sorted(Path(new).iterdir()):
                (FOLDER / made.name).write_bytes(stamps.stamped(made.suffix, made.read_bytes(), mark))
                print(FOLDER / made.name)


if __name__ == "__main__":
    main()
