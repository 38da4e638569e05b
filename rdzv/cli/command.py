"""What `rdzv.cli.main` needs to know of a subcommand, and the arguments that several subcommands take.

A room of this folder describes its subcommands in `COMMANDS`, a tuple of `Command`; the table of rooms is in `main`.
The exit status of a subcommand is one of

    0 done    1 failed    2 wrong usage    3 closed    4 timed out    5 no connection
"""

from __future__ import annotations

import argparse
import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio

from rdzv.config import value_types
from rdzv.config.config_errors import shown
from store import StoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

__all__ = [
    "CLOSED",
    "DONE",
    "FAILED",
    "NO_CONNECTION",
    "OF_RUN",
    "TIMED_OUT",
    "WRONG_USAGE",
    "Command",
    "add_run",
    "add_timeout",
    "argument_type",
    "duration",
    "limited_by_timeout",
    "whole_number",
]

DONE, FAILED, WRONG_USAGE, CLOSED, TIMED_OUT, NO_CONNECTION = range(6)

OF_RUN: Final = 119
"""What is added to an exit status of ours under `rdzv run`: commands seldom end with 120 to 124 themselves."""

ANSWER_WITHIN: Final = 10.0
"""Seconds in which a store must answer somebody who only looks."""

LAST_WORD_WITHIN: Final = 1.0
"""Seconds after `--timeout` in which a subcommand may still say itself why it has not come to its end."""


def _is_url(word: str) -> bool:
    return "://" in word


def _add_nothing(_: argparse.ArgumentParser) -> None:
    """Describe no arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand.

    Attributes:
        name: Its name.
        help: What it does, in one line that begins with a small letter and has no full stop.
        run: Carries it out, and returns the exit status.
        add_arguments: Describes its arguments to a parser.
        takes_url: Whether it has an argument URL, which may be left out where RDZV_URL is set.
        means_url: Whether a word of its line stands for a URL.
        takes_command: Whether another command follows after "--"; its words are then in `options.words`.
        limited: Whether `--timeout` limits the whole command; else it limits the time until its first output.
    """

    name: str
    help: str
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, int]]
    add_arguments: Callable[[argparse.ArgumentParser], None] = _add_nothing
    takes_url: bool = False
    means_url: Callable[[str], bool] = _is_url
    takes_command: bool = False
    limited: bool = False


def argument_type(kind: value_types.Kind) -> Callable[[str], Any]:
    """Return what argparse calls to read an argument of this kind."""

    def read(text: str) -> Any:
        try:
            return kind.convert(text)
        except (ValueError, TypeError, OverflowError):
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {kind.limit}") from None

    return read


duration: Final = argument_type(value_types.duration())


def whole_number(at_least: int) -> Callable[[str], Any]:
    """Return what argparse calls to read a count."""
    return argument_type(value_types.whole_number(at_least))


@contextlib.contextmanager
def limited_by_timeout(seconds: float) -> Iterator[Callable[[], None]]:
    """Limit a block by `--timeout`, until it calls what it is given: then it may go on for as long as it likes.

    Raises:
        StoreTimeoutError: It took longer. What it waits for itself has the same limit, comes first, and says more.
    """
    with anyio.move_on_after(seconds + LAST_WORD_WITHIN) as limit:
        yield lambda: setattr(limit, "deadline", math.inf)
    if limit.cancelled_caught:
        raise StoreTimeoutError(
            f"not done within {seconds:g} s (--timeout): the store does not answer, or too slowly; it is overloaded, "
            "or large packets are lost on the way (rdzv doctor looks)"
        )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Let a subcommand take the URL of a run, and how long its store may take to answer."""
    parser.add_argument("url", metavar="URL", help="scheme://host[:port]/run_id[?parameters]")
    add_timeout(parser)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Let a subcommand take how long a store may take to answer."""
    parser.add_argument(
        "--timeout",
        type=duration,
        default=ANSWER_WITHIN,
        metavar="SECONDS",
        help="seconds the command may take; if it runs until stopped, until its first output (default: %(default)g)",
    )
