"""Subcommands: their description, the arguments that several of them take, and how they run.

The modules of this folder make a `Command` of a function by `command`; `main` lists the modules. An error is one line,
without a traceback unless `--debug`. Exit statuses:

    0 done    1 failed    2 wrong usage    3 closed    4 timed out    5 no connection

`rdzv run` ends with its command's status, and with 120 to 124 for the statuses 1 to 5.
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
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

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
from store.net.threads import new_loop
from store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

DONE, FAILED, WRONG_USAGE, CLOSED, TIMED_OUT, NO_CONNECTION = range(6)

OF_RUN: Final = 119  # added to our exit statuses under `rdzv run`; few commands use 120 to 124
ANSWER_WITHIN: Final = 10.0  # seconds; the default of `--timeout`
LAST_WORD_WITHIN: Final = 1.0  # seconds after `--timeout` for a subcommand to name the reason itself
ERROR_LETTERS_MOST: Final = 4000

Run: TypeAlias = "Callable[[argparse.Namespace], Coroutine[Any, Any, int]]"


# ------------------------------------------------------------------------------------------ what it is


class Argument(NamedTuple):
    """One argument of a subcommand, as argparse takes it."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def argument(*names: str, **settings: Any) -> Argument:
    """Describe an argument by argparse's settings."""
    return Argument(names, settings)


def option(
    named: str, kind: Callable[[str], Any] | None, help: str, *, default: Any = None, **settings: Any
) -> Argument:
    """Describe an option with a value; `named` holds its names and that of its value, as in `--grace SECONDS`."""
    *names, metavar = named.split(" ")
    shown = f"{default:g}" if isinstance(default, float) else default
    told = f"{help} (default: {shown})" if default not in (None, ()) else help
    return argument(*names, metavar=metavar, type=kind, default=default, help=told.replace("%", "%%"), **settings)


def flag(name: str, help: str, **settings: Any) -> Argument:
    """Describe an option without a value."""
    return argument(name, **{"action": "store_true", "help": help, **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand."""

    name: str
    help: str  # begins with a small letter and has no full stop
    run: Run
    arguments: tuple[Argument, ...] = ()
    usage: str | None = None  # if argparse's would be wrong
    means_url: Callable[[str], bool] = lambda word: "://" in word
    takes_command: bool = False  # follows after "--", in `options.words`
    ends_with: Callable[[argparse.Namespace, int], int] = lambda _, status: status  # maps the status of an error
    limited: bool = False  # `--timeout` limits the whole command, else the time until its first output

    @property
    def takes_url(self) -> bool:
        """True if it has an argument URL, with RDZV_URL as default."""
        return any(each.names == ("url",) for each in self.arguments)

    @property
    def first_status(self) -> int:
        """The offset of its exit statuses."""
        return OF_RUN if self.takes_command else 0


def command(name: str, help: str, *arguments: Argument, **settings: Any) -> Callable[[Run], Command]:
    """Make a subcommand of a function. `--timeout` limits it unless `limited` is False."""
    settings.setdefault("limited", TIMEOUT in arguments)
    return lambda run: Command(name=name, help=help, run=run, arguments=arguments, **settings)


def argument_type(kind: value_types.Kind) -> Callable[[str], Any]:
    """Return argparse's `type` for this kind."""

    def read(text: str) -> Any:
        try:
            return kind.convert(text)
        except (ValueError, TypeError, OverflowError):
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {kind.limit}") from None

    return read


duration: Final = argument_type(value_types.duration())


def whole_number(at_least: int, at_most: int = value_types.NODES_MAX) -> Callable[[str], Any]:
    """Return argparse's `type` for a count."""
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
NODE: Final = argument("node", metavar="NODE", help="the node's id")
OUTPUT: Final = "standard output"  # as the file of a system error
NAMED_MOST: Final = 8  # nodes, and values of an attribute, in a message


# ------------------------------------------------------------------------------------------ how it is carried out


def carry_out(command: Command, options: argparse.Namespace) -> int:
    """Run a subcommand and return its exit status."""
    level = logging.DEBUG if options.debug else logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[StandardErrorHandler()]
    )
    if threading.current_thread() is threading.main_thread():
        _take_signals_back()
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            status = runner.run(_run_until_ctrl_c(command, options))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # see `_end_by_ctrl_c`
    except (RendezvousError, store.StoreError, OSError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not lack_of(error.__cause__ or error):
            raise
        if isinstance(error, BrokenPipeError) and error.filename == OUTPUT:  # its reader has closed it
            status = DONE
        else:
            if options.debug:
                traceback.print_exc()
            say_error(f"rdzv {command.name}: {printable(in_a_line(error), most=ERROR_LETTERS_MOST)}")
            status = command.ends_with(options, command.first_status + _status_of(error))
    try:
        print(end="", flush=True)
    except OSError:  # else Python would write again at exit, and end with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    flush_errors()
    return status


# ------------------------------------------------------------------------------------------ signals


ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
AGAIN_AFTER: Final = 1.0  # seconds


def _take_signals_back() -> None:
    """Unblock signals that the parent has blocked, and restore SIGCHLD: if ignored, children have no exit status.

    Other ignored signals stay ignored, as under nohup.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})


def handle_signal(number: signal.Signals, callback: Callable[..., object], *arguments: Any) -> None:
    """Handle a signal in the running loop, unless the parent ignores it."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(number, callback, *arguments)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def _end_by_ctrl_c() -> None:
    """Cancel the command at Ctrl-C; end at once at another a second later. asyncio ends at any second Ctrl-C."""
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
    """The last signal that was obeyed; its repetition within a second is ignored.

    `timeout`, Slurm and supervisors send a signal twice: to a process and then to its group.
    """

    heeded_at: ClassVar[float] = -math.inf  # when this process was last told to end

    def __init__(self) -> None:
        self._number = 0
        self._at = -math.inf

    def may_be_new(self, number: int) -> bool:
        """Return False if the signal repeats the last one."""
        alike = number == self._number or {number, self._number} <= ENDING
        return not alike or time.monotonic() - self._at >= AGAIN_AFTER

    def is_new(self, number: int) -> bool:
        """Record the signal and return True, unless it repeats the last one."""
        is_new = self.may_be_new(number)
        if is_new:
            self._number, self._at = number, time.monotonic()
            if number in ENDING:
                Wish.heeded_at = self._at
        return is_new


async def _run_until_ctrl_c(command: Command, options: argparse.Namespace) -> int:
    Wish.heeded_at = -math.inf
    if threading.current_thread() is threading.main_thread():
        _end_by_ctrl_c()
    try:
        return await _run(command, options)
    finally:
        # Closing a loop, and finalizing Python, restore default actions: the second signal of a pair would kill.
        if Wish.heeded_at > -math.inf:
            vars(asyncio.get_running_loop())["remove_signal_handler"] = lambda _: False
            _handle_ending(_end_if_again)  # at exit Python may wait for ever for a reader of the output
            signal.set_wakeup_fd(-1)
            atexit.register(_handle_ending, signal.SIG_IGN)


def _handle_ending(action: Callable[[int, object], None] | signal.Handlers) -> None:
    for number in ENDING:
        signal.signal(number, action)


def _end_if_again(number: int, _: object) -> None:
    if time.monotonic() - Wish.heeded_at >= AGAIN_AFTER:
        os._exit(128 + number)


async def _run(command: Command, options: argparse.Namespace) -> int:
    if command.takes_url and is_etcd(options.url):
        # Importing gRPC may take longer than a short `--timeout`.
        importlib.import_module("store.etcd.client")
    if not command.limited or getattr(options, "watch", False):
        return await command.run(options)
    with limited_by_timeout(options.timeout):
        return await command.run(options)


@contextlib.contextmanager
def limited_by_timeout(seconds: float) -> Iterator[Callable[[], None]]:
    """Limit a block by `--timeout`, until it calls the function that this yields.

    Raises:
        StoreTimeoutError: The limit has passed. Mostly a call of the store meets the same limit first, and says more.
    """
    with anyio.move_on_after(seconds + LAST_WORD_WITHIN) as limit:
        yield lambda: setattr(limit, "deadline", math.inf)
    if limit.cancelled_caught:
        raise store.StoreTimeoutError(
            f"not done within {seconds:g} s (--timeout): the store does not answer, or too slowly; it is overloaded, "
            "or large packets are lost on the way (rdzv doctor looks)"
        )


def in_a_line(error: Exception) -> str:
    """Return an error as text; a system error as its message and file, without the number."""
    if lack := lack_of(error):
        return lack
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def _status_of(error: Exception) -> int:
    match error:
        case RendezvousSettingsError() | store.StoreUsageError() | ImportError():  # an extra is missing
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
    """Print lines without the control characters of foreign text."""
    put("\n".join(map(printable, lines)))


def put(text: str) -> None:
    """Print a text unchanged; raise OSError if standard output cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, OUTPUT) from None
