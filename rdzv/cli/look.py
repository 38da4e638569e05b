"""Shell: the subcommands that look at a run and change nothing: status, top, history, timeline.

On a terminal, `rdzv top` and `rdzv status --watch` redraw one screen; that needs the extra `live`. The run is read when
it has changed, and now and then in between, the more rarely the more nodes there are to read. The store is pinged all
the time: that it has gone is said within `ANSWER_WITHIN` and `LOOK_EVERY`, less than 2 s together.
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

from rdzv.cli.command import DONE, JSON, RUN, argument, command, flag, limited_by_timeout, say
from rdzv.cli.reach import check_exists, open_run
from rdzv.core.report import report
from rdzv.display.history import account, as_json, describe, timeline
from rdzv.display.live import Frame, draw
from rdzv.display.pages import timeline_page
from rdzv.display.status import describe_health, exceptions, member_lines, summary
from rdzv.errors import RendezvousError
from rdzv.node.front.queries import WakeupHere
from store.printable import without_durations

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from rdzv.core.history import History
    from rdzv.core.report import RunStatus
    from rdzv.display.history import Account
    from rdzv.node.handler import Handler

__all__ = ["read"]

LOOK_EVERY: Final = 0.5  # seconds between pings
ANSWER_WITHIN: Final = 1.0  # seconds, for a store that is there
READ_EVERY: Final = 1.0  # seconds between two readings of a run in which nothing has changed, at least ...
READ_WITHIN: Final = 3.0  # seconds for one reading, at least; then what was read before is shown again, with its age
READ_SHARE: Final = 0.05  # ... and so rarely that reading takes no more than this share of the time
STYLES: Final = {"bad": "bold red", "good": "green", "soft": "dim"}


async def read(handler: Handler) -> tuple[RunStatus, History, Account]:
    """Read a run once: how it stands, what is remembered of it, and what it has cost until now."""
    status, history = await handler.status_and_history()
    return status, history, account(handler.run_id, history, now=time.time(), waited=status.waited)


# ------------------------------------------------------------------------------------------ status and top


@command(
    "status",
    "show how a run stands, and what it waits for",
    *RUN,
    JSON,
    flag("--watch", "again at every change, until the run is closed; on a terminal redrawn in place, as by rdzv top"),
)
async def _status(options: argparse.Namespace) -> int:
    if options.watch:
        return await _watch(options)
    await check_exists(options)
    async with open_run(options) as handler:
        health = await handler.store_health()
        status, _, cost = await read(handler)
    if options.json:
        print(json.dumps({**report(status), "cost": cost.plain(), "store": health}))
    else:
        say(*_lines(status, cost), f"store: {describe_health(health)}")
    return DONE


@command("top", "show a run on this terminal, as it goes on", *RUN, limited=False)
async def _top(options: argparse.Namespace) -> int:
    options.json = False
    return await _watch(options)


def _lines(status: RunStatus, cost: Account | None = None) -> list[str]:
    told = [str(cost)] if cost is not None and cost.rounds else []
    return [*summary(status), *told, *exceptions(status), *member_lines(status)]


async def _watch(options: argparse.Namespace) -> int:
    """Show a run until it is closed, or until somebody has seen enough.

    Raises:
        StoreTimeoutError: There was nothing to show within `--timeout`.
    """
    with limited_by_timeout(options.timeout) as answered:
        async with open_run(options) as handler:
            if options.json:
                await _write_each_change(
                    handler, answered, lambda status: print(json.dumps(report(status)), flush=True)
                )
                return DONE
            if sys.stdout.isatty():
                wakeup = WakeupHere()
                with handler.node.listeners.listening(wakeup):
                    last = await _frame(handler)
                    answered()
                    with _terminal(wakeup) as terminal:
                        last = await _follow(handler, wakeup, last, terminal)
            else:
                await _write_each_change(handler, answered, lambda status: say(*_lines(status)))
                last = await _frame(handler)
            if last.cost is not None:
                say(str(last.cost))
    return DONE


async def _write_each_change(
    handler: Handler, answered: Callable[[], None], write: Callable[[RunStatus], None]
) -> None:
    shown: list[str] = []
    async with contextlib.aclosing(handler.statuses()) as statuses:
        async for status in statuses:
            answered()
            before, shown = shown, [without_durations(line) for line in _lines(status)]
            if shown != before:
                write(status)


class _Terminal:
    """A terminal: drawn in place by rich, which obeys NO_COLOR; `q` is read from it."""

    def __init__(self, live: Any, wakeup: WakeupHere) -> None:
        self._live = live
        self._wakeup = wakeup
        self.over = False

    def show(self, frame: Frame) -> None:
        from rich.console import Group
        from rich.text import Text

        self._live.update(
            Group(
                *(
                    Text(line.text, style=STYLES.get(line.meant, ""), no_wrap=line.may_be_cut, overflow="ellipsis")
                    for line in draw(frame, height=shutil.get_terminal_size().lines)
                )
            ),
            refresh=True,
        )

    def pressed(self) -> None:
        letters = os.read(sys.stdin.fileno(), 64)
        self.over = self.over or b"q" in letters or b"\x04" in letters
        self._wakeup.changed()


@contextlib.contextmanager
def _terminal(wakeup: WakeupHere) -> Iterator[_Terminal]:
    """Draw on the terminal, and read single keys from it, for as long as the block lasts."""
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
            loop.add_reader(file, terminal.pressed)
            stack.callback(loop.remove_reader, file)
        yield terminal


async def _follow(handler: Handler, wakeup: WakeupHere, frame: Frame, terminal: _Terminal) -> Frame:
    """Draw a run until it is closed, or until `q` is pressed; what was read last."""
    read_at, took, heard = time.monotonic(), 0.0, False
    silent_since: float | None = None
    while True:
        began, answers_in = time.monotonic(), None
        with anyio.move_on_after(ANSWER_WITHIN), contextlib.suppress(RendezvousError):
            answers_in = await handler.ping()
        if answers_in is None:
            silent_since = silent_since or began
        else:
            silent_since = None
            if heard or began - read_at > max(READ_EVERY, took / READ_SHARE):
                # A run of thousands takes its time to read. Where only small packets pass, it would take for ever.
                with anyio.move_on_after(max(READ_WITHIN, took * 10)), contextlib.suppress(RendezvousError):
                    began, frame = time.monotonic(), await _frame(handler)
                    read_at, heard = time.monotonic(), False
                    took = read_at - began
        now = time.monotonic()
        silent_for = None if silent_since is None else now - silent_since
        terminal.show(replace(frame, read_ago=now - read_at, silent_for=silent_for, answers_in=answers_in or 0.0))
        if frame.status.closed is not None or terminal.over:
            return frame
        with anyio.move_on_after(LOOK_EVERY) as waiting:
            await wakeup.sleep()
        heard = heard or not waiting.cancelled_caught


async def _frame(handler: Handler) -> Frame:
    status, history, cost = await read(handler)
    return Frame(status=status, cost=cost if history.chapters else None)


# ------------------------------------------------------------------------------------------ history and timeline


@command("history", "tell what happened in a run, round by round", *RUN, JSON)
async def _history(options: argparse.Namespace) -> int:
    async with open_run(options) as handler:
        _, history, cost = await read(handler)
    if options.json:
        print(json.dumps(as_json(handler.run_id, history, cost)))
    elif history.chapters:
        say(*describe(history), str(cost))
    else:
        say(*describe(history) or [f"run {handler.run_id}: no round has completed, as far as is remembered"])
    return DONE


@command(
    "timeline",
    "write what happened in a run as a page for a browser",
    *RUN,
    argument("-o", "--output", required=True, metavar="FILE", help="where to; - is standard output"),
)
async def _timeline(options: argparse.Namespace) -> int:
    async with open_run(options) as handler:
        _, history, cost = await read(handler)
    page = timeline_page(timeline(handler.run_id, history, now=time.time()), cost)
    if options.output == "-":
        print(page)
    else:
        await anyio.Path(options.output).write_text(page + "\n", encoding="utf-8")
    return DONE
