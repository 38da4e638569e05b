"""The subcommands that only read a run: status, history, timeline.

`rdzv status --watch` reads the run after each change; on a terminal (extra `live`) also at intervals, and it pings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import anyio

from rdzv.backends.credentials import Credentials
from rdzv.backends.host_queries import ask_hosts_for_answers
from rdzv.cli.command import DONE, JSON, RUN, Argument, command, flag, limited_by_timeout, print_text, say
from rdzv.cli.reach import open_run, url_settings
from rdzv.core.report import status_json
from rdzv.display.history import history_as_json, history_text, timeline
from rdzv.display.pages import timeline_page
from rdzv.display.status import TopData, describe_store_health, member_lines, problem_lines, screen_lines, summary_lines
from rdzv.errors import RendezvousStateError
from rdzv.node.link.wakeup import Wakeup
from store import StoreError, StoreReplaced
from store.printable import make_logger, without_durations

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rdzv.core.report import Account, RunStatus
    from rdzv.node.run.run import Run

log: Final = make_logger(__name__)

LOOK_EVERY: Final = 0.5  # seconds between pings
ANSWER_WITHIN: Final = 1.0  # seconds for the store to answer a ping
READ_EVERY: Final = 1.0  # the shortest time between two readings of an unchanged run, in seconds
READ_WITHIN: Final = 3.0  # the shortest time limit of a reading, in seconds; after it the last reading is shown
READ_SHARE: Final = 0.05  # the largest share of the time spent on reading an unchanged run
STYLES: Final = {"bad": "bold red", "good": "green", "soft": "dim"}


@command(
    "status",
    "show how a run stands, and what it waits for",
    *RUN,
    JSON,
    flag("--watch", "again at every change, until it is closed; on a terminal redrawn in place, as by rdzv top"),
)
async def _print_status(options: argparse.Namespace) -> int:
    if options.watch:
        return await _watch_run(options)
    async with open_run(options, follow=Wakeup()) as run:
        health = await run.store_health()
        status, _, cost = await run.status_and_cost()
    if options.json:
        print_text(json.dumps({**status_json(status), "cost": cost.as_json(), "store": health}))
    else:
        settings = url_settings(options.url)
        hosts = await ask_hosts_for_answers(settings, Credentials(settings))
        of_each = ", ".join(f"{host} {asked}" for host, asked in hosts.items())
        lost = run.head().lost_store
        here = [f"hosts: {of_each}; store {1 if lost is None else lost.generation + 1} of this run"] * bool(hosts)
        say(*_status_lines(status, cost), f"store: {describe_store_health(health)}", *here)
    return DONE


def _status_lines(status: RunStatus, cost: Account | None = None) -> list[str]:
    told = [str(cost)] if cost is not None and cost.rounds else []
    return [*summary_lines(status), *told, *problem_lines(status), *member_lines(status)]


async def _watch_run(options: argparse.Namespace) -> int:
    """Show a run until it is closed or the user quits; if the store is replaced, show the run in the new store."""
    wakeup, shown = Wakeup(), list[str]()
    with limited_by_timeout(options.timeout) as answered, contextlib.ExitStack() as stack:
        terminal: _Terminal | None = None
        last: TopData | None = None
        while True:
            with contextlib.suppress(StoreReplaced):
                async with open_run(options, follow=wakeup, must_exist=False) as run:
                    if last is None:
                        await _warn_if_run_missing(run)
                    last = await _read_top_screen(run)
                    answered()
                    if sys.stdout.isatty() and not options.json and os.environ.get("TERM", "dumb") != "dumb":
                        terminal = terminal or stack.enter_context(_open_terminal(wakeup))
                        last = await _show_on_screen(run, wakeup, last, terminal)
                    else:
                        last = await _print_changes(run, wakeup, last, shown, as_json=options.json)
                    break
    if last.cost is not None and not options.json:
        say(str(last.cost))
    return DONE


async def _warn_if_run_missing(run: Run) -> None:
    """If this run is missing, log the existing runs: the id may be mistyped."""
    try:
        await run.check_exists()
    except RendezvousStateError as error:
        log.warning("%s; waiting for it", error)


async def _print_changes(run: Run, wakeup: Wakeup, frame: TopData, shown: list[str], *, as_json: bool) -> TopData:
    while True:
        lines = _status_lines(frame.status)
        if shown != (now := [without_durations(line) for line in lines]):
            shown[:] = now
            if as_json:
                print_text(json.dumps(status_json(frame.status)))
            else:
                say(*lines)
        if frame.status.closed is not None:
            return frame
        await wakeup.sleep_until(None)
        frame = await _read_top_screen(run)


class _Terminal:
    def __init__(self, live: Any, wakeup: Wakeup) -> None:
        self._live = live
        self._wakeup = wakeup
        self.over = False

    def show(self, frame: TopData) -> None:
        from rich.console import Group
        from rich.text import Text

        lines = (
            Text(line.text, style=STYLES.get(line.meant, ""), no_wrap=line.may_be_cut, overflow="ellipsis")
            for line in screen_lines(frame, height=shutil.get_terminal_size().lines)
        )
        self._live.update(Group(*lines), refresh=True)

    def handle_keys(self) -> None:
        letters = os.read(sys.stdin.fileno(), 64)
        self.over = self.over or b"q" in letters or b"\x04" in letters
        self._wakeup.notify()


@contextlib.contextmanager
def _open_terminal(wakeup: Wakeup) -> Iterator[_Terminal]:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise ImportError(f"a live screen needs {error.name}: pip install 'rdzv[live]'") from None
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=Console(), screen=True, auto_refresh=False, vertical_overflow="crop"))
        terminal = _Terminal(live, wakeup)
        if sys.stdin.isatty():
            import termios
            import tty

            file, loop = sys.stdin.fileno(), asyncio.get_running_loop()
            stack.callback(termios.tcsetattr, file, termios.TCSADRAIN, termios.tcgetattr(file))
            tty.setcbreak(file)
            loop.add_reader(file, terminal.handle_keys)
            stack.callback(loop.remove_reader, file)
        yield terminal


async def _show_on_screen(run: Run, wakeup: Wakeup, frame: TopData, terminal: _Terminal) -> TopData:
    read_at, took, heard = time.monotonic(), 0.0, False
    silent_since: float | None = None
    while True:
        began, answers_in = time.monotonic(), None
        with anyio.move_on_after(ANSWER_WITHIN), contextlib.suppress(StoreError):
            answers_in = await run.ping()
        if isinstance(run.store.failure, StoreReplaced):
            raise run.store.failure
        if answers_in is None:
            silent_since = silent_since or began
        else:
            silent_since = None
            if heard or began - read_at > max(READ_EVERY, took / READ_SHARE):
                # Without a limit, a reading would never end in a network that loses large packets.
                with anyio.move_on_after(max(READ_WITHIN, took * 10)), contextlib.suppress(StoreError):
                    began, frame = time.monotonic(), await _read_top_screen(run)
                    read_at, heard = time.monotonic(), False
                    took = read_at - began
        now = time.monotonic()
        silent_for = None if silent_since is None else now - silent_since
        terminal.show(replace(frame, read_ago=now - read_at, silent_for=silent_for, answers_in=answers_in or 0.0))
        if frame.status.closed is not None or terminal.over:
            return frame
        with anyio.move_on_after(LOOK_EVERY) as waiting:
            await wakeup.sleep_until(None)
        heard = heard or not waiting.cancelled_caught


async def _read_top_screen(run: Run) -> TopData:
    status, history, cost = await run.status_and_cost()
    return TopData(status=status, cost=cost if history.chapters else None)


@command("history", "tell what happened in a run, round by round", *RUN, JSON)
async def _print_history(options: argparse.Namespace) -> int:
    async with open_run(options, follow=Wakeup()) as run:
        _, history, cost = await run.status_and_cost()
    if options.json:
        print_text(json.dumps(history_as_json(run.run_id, history, cost)))
    elif history.chapters:
        say(*history_text(history), str(cost))
    else:
        say(*history_text(history) or [f"run {run.run_id}: no round has completed, as far as is remembered"])
    return DONE


@command(
    "timeline",
    "write what happened in a run as a page for a browser",
    *RUN,
    Argument("-o", "--output", required=True, metavar="FILE", help="where to; - is standard output"),
)
async def _write_timeline(options: argparse.Namespace) -> int:
    async with open_run(options, follow=Wakeup()) as run:
        _, history, cost = await run.status_and_cost()
        now = await run.time_of_day()
    page = timeline_page(timeline(run.run_id, history, now=now), cost)
    if options.output == "-":
        print_text(page)
    else:
        await anyio.Path(options.output).write_text(page + "\n", encoding="utf-8")
    return DONE
