"""Shell: `rdzv top`: a run, redrawn in place on a terminal; needs the extra `live` there. Elsewhere a block per change.

The run is read when it has changed, and now and then in between, the more rarely the more nodes there are to read. The
store is pinged all the time: that it has gone is said within `ANSWER_WITHIN` and `LOOK_EVERY`, less than 2 s together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio

from rdzv.backends.builtin import connect
from rdzv.cli.command import DONE, RUN, command, limited_by_timeout
from rdzv.display.history import account
from rdzv.display.live import Frame, draw
from rdzv.display.status import exceptions, member_lines, summary
from rdzv.errors import RendezvousError, RendezvousSettingsError
from rdzv.node.front.queries import WakeupHere
from rdzv.node.handler import Handler
from store.printable import printable, without_durations

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from rdzv.core.history import History
    from rdzv.core.report import RunStatus
    from rdzv.display.history import Account

__all__ = ["TOP", "cost_of", "follow"]

LOOK_EVERY: Final = 0.5  # seconds between pings
ANSWER_WITHIN: Final = 1.0  # seconds, for a store that is there
READ_EVERY: Final = 1.0  # seconds between two readings of a run in which nothing has changed, at least ...
READ_WITHIN: Final = 3.0  # seconds for one reading, at least; then what was read before is shown again, with its age
READ_SHARE: Final = 0.05  # ... and so rarely that reading takes no more than this share of the time
STYLES: Final = {"bad": "bold red", "good": "green", "soft": "dim"}


class Screen(Protocol):
    """Where frames go."""

    def show(self, frame: Frame) -> None:
        """Show a frame."""


class _Blocks:
    """No terminal: a block of lines for each change, and one line when the store has gone or is back."""

    def __init__(self) -> None:
        self._shown = ""
        self._silent = False

    def show(self, frame: Frame) -> None:
        if self._silent != (frame.silent_for is not None):
            self._silent = not self._silent
            print("the store does not answer" if self._silent else "the store answers again", flush=True)
        lines = [*summary(frame.status), *exceptions(frame.status), *member_lines(frame.status)]
        text = "\n".join(map(printable, lines))
        if without_durations(text) != without_durations(self._shown):
            self._shown = text
            print(text, flush=True)


class _Terminal:
    """A terminal: drawn in place by rich, which obeys NO_COLOR; `n`, `p` and `q` are read from it."""

    def __init__(self, wakeup: WakeupHere) -> None:
        self._wakeup = wakeup
        self._live: Any = None
        self._page = 0
        self._pages = 1
        self.over = False

    def show(self, frame: Frame) -> None:
        from rich.text import Text

        size = shutil.get_terminal_size()
        lines, self._pages = draw(replace(frame, page=self._page), width=size.columns, height=size.lines)
        texts = [Text(line.text, style=STYLES.get(line.meant, ""), no_wrap=True, overflow="ellipsis") for line in lines]
        self._live.update(Text("\n").join(texts), refresh=True)

    @contextlib.contextmanager
    def shown(self) -> Iterator[_Terminal]:
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise ImportError(f"a live screen needs {error.name}: pip install 'rdzv[live]'") from None
        with _keys(self._pressed), Live(console=Console(), screen=True, auto_refresh=False) as self._live:
            yield self

    def _pressed(self, letters: str) -> None:
        for letter in letters:
            match letter:
                case "q" | "\x04":
                    self.over = True
                case "n" | " ":
                    self._page = (self._page + 1) % self._pages
                case "p":
                    self._page = (self._page - 1) % self._pages
        self._wakeup.changed()


@contextlib.contextmanager
def _keys(pressed: Callable[[str], None]) -> Iterator[None]:
    """Read single keys from the terminal, if it is one, for as long as the block lasts."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    loop = asyncio.get_running_loop()
    tty.setcbreak(file)
    loop.add_reader(file, lambda: pressed(os.read(file, 64).decode(errors="replace")))
    try:
        yield
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)


async def follow(options: argparse.Namespace) -> int:
    """Show a run until it is closed, or until somebody has seen enough.

    Raises:
        StoreTimeoutError: There was nothing to show within `--timeout`.
    """
    with limited_by_timeout(options.timeout) as answered:
        async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
            if not isinstance(handler, Handler):
                raise RendezvousSettingsError(f"the backend of {handler.run_id} cannot be looked at")
            wakeup = WakeupHere()
            with handler.node.listeners.listening(wakeup):
                frame = await _read(handler)
                answered()
                if not sys.stdout.isatty():
                    frame = await _follow(handler, wakeup, frame, _Blocks(), lambda: False)
                else:
                    terminal = _Terminal(wakeup)
                    with terminal.shown():
                        frame = await _follow(handler, wakeup, frame, terminal, lambda: terminal.over)
            if frame.cost is not None:
                print(printable(str(frame.cost)))
    return DONE


async def _follow(
    handler: Handler, wakeup: WakeupHere, frame: Frame, screen: Screen, is_over: Callable[[], bool]
) -> Frame:
    read_at, took, heard = time.monotonic(), 0.0, False
    silent_since: float | None = None
    while True:
        began, answered, answers_in = time.monotonic(), False, 0.0
        due = heard or began - read_at > max(READ_EVERY, took / READ_SHARE)
        with anyio.move_on_after(ANSWER_WITHIN), contextlib.suppress(RendezvousError):
            answers_in = await handler.ping()
            answered = True
        if answered and due:
            # A run of thousands takes its time to read. Where only small packets pass, it would take for ever.
            with anyio.move_on_after(max(READ_WITHIN, took * 10)), contextlib.suppress(RendezvousError):
                began, frame = time.monotonic(), await _read(handler)
                read_at, heard = time.monotonic(), False
                took = read_at - began
        now = time.monotonic()
        silent_since = None if answered else began if silent_since is None else silent_since
        silent_for = None if silent_since is None else now - silent_since
        frame = replace(frame, read_ago=now - read_at, silent_for=silent_for, answers_in=answers_in)
        screen.show(frame)
        if frame.status.closed is not None or is_over():
            return frame
        with anyio.move_on_after(LOOK_EVERY) as waiting:
            await wakeup.sleep()
        heard = heard or not waiting.cancelled_caught


async def _read(handler: Handler) -> Frame:
    status, history, cost = await read(handler)
    return Frame(status=status, cost=cost if history.chapters else None)


async def read(handler: Handler) -> tuple[RunStatus, History, Account]:
    """Read a run once: how it stands, what is remembered of it, and what it has cost until now."""
    status, history = await handler.status_and_history()
    return status, history, account(handler.run_id, history, now=time.time(), waited=status.waited)


async def cost_of(handler: Handler) -> tuple[History, Account]:
    """Read the history of a run, and return it with what it has cost until now."""
    _, history, cost = await read(handler)
    return history, cost


TOP = command("top", "show a run on this terminal, as it goes on", *RUN, limited=False)(follow)
