"""The commands that show a run: its status, on a terminal and in a pipe, as a node and a store are killed; history."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pty
import re
import sys
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import rdzv
import store
from rdzv.cli import look
from rdzv.cli.main import _parse, command_named
from rdzv.cli.reach import open_run
from rdzv.node.link.wakeup import Wakeup
from rdzv.node.run import status as status_room
from rdzv.node.run.run import Run
from tests.rdzv.cli.test_main import run
from tests.rdzv.core.test_report import SCHEMA
from tests.support.processes import start, start_python
from tests.support.runs import VirtualRun

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from rdzv.core.history import History
    from rdzv.core.keys import Keys
    from rdzv.core.report import Account, RunStatus
    from rdzv.display.status import TopData

pytestmark = pytest.mark.some_here(3)

LIMIT = 60.0
COST = r"job: \d+ s; training .* %, regrouping .* %, waiting for nodes .* %; no losses"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A command on a terminal of its own, and its output."""

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
        """Wait until this text has been written."""
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


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colours", "none"])
async def test_a_terminal_is_redrawn_in_place_with_missing_nodes_and_a_lost_store(environment: dict[str, str]) -> None:
    pytest.importorskip("rich")
    async with contextlib.AsyncExitStack() as serving, contextlib.AsyncExitStack() as nodes:
        server = await serving.enter_async_context(store.serve())
        _, goes = await nodes.enter_async_context(two_nodes(f"{server.url}/job"))
        async with on_terminal("status", "--watch", f"{server.url}/job", **environment) as terminal:
            await terminal.shows("2 members")
            await goes.aclose()
            await terminal.shows("missing  goes")
            assert "\x1b[?1049h" in terminal.text, "the alternate screen"
            coloured = re.search(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])m", terminal.text)
            assert (coloured is None) is bool(environment), "bold may stay, colours may not"
            await nodes.aclose()
            await serving.aclose()
            await terminal.shows("the store has not answered for")
            terminal.press("q")
            assert await terminal.process.wait() == 0
            assert "\x1b[?1049l" in terminal.text, "the terminal is as it was"


@pytest.mark.in_ci
async def test_in_a_pipe_each_change_is_written_and_at_the_end_the_cost_of_the_run() -> None:
    async with store.serve() as server:
        url = f"{server.url}/job"
        async with start_python("-m", "rdzv", "status", url, "--watch") as watching:
            await watching.line("no node is here")
            async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False, payload=[1]) as node:
                info = await node.next_rendezvous()
                await watching.line("run job: training: round 0 stands with 1 node")
                _, output = await run("status", url, "--json")
                told = json.loads(output[0])
                jsonschema.validate(told, SCHEMA)
                assert told["cost"].items() >= {"rounds": 1, "losses": 0}.items()
                assert (told["round"], told["phase"], told["coordinator"]) == (0, "training", "a")
                assert tuple(told["bootstrap"].values()) == info.bootstrap_address
                (member,) = told["members"]
                assert member.items() >= {"node_id": "a", "rank": 0, "address": "127.0.0.1", "payload": [1]}.items()
                _, output = await run("status", url)
                assert any(re.fullmatch(COST, line) for line in output)
                status, output = await run("close", url, "--reason", "enough")
                assert (status, output[0]) == (0, "run job is closed")
                assert re.fullmatch(COST, output[1])
                _, output = await run("close", url, "--reason", "more")
                assert output[0] == "run job is closed, and was before: enough"
                await watching.line("run job: closed: the run is closed by")
                assert await watching.wait() == 0
        assert "\x1b" not in "".join(watching.output)
        assert re.fullmatch(COST, watching.output[-1])


async def test_output_whose_reader_ends_early_is_no_error() -> None:
    async with store.serve() as server:
        line = f"'{{}}' -m rdzv status {server.url}/job --watch | head -n 1; echo status ${{{{PIPESTATUS[0]}}}}"
        async with start("bash", "-c", line.format(sys.executable)) as child:
            await child.line("no node is here")
            await child.says("the store has no run job; it has none under /rdzv; waiting for it")
            async with rdzv.connect(f"{server.url}/job?min_nodes=1", is_host=False) as node:
                await node.next_rendezvous()
                await node.set_closed()
                assert await child.line("status") == "status 0"
            assert child.output[-2:] == ["run job: gathering: no node is here", "status 0"]


@pytest.mark.in_ci
async def test_history_and_timeline_show_the_rounds_and_join_no_run(tmp_path: Path) -> None:
    async with store.serve() as server:
        url = f"{server.url}/job"
        for words in (("history",), ("history", "--json"), ("timeline", "-o", "-")):  # a mistyped run id
            status, output = await run(*words, url)
            assert (status, output) == (1, [f"rdzv {words[0]}: the store has no run job; it has none under /rdzv"])
        async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False) as handler:
            await handler.next_rendezvous()
            await handler.next_rendezvous()
        status, output = await run("history", url)
        assert status == 0
        stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"
        assert re.fullmatch(rf"{stamp}  round 0: 1 node: a \(127\.0\.0\.1\)", output[0])
        assert "s meeting again" in output[1]
        assert re.fullmatch(rf"{stamp}  round 1, \d+\.\d s after the one before: 1 node: a \(127\.0\.0\.1\)", output[2])
        assert re.fullmatch(COST, output[-1])
        path = tmp_path / "run.html"
        assert await run("timeline", url, "-o", str(path)) == (0, [])
        status, output = await run("timeline", url, "-o", "-")
        assert output[0] == path.read_text().splitlines()[0] == "<!doctype html>"
        status, output = await run("history", url, "--json")
        assert [each["number"] for each in json.loads(output[0])["rounds"]] == [0, 1]


async def looked(words: list[str]) -> int:
    """Run a subcommand in this process. Errors are raised, not turned into lines."""
    options = _parse(words)
    assert options is not None
    return await command_named(options.command).run(options)


async def test_without_rich_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    async with store.serve() as server, two_nodes(f"{server.url}/job"):
        with pytest.raises(ImportError, match=r"pip install 'rdzv\[live\]'"):
            await looked(["top", f"{server.url}/job"])


async def test_on_a_terminal_that_cannot_be_redrawn_each_change_is_a_line() -> None:
    """Regression: `rdzv top`, an alias of `status --watch`, wrote nothing at all."""
    async with store.serve() as server, two_nodes(f"{server.url}/job") as (stays, _):
        async with on_terminal("top", f"{server.url}/job", TERM="dumb") as terminal:
            await terminal.shows("run job: training: round 0 stands with 2 nodes")
            await stays.set_closed("enough")
            await terminal.shows("job: ")
            assert await terminal.process.wait() == 0
        assert "\x1b" not in terminal.text


@pytest.mark.parametrize("words", [["top"], ["status", "--watch"]], ids=["top", "watch"])
async def test_an_unanswered_first_request_ends_with_the_timeout_and_is_not_repeated(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(_: Run) -> RunStatus:
        """Never answer, as if the reply were lost in a network that drops large packets."""
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(Run, "status_and_cost", lost)
    async with store.serve() as server, two_nodes(f"{server.url}/job"):
        with pytest.raises(store.StoreTimeoutError):
            await looked([*words, f"{server.url}/job", "--timeout", "0.3"])


async def test_a_closed_run_is_opened_again_and_one_that_is_open_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    async with store.serve() as server:
        url = f"{server.url}/job"
        async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False) as handler:
            await handler.next_rendezvous()
            await handler.set_closed("by mistake")
        assert [await looked([words, url]) for words in ("status", "history")] == [0, 0]
        with pytest.raises(rdzv.RendezvousClosedError):  # `main` would exit with 3
            await looked(["resize", url, "--max", "3"])
        capsys.readouterr()
        assert await looked(["reopen", url]) == 0
        assert capsys.readouterr().out == "run job is open again; it was closed by a: by mistake\n"
        assert await looked(["status", url]) == 0
        assert capsys.readouterr().out.startswith("run job: gathering: no node is here\nstate: No node is here\n")
        async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False) as handler:
            assert (await handler.next_rendezvous()).round == 1
        with pytest.raises(rdzv.RendezvousStateError):
            await looked(["reopen", url])


async def test_a_closed_run_is_no_error_for_status_and_an_error_for_commands_that_steer() -> None:
    """As docs/command.md says of the exit status 3."""
    async with store.serve() as server:
        url = f"{server.url}/job"
        async with two_nodes(url) as (stays, _):
            await stays.set_closed("enough")
        for words, status in (("status", 0), ("status --json", 0), ("history", 0), ("resize --max 3", 3)):
            command, *rest = words.split()
            assert (await run(command, url, *rest))[0] == status, words


async def test_the_status_says_for_which_key_a_member_waits_and_how_long() -> None:
    async with store.serve() as server, two_nodes(f"{server.url}/job") as (stays, goes), asyncio.timeout(LIMIT):
        infos = await asyncio.gather(stays.next_rendezvous(), goes.next_rendezvous())
        waiting = asyncio.create_task(infos[0].store.get("never"))
        line = ""
        while "round's store" not in line:
            _, output = await run("status", f"{server.url}/job")
            line = next(line for line in output if "  stays  " in line)
        assert re.search(r"waits \d+ s in the round's store, for key 'never'", line)
        _, output = await run("status", f"{server.url}/job", "--json")
        told = {one["node_id"]: one for one in json.loads(output[0])["members"]}
        assert told["stays"]["waits_for"] == "key 'never'"
        assert told["stays"]["waited"] > 1
        assert told["goes"]["waited"] is None
        waiting.cancel()


async def test_a_narrow_window_cuts_off_members_but_not_the_reason_or_missing_nodes() -> None:
    pytest.importorskip("rich")
    async with store.serve() as server, rdzv.connect(f"{server.url}/job?min_nodes=1", node_id="n" * 60) as node:
        await node.next_rendezvous()
        async with on_terminal("top", f"{server.url}/job", COLUMNS="40") as terminal:
            await terminal.shows("…")
            words = " ".join(COLOURS.sub("", terminal.text).split())
            assert "round 0 stands with 1 node" in words


@contextlib.asynccontextmanager
async def looked_at(url: str) -> AsyncIterator[tuple[Run, Wakeup]]:
    wakeup = Wakeup()
    async with open_run(argparse.Namespace(url=url, timeout=LIMIT), follow=wakeup) as run:
        yield run, wakeup


class Seen(look._Terminal):
    """A screen that waits for the notice that the store does not answer."""

    def __init__(self) -> None:
        self.silent_at: float | None = None
        self.silent = asyncio.Event()
        self.frames: list[TopData] = []
        self.over = False

    def show(self, frame: TopData) -> None:
        self.frames.append(frame)
        if frame.silent_for is not None and self.silent_at is None:
            self.silent_at = asyncio.get_running_loop().time()
            self.silent.set()
            self.over = True


async def test_after_a_lost_request_the_screen_keeps_the_last_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the screen stood still for as long as a request may take."""
    monkeypatch.setattr(look, "READ_WITHIN", 0.1)
    tell, readings = Run.status_and_cost, 0

    async def lost_in_between(run: Run) -> tuple[RunStatus, History, Account]:
        nonlocal readings
        readings += 1
        if 1 < readings < 4:
            await asyncio.sleep(3600)
        if readings == 4:
            await run.set_closed("seen enough")
        return await tell(run)

    async with store.serve() as server, two_nodes(f"{server.url}/job"), looked_at(f"{server.url}/job") as (run, wakeup):
        monkeypatch.setattr(Run, "status_and_cost", lost_in_between)
        async with asyncio.timeout(LIMIT):
            last = await look._show_on_screen(run, wakeup, await look._read_top_screen(run), Seen())
    assert last.status.closed == "seen enough"


@pytest.mark.virtual_time
@pytest.mark.parametrize("moment", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("how", ["died", "is silent"])
async def test_a_lost_store_is_shown_within_two_seconds(how: str, moment: float) -> None:
    """At any moment in the screen's cycle of pings and reads."""
    async with VirtualRun(min_nodes=1) as run:
        await run.handler("a").next_rendezvous()
        screen = Seen()
        looking = contextlib.AsyncExitStack()
        observed = await looking.enter_async_context(run.looked_at())
        task = run.start(
            look._show_on_screen(observed, Wakeup(), await look._read_top_screen(observed), screen), "follow"
        )
        await asyncio.sleep(3 + moment)
        gone_at = asyncio.get_running_loop().time()
        if how == "died":
            run.kill_store()
        else:
            run.network.partition()
        await screen.silent.wait()
        assert screen.silent_at is not None
        assert screen.silent_at - gone_at <= 2.0
        task.cancel()
        run.network.heal()
        await looking.aclose()
        if how == "died":
            run.restart_store()


async def test_a_run_is_read_once_for_its_status_and_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the history was read twice each time, once for the missing nodes and once for the cost."""
    read: list[str] = []
    tell = status_room.read_history

    async def counted(at: store.Store, keys: Keys) -> History:
        read.append(keys.run_id)
        return await tell(at, keys)

    monkeypatch.setattr(status_room, "read_history", counted)
    async with store.serve() as server, two_nodes(f"{server.url}/job"), looked_at(f"{server.url}/job") as (run, _):
        told, history, cost = await run.status_and_cost()
        assert (told.world_size, len(history.chapters), cost.loss_count) == (2, 1, 0)
    assert read == ["job"]
