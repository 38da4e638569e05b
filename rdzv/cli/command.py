"""What a subcommand is, the arguments that several of them take, and how one is carried out.

A room of this folder makes a `Command` of each function that carries a subcommand out, by `command`, which is also told
its arguments; the table of rooms is in `main`. An error is one line, without a traceback unless `--debug`.
The exit status of a subcommand is one of

    0 done    1 failed    2 wrong usage    3 closed    4 timed out    5 no connection

`rdzv run` ends with its command's own status, and says 120 to 124 for the statuses 1 to 5.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import anyio

import store
from rdzv.config import value_types
from rdzv.config.config_errors import shown
from rdzv.display.standard_error import StandardErrorHandler, flush_errors, say_error
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousSettingsError,
    RendezvousTimeoutError,
)
from store.connecting import is_etcd
from store.net.dialing import lack_of
from store.net.threads import loop_factory
from store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

__all__ = [
    "CLOSED",
    "DONE",
    "ENDING",
    "FAILED",
    "JSON",
    "NO_CONNECTION",
    "OF_RUN",
    "RUN",
    "STORE",
    "TIMED_OUT",
    "TIMEOUT",
    "WRONG_USAGE",
    "Argument",
    "Command",
    "Wish",
    "argument",
    "argument_type",
    "carry_out",
    "command",
    "duration",
    "flag",
    "handle_signal",
    "limited_by_timeout",
    "option",
    "put",
    "say",
    "whole_number",
]

DONE, FAILED, WRONG_USAGE, CLOSED, TIMED_OUT, NO_CONNECTION = range(6)

OF_RUN: Final = 119
"""What is added to an exit status of ours under `rdzv run`: commands seldom end with 120 to 124 themselves."""

ANSWER_WITHIN: Final = 10.0
"""Seconds in which a store must answer somebody who only looks."""

LAST_WORD_WITHIN: Final = 1.0
"""Seconds after `--timeout` in which a subcommand may still say itself why it has not come to its end."""

ERROR_LETTERS_MOST: Final = 4000  # of a line that says what went wrong

Run: TypeAlias = "Callable[[argparse.Namespace], Coroutine[Any, Any, int]]"


# ------------------------------------------------------------------------------------------ what it is


class Argument(NamedTuple):
    """One argument of a subcommand: its names, and what else argparse is told of it."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def argument(*names: str, **settings: Any) -> Argument:
    """Describe an argument, in argparse's words."""
    return Argument(names, settings)


def option(
    named: str, kind: Callable[[str], Any] | None, help: str, *, default: Any = None, **settings: Any
) -> Argument:
    """Describe an option with a value, as `--grace SECONDS`; its default, if it has any, is told with the help."""
    name, _, metavar = named.partition(" ")
    shown = f"{default:g}" if isinstance(default, float) else default
    told = f"{help} (default: {shown})" if default not in (None, ()) else help
    return argument(name, metavar=metavar, type=kind, default=default, help=told.replace("%", "%%"), **settings)


def flag(name: str, help: str, **settings: Any) -> Argument:
    """Describe an option that is given or not."""
    return argument(name, **{"action": "store_true", "help": help, **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand.

    Attributes:
        name: Its name.
        help: What it does, in one line that begins with a small letter and has no full stop.
        run: Carries it out, and returns the exit status.
        arguments: What it can be told.
        usage: What `--help` says of its line, where argparse would say it wrongly.
        means_url: Whether a word of its line stands for a URL.
        takes_command: Whether another command follows after "--"; its words are then in `options.words`.
        ends_with: What its exit status becomes that an error has, if its arguments say so.
        limited: Whether `--timeout` limits the whole command; else it limits the time until its first output.
    """

    name: str
    help: str
    run: Run
    arguments: tuple[Argument, ...] = ()
    usage: str | None = None
    means_url: Callable[[str], bool] = lambda word: "://" in word
    takes_command: bool = False
    ends_with: Callable[[argparse.Namespace, int], int] = lambda _, status: status
    limited: bool = False

    @property
    def takes_url(self) -> bool:
        """Whether it has an argument URL, which may be left out where RDZV_URL is set."""
        return any(each.names == ("url",) for each in self.arguments)

    @property
    def first_status(self) -> int:
        """What its exit statuses are counted from."""
        return OF_RUN if self.takes_command else 0


def command(name: str, help: str, *arguments: Argument, **settings: Any) -> Callable[[Run], Command]:
    """Make a subcommand of the function that carries it out. One with `--timeout` is limited by it, or says not."""
    settings.setdefault("limited", TIMEOUT in arguments)
    return lambda run: Command(name=name, help=help, run=run, arguments=arguments, **settings)


def argument_type(kind: value_types.Kind) -> Callable[[str], Any]:
    """Return what argparse calls to read an argument of this kind."""

    def read(text: str) -> Any:
        try:
            return kind.convert(text)
        except (ValueError, TypeError, OverflowError):
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {kind.limit}") from None

    return read


duration: Final = argument_type(value_types.duration())


def whole_number(at_least: int, at_most: int = value_types.NODES_MAX) -> Callable[[str], Any]:
    """Return the function that argparse calls to read a count."""
    return argument_type(value_types.whole_number(at_least, at_most))


TIMEOUT: Final = option(
    "--timeout SECONDS",
    duration,
    "seconds the command may take; if it runs until stopped, until its first output",
    default=ANSWER_WITHIN,
)
RUN: Final = (argument("url", metavar="URL", help="scheme://host[:port]/run_id[?parameters]"), TIMEOUT)
STORE: Final = (argument("url", metavar="URL", help="scheme://host[:port][/run_id][?parameters]"), TIMEOUT)
JSON: Final = flag("--json", "as one JSON object")


# ------------------------------------------------------------------------------------------ how it is carried out


def carry_out(command: Command, options: argparse.Namespace) -> int:
    """Carry a subcommand out, and return its exit status."""
    level = logging.DEBUG if options.debug else logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[StandardErrorHandler()]
    )
    if threading.current_thread() is threading.main_thread():
        _take_signals_back()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            status = runner.run(_run_until_ctrl_c(command, options))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # see `_end_by_ctrl_c`
    except BrokenPipeError:  # whoever read our output has enough of it
        status = DONE
    except (RendezvousError, store.StoreError, OSError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not lack_of(error):
            raise
        if options.debug:
            traceback.print_exc()
        say_error(f"rdzv {command.name}: {printable(in_a_line(error), most=ERROR_LETTERS_MOST)}")
        status = command.ends_with(options, command.first_status + _status_of(error))
    try:
        print(end="", flush=True)
    except OSError:  # what cannot be written: Python would try once more at its end, and end with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    flush_errors()
    return status


# ------------------------------------------------------------------------------------------ signals


ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
AGAIN_AFTER: Final = 1.0  # seconds from which on a signal that comes again is another wish


def _take_signals_back() -> None:
    """Undo what a parent has left to this process: signals that are blocked stop nothing, and tell of no child.

    What the parent ignores stays ignored, as under nohup; but a child whose end is ignored has no exit status.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})


def handle_signal(number: signal.Signals, callback: Callable[..., object], *arguments: Any) -> None:
    """Handle a signal in the running loop, unless the parent has it ignored."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(number, callback, *arguments)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def _end_by_ctrl_c() -> None:
    """Have Ctrl-C cancel the command; later once more, end at once. asyncio ends it in the middle at any second one."""
    wish, task, was_told = Wish(), asyncio.current_task(), False

    def interrupt() -> None:
        nonlocal was_told
        if wish.is_new(signal.SIGINT):
            if was_told:
                os._exit(128 + signal.SIGINT)
            was_told = True
            assert task is not None, "a command runs in one"
            task.cancel()

    handle_signal(signal.SIGINT, interrupt)


class Wish:
    """The signal that was heeded last. One that comes again within a second is the same wish, and not impatience.

    `timeout`, Slurm and supervisors send pairs, to a process and then to its group.
    """

    def __init__(self) -> None:
        self._number = 0
        self._at = -math.inf

    def may_be_new(self, number: int) -> bool:
        """Return False if the signal says what the last one said."""
        alike = number == self._number or {number, self._number} <= ENDING
        return not alike or time.monotonic() - self._at >= AGAIN_AFTER

    def is_new(self, number: int) -> bool:
        """Return whether the signal is another wish; then it is the one that is heeded from now on."""
        is_new = self.may_be_new(number)
        if is_new:
            self._number, self._at = number, time.monotonic()
        return is_new


async def _run_until_ctrl_c(command: Command, options: argparse.Namespace) -> int:
    if threading.current_thread() is threading.main_thread():
        _end_by_ctrl_c()
    return await _run(command, options)


async def _run(command: Command, options: argparse.Namespace) -> int:
    """Run a subcommand, within its `--timeout`; one that goes on for long takes care of that itself."""
    if command.takes_url and is_etcd(options.url):
        # Importing gRPC takes longer than a short `--timeout`, and says nothing of the store.
        importlib.import_module("store.etcd.client")
    if not command.limited or getattr(options, "watch", False):
        return await command.run(options)
    with limited_by_timeout(options.timeout):
        return await command.run(options)


@contextlib.contextmanager
def limited_by_timeout(seconds: float) -> Iterator[Callable[[], None]]:
    """Limit a block by `--timeout`, until it calls what it is given: then it may go on for as long as it likes.

    Raises:
        StoreTimeoutError: It took longer. What it waits for itself has the same limit, comes first, and says more.
    """
    with anyio.move_on_after(seconds + LAST_WORD_WITHIN) as limit:
        yield lambda: setattr(limit, "deadline", math.inf)
    if limit.cancelled_caught:
        raise store.StoreTimeoutError(
            f"not done within {seconds:g} s (--timeout): the store does not answer, or too slowly; it is overloaded, "
            "or large packets are lost on the way (rdzv doctor looks)"
        )


def in_a_line(error: Exception) -> str:
    """Return what went wrong; of what the system says, its words and the file, without the number."""
    if lack := lack_of(error):
        return lack
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def _status_of(error: Exception) -> int:
    match error:
        case RendezvousSettingsError() | store.StoreUsageError() | ImportError():  # of an extra, which is named
            return WRONG_USAGE
        case RendezvousClosedError():
            return CLOSED
        case RendezvousTimeoutError() | store.StoreTimeoutError():
            return TIMED_OUT
        case RendezvousConnectionError() | store.ConnectionLost() | store.AuthenticationError():
            return NO_CONNECTION
        case _:
            return FAILED


def say(*lines: str) -> None:
    """Print lines in which others may have named something: no control character of theirs reaches a terminal."""
    put("\n".join(map(printable, lines)))


def put(text: str) -> None:
    """Print a text as it is.

    Raises:
        OSError: It cannot be written, and the error says that this is the process's own output.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None
