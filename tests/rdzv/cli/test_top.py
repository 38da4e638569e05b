"""`rdzv top`: a real one, on a pseudo-terminal and in a pipe, while a node and then the store are killed."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import pty
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

import rdzv
import store
from rdzv.cli import main as command
from rdzv.cli import top
from rdzv.node import status
from rdzv.node.front.queries import WakeupHere
from rdzv.node.handler import Handler
from tests.support.processes import start_python
from tests.support.runs import VirtualRun

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rdzv.core.history import History
    from rdzv.core.keys import Keys
    from rdzv.core.report import RunStatus
    from rdzv.display.live import Frame

LIMIT = 60.0
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A command on a terminal of its own, and what it has written there."""

    def __init__(self, process: asyncio.subprocess.Process, file: int) -> None:
        self.process = process
        self.file = file
        self.text = ""
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(file, self._read)

    def _read(self) -> None:
        try:
            self.text += os.read(self.file, 65536).decode(errors="replace")
        except OSError:  # its other end is closed
            asyncio.get_running_loop().remove_reader(self.file)
        self._changed.set()

    async def shows(self, text: str) -> None:
        """Wait until this has been shown."""
        async with asyncio.timeout(LIMIT):
            while text not in COLOURS.sub("", self.text):
                self._changed.clear()
                await self._changed.wait()

    def press(self, key: str) -> None:
        os.write(self.file, key.encode())


@contextlib.asynccontextmanager
async def on_terminal(*arguments: str, **environment: str) -> AsyncIterator[Terminal]:
    ours, theirs = pty.openpty()
    told = {"TERM": "xterm", "COLUMNS": "100", "LINES": "30", **environment}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rdzv", *arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**{name: value for name, value in os.environ.items() if name != "NO_COLOR"}, **told},
    )
    os.close(theirs)
    terminal = Terminal(process, ours)
    try:
        yield terminal
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        os.close(ours)


@contextlib.asynccontextmanager
async def two_nodes(url: str) -> AsyncIterator[tuple[Any, Any]]:
    async with (
        rdzv.connect(f"{url}?min_nodes=2", node_id="stays", is_host=False) as stays,
        rdzv.connect(f"{url}?min_nodes=2", node_id="goes", is_host=False) as goes,
    ):
        await asyncio.gather(stays.next_rendezvous(), goes.next_rendezvous())
        yield stays, goes


async def test_a_terminal_is_redrawn_in_place_and_names_who_is_missing_and_a_store_that_has_gone() -> None:
    pytest.importorskip("rich")
    async with contextlib.AsyncExitStack() as serving, contextlib.AsyncExitStack() as nodes:
        server = await serving.enter_async_context(store.serve())
        _, goes = await nodes.enter_async_context(two_nodes(f"{server.url}/job"))
        async with on_terminal("status", "--watch", f"{server.url}/job") as terminal:
            await terminal.shows("2 members")
            await goes.aclose()
            await terminal.shows("missing  goes")
            assert "\x1b[?1049h" in terminal.text, "the alternate screen"
            assert re.search(r"\x1b\[[0-9;]*31m", terminal.text), "who is missing is red"
            await nodes.aclose()
            await serving.aclose()
            await terminal.shows("the store has not answered for")
            terminal.press("q")
            assert await terminal.process.wait() == 0
            assert "\x1b[?1049l" in terminal.text, "the terminal is as it was"


async def test_in_a_pipe_it_writes_a_block_per_change_and_ends_with_what_the_run_has_cost() -> None:
    async with store.serve() as server, two_nodes(f"{server.url}/job") as (stays, _):
        async with start_python("-m", "rdzv", "top", f"{server.url}/job") as child:
            await child.says("2 members", timeout=LIMIT)
            await stays.set_closed("enough")
            assert await child.wait(timeout=LIMIT) == 0
        assert "\x1b" not in "".join(child.output)
        assert re.fullmatch(r"job: \d+ s; training .*; no losses", child.output[-1])


async def test_without_rich_a_terminal_is_told_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return imports(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    async with store.serve() as server, two_nodes(f"{server.url}/job"):
        options = command._parse(["top", f"{server.url}/job"])
        assert options is not None
        with pytest.raises(ImportError, match=r"a live screen needs rich: pip install 'rdzv\[live\]'"):
            await command.command_named("top").run(options)


@pytest.mark.parametrize("words", [["top"], ["status", "--watch"]], ids=["top", "watch"])
async def test_what_is_never_answered_ends_with_the_timeout_and_is_not_waited_for_again(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(_: Handler) -> RunStatus:
        """As on the way back through a network that drops large packets."""
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(Handler, "status", lost)
    monkeypatch.setattr(Handler, "status_and_history", lost)
    async with store.serve() as server, two_nodes(f"{server.url}/job"):
        options = command._parse([*words, f"{server.url}/job", "--timeout", "0.3"])
        assert options is not None
        with pytest.raises(store.StoreTimeoutError, match=r"not done within 0\.3 s"):
            await command.command_named(words[0]).run(options)


async def test_a_reading_that_is_lost_later_leaves_on_the_screen_what_was_read_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stood still for as long as a request may take."""
    monkeypatch.setattr(top, "READ_WITHIN", 0.1)
    tell, readings = Handler.status_and_history, 0

    async def lost_in_between(handler: Handler) -> tuple[RunStatus, History]:
        nonlocal readings
        readings += 1
        if 1 < readings < 4:
            await asyncio.sleep(3600)
        if readings == 4:
            await handler.set_closed("seen enough")
        return await tell(handler)

    async with store.serve() as server, two_nodes(f"{server.url}/job"):
        monkeypatch.setattr(Handler, "status_and_history", lost_in_between)
        options = command._parse(["top", f"{server.url}/job"])
        assert options is not None
        async with asyncio.timeout(LIMIT):
            assert await command.command_named("top").run(options) == 0
    assert "seen enough" in capsys.readouterr().out


async def test_a_closed_run_is_opened_again_and_one_that_is_open_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    async def reopen(url: str) -> int:
        options = command._parse(["reopen", url])
        assert options is not None
        return await command.command_named("reopen").run(options)

    async with store.serve() as server:
        url = f"{server.url}/job"
        async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False) as handler:
            await handler.next_rendezvous()
            await handler.set_closed("by mistake")
        assert await reopen(url) == 0
        assert capsys.readouterr().out == "run job is open again; it was closed by a: by mistake\n"
        async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False) as handler:
            assert (await handler.next_rendezvous()).round == 1
        with pytest.raises(rdzv.RendezvousStateError, match="run job is not closed"):
            await reopen(url)


async def test_no_color_is_obeyed() -> None:
    pytest.importorskip("rich")
    async with (
        store.serve() as server,
        two_nodes(f"{server.url}/job") as (_, goes),
        on_terminal("top", f"{server.url}/job", NO_COLOR="1") as terminal,
    ):
        await terminal.shows("2 members")
        await goes.aclose()
        await terminal.shows("missing  goes")
        terminal.press("q")
        assert await terminal.process.wait() == 0
        assert re.findall(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])m", terminal.text) == [], "bold may stay, colours may not"


class Seen:
    """A screen that waits for the word that the store does not answer."""

    def __init__(self) -> None:
        self.silent_at: float | None = None
        self.silent = asyncio.Event()

    def show(self, frame: Frame) -> None:
        if frame.silent_for is not None and self.silent_at is None:
            self.silent_at = asyncio.get_running_loop().time()
            self.silent.set()


@pytest.mark.virtual_time
@pytest.mark.parametrize("moment", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("how", ["died", "is silent"])
async def test_that_the_store_has_gone_is_said_within_two_seconds(how: str, moment: float) -> None:
    """Wherever in its turn of pings and readings the screen is."""
    async with VirtualRun(min_nodes=1) as run:
        await run.handler("a").next_rendezvous()
        observer, screen = run.handler("o"), Seen()
        following = top._follow(observer, WakeupHere(), await top._read(observer), screen, screen.silent.is_set)
        task = run.start(following, "follow")
        await asyncio.sleep(3 + moment)
        gone_at = asyncio.get_running_loop().time()
        if how == "died":
            await run.end_store()
        else:
            run.network.partition()
        await screen.silent.wait()
        assert screen.silent_at is not None
        assert screen.silent_at - gone_at <= 2.0
        task.cancel()
        run.network.heal()
        if how == "died":
            run.found_store()


async def test_a_run_is_read_once_for_its_status_and_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history was read twice each time: once for who is missing, and once for the cost."""
    read: list[str] = []
    tell = status.read_history

    async def counted(at: store.Store, keys: Keys) -> History:
        read.append(keys.run_id)
        return await tell(at, keys)

    monkeypatch.setattr(status, "read_history", counted)
    async with store.serve() as server, two_nodes(f"{server.url}/job") as (stays, _):
        told, history, cost = await top.read(stays)
        assert (told.world_size, len(history.chapters), cost.losses) == (2, 1, 0)
    assert read == ["job"]
