"""Describes and runs the subcommands of `rdzv`, and defines the arguments that several of them share.

The exit statuses are 0 to 5, from DONE to NO_CONNECTION. `rdzv run` exits with the status of the user's command,
or for its own errors with 120 to 124 instead of 1 to 5.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
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
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import anyio

import store
from rdzv.config import value_types
from rdzv.config.config_errors import brief
from rdzv.display.standard_error import NonBlockingStderrHandler, flush_standard_error, say_error, write_all
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousSettingsError,
    RendezvousTimeoutError,
)
from store.connecting import is_etcd_url
from store.net.dialing import exhausted_limit
from store.net.threads import new_loop
from store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

DONE, FAILED, WRONG_USAGE, CLOSED, TIMED_OUT, NO_CONNECTION = range(6)

OF_RUN: Final = 119  # `rdzv run` adds this to the statuses of its own errors; few user commands exit with 120 to 124
ANSWER_WITHIN: Final = 10.0  # seconds; the default of `--timeout`
LAST_WORD_WITHIN: Final = 1.0  # seconds that a subcommand has after `--timeout` to report a more precise error
ERROR_LETTERS_MOST: Final = 4000

Run: TypeAlias = "Callable[[argparse.Namespace], Coroutine[Any, Any, int]]"


class Argument:
    """One argument of a subcommand, as argparse's `add_argument` takes it."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names = names
        self.settings = settings


def option(
    named: str, kind: Callable[[str], Any] | None, help: str, *, default: Any = None, **settings: Any
) -> Argument:
    """Describe an option with a value; `named` is the option and its value's name, as `--grace SECONDS`."""
    *names, metavar = named.split(" ")
    shown = f"{default:g}" if isinstance(default, float) else default
    told = f"{help} (default: {shown})" if default not in (None, ()) else help
    return Argument(*names, metavar=metavar, type=kind, default=default, help=told.replace("%", "%%"), **settings)


def flag(name: str, help: str, **settings: Any) -> Argument:
    """Describe an option without a value."""
    return Argument(name, **{"action": "store_true", "help": help, **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand of `rdzv`."""

    name: str
    help: str  # without a capital letter and a full stop
    run: Run
    arguments: tuple[Argument, ...] = ()
    usage: str | None = None  # replaces argparse's usage line if that is wrong
    means_url: Callable[[str], bool] = lambda word: "://" in word
    takes_command: bool = False  # True if a user's command follows after "--"; `options.words` has it
    ends_with: Callable[[argparse.Namespace, int], int] = lambda _, status: status  # replaces an error's exit status
    ends_in_order: bool = False  # True if the command is cancelled also by SIGTERM, SIGHUP and SIGQUIT
    limited: bool = False  # True if `--timeout` limits the whole command, unless with `--watch`; else `run` applies it

    @property
    def takes_url(self) -> bool:
        """True if the subcommand has the argument URL, whose default is RDZV_URL."""
        return any(each.names == ("url",) for each in self.arguments)

    @property
    def exit_status_offset(self) -> int:
        """The number added to the exit statuses 1 to 5 of the subcommand's errors."""
        return OF_RUN if self.takes_command else 0


def command(name: str, help: str, *arguments: Argument, **settings: Any) -> Callable[[Run], Command]:
    """Return a decorator that makes a `Command` of a function, by default `limited` if TIMEOUT is an argument."""
    settings.setdefault("limited", TIMEOUT in arguments)
    return lambda run: Command(name=name, help=help, run=run, arguments=arguments, **settings)


def argument_type(kind: value_types.ValueType) -> Callable[[str], Any]:
    """Return a converter of texts to values of this kind, for argparse's `type`."""

    def convert_text(text: str) -> Any:
        try:
            return kind.convert(text)
        except (ValueError, TypeError, OverflowError):
            raise argparse.ArgumentTypeError(f"{brief(text)} is not {kind.limit}") from None

    return convert_text


duration: Final = argument_type(value_types.duration())


def integer_type(at_least: int, at_most: int = value_types.NODES_MAX) -> Callable[[str], Any]:
    """Return a converter of texts to whole numbers in these limits, for argparse's `type`."""
    return argument_type(value_types.whole_number(at_least, at_most))


TIMEOUT: Final = option(
    "--timeout SECONDS",
    duration,
    "seconds the command may take; if it runs until stopped, until its first output",
    default=ANSWER_WITHIN,
)
RUN: Final = (Argument("url", metavar="URL", help="scheme://host[:port]/run_id[?parameters]"), TIMEOUT)
STORE: Final = (Argument("url", metavar="URL", help="scheme://host[:port][/run_id][?parameters]"), TIMEOUT)
JSON: Final = flag("--json", "as one JSON object")
NODE: Final = Argument("node", metavar="NODE", help="the node's id")
OUTPUT: Final = "standard output"
NAMED_MOST: Final = 8  # node ids, or values of an attribute, that a message lists


def run_command(command: Command, options: argparse.Namespace) -> int:
    """Run a subcommand and return its exit status."""
    level = logging.DEBUG if options.debug else logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[NonBlockingStderrHandler()]
    )
    if threading.current_thread() is threading.main_thread():
        _unblock_signals()
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            status = runner.run(_run_until_ctrl_c(command, options))
    except asyncio.CancelledError:
        return 128 + RepeatedSignalFilter.heeded  # `_cancel_on_ctrl_c` has cancelled the command
    except (RendezvousError, store.StoreError, OSError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not exhausted_limit(error.__cause__ or error):
            raise
        if isinstance(error, BrokenPipeError) and error.filename == OUTPUT:  # the reader has closed standard output
            status = DONE
        else:
            if options.debug:
                traceback.print_exc()
            say_error(f"rdzv {command.name}: {printable(message_of(error), most=ERROR_LETTERS_MOST)}")
            status = command.ends_with(options, command.exit_status_offset + _exit_status_of(error))
    try:
        sys.stdout.flush()  # may wait for a stopped terminal, even without output
    except OSError:  # discard the output, or Python writes it again at exit, and exits with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    flush_standard_error()
    return status


ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
AGAIN_AFTER: Final = 1.0  # seconds; a signal repeated sooner is ignored


def _unblock_signals() -> None:
    """Unblock signals that the parent has blocked; stop ignoring SIGCHLD, or children have no exit status."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})


def call_on_signal(number: signal.Signals, callback: Callable[..., object], *arguments: Any) -> None:
    """Call `callback` in the running loop at each signal `number`, unless this process ignores that signal."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(number, callback, *arguments)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def _cancel_on_ctrl_c(also: Iterable[signal.Signals]) -> None:
    """Cancel the command at Ctrl-C and at the signals `also`; exit at the next signal of `ENDING`."""
    wish, task, loop, was_told = RepeatedSignalFilter(), asyncio.current_task(), asyncio.get_running_loop(), False

    def cancel_or_exit(number: int, _: object) -> None:
        nonlocal was_told
        if wish.accept(number):
            if was_told:
                os._exit(128 + number)
            was_told = True
            assert task is not None, "a command runs in one"
            loop.call_soon_threadsafe(task.cancel)
            for other in ENDING:
                if signal.getsignal(other) is signal.SIG_DFL:  # the command does not handle this signal
                    signal.signal(other, cancel_or_exit)

    # The loop's handlers would wait while unread output blocks the loop.
    for number in (signal.SIGINT, *also):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, cancel_or_exit)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


class RepeatedSignalFilter:
    """Ignores a signal that is repeated within a second: `timeout` and Slurm send each signal twice."""

    heeded: ClassVar[int] = signal.SIGINT  # the signal of `ENDING` that this process last accepted
    heeded_at: ClassVar[float] = -math.inf  # the monotonic time of `heeded`

    def __init__(self) -> None:
        self._number = 0
        self._at = -math.inf

    def accept(self, number: int) -> bool:
        """Return True unless the signal repeats the last accepted one; all signals of `ENDING` count as the same."""
        alike = number == self._number or {number, self._number} <= ENDING
        if alike and time.monotonic() - self._at < AGAIN_AFTER:
            return False
        self._number, self._at = number, time.monotonic()
        if number in ENDING:
            RepeatedSignalFilter.heeded, RepeatedSignalFilter.heeded_at = number, self._at
        return True


async def _run_until_ctrl_c(command: Command, options: argparse.Namespace) -> int:
    RepeatedSignalFilter.heeded_at = -math.inf
    if threading.current_thread() is threading.main_thread():
        _cancel_on_ctrl_c(ENDING if command.ends_in_order else ())
    try:
        return await _run_with_timeout(command, options)
    finally:
        # After a signal of `ENDING`, keep handlers: the loop's or Python's end would remove them.
        if RepeatedSignalFilter.heeded_at > -math.inf:
            vars(asyncio.get_running_loop())["remove_signal_handler"] = lambda _: False
            _set_signal_handlers(_exit_on_second_signal)  # a later signal ends an exit that unread output blocks
            signal.set_wakeup_fd(-1)
            atexit.register(_set_signal_handlers, signal.SIG_IGN)


def _set_signal_handlers(action: Callable[[int, object], None] | signal.Handlers) -> None:
    for number in ENDING:
        signal.signal(number, action)


def _exit_on_second_signal(number: int, _: object) -> None:
    if time.monotonic() - RepeatedSignalFilter.heeded_at >= AGAIN_AFTER:
        os._exit(128 + number)


async def _run_with_timeout(command: Command, options: argparse.Namespace) -> int:
    if command.takes_url and is_etcd_url(options.url):
        # Import gRPC before the limit begins: the import may take longer than a short `--timeout`.
        importlib.import_module("store.etcd.client")
    if not command.limited or getattr(options, "watch", False):
        return await command.run(options)
    with limited_by_timeout(options.timeout):
        return await command.run(options)


@contextlib.contextmanager
def limited_by_timeout(seconds: float) -> Iterator[Callable[[], None]]:
    """Limit a block by `--timeout`; yield a function that lifts the limit; raise StoreTimeoutError after the limit."""
    with anyio.move_on_after(seconds + LAST_WORD_WITHIN) as limit:
        yield lambda: setattr(limit, "deadline", math.inf)
    if limit.cancelled_caught:
        raise store.StoreTimeoutError(
            f"not done within {seconds:g} s (--timeout): the store does not answer, or too slowly; it is overloaded, "
            "or large packets are lost on the way (rdzv doctor looks)"
        )


def message_of(error: Exception) -> str:
    """Return an error's message; for a system error, its file and message without the error number."""
    if lack := exhausted_limit(error):
        return lack
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def _exit_status_of(error: Exception) -> int:
    match error:
        case RendezvousSettingsError() | store.StoreUsageError() | ImportError():  # ImportError: a missing extra
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
    """Print lines, shortened and with control characters escaped."""
    print_text("\n".join(map(printable, lines)))


def print_text(text: str) -> None:
    """Print a text, with escapes only for letters that standard output cannot encode; raise OSError if unwritable."""
    try:
        if reconfigure := getattr(sys.stdout, "reconfigure", None):
            reconfigure(errors="backslashreplace")  # the encoding may lack letters of foreign text
        print(end="", flush=True)
        try:
            file = sys.stdout.fileno()
        except (AttributeError, ValueError):  # standard output is missing, or in memory
            print(text, flush=True)
        else:
            write_all(file, f"{text}\n".encode(sys.stdout.encoding, "backslashreplace"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, OUTPUT) from None
