"""What `rdzv.cli.main` needs to know of a subcommand, and the arguments that several subcommands take.

A room of this folder makes a `Command` of each function that carries a subcommand out, by `command`, which is also told
its arguments; the table of rooms is in `main`.
The exit status of a subcommand is one of

    0 done    1 failed    2 wrong usage    3 closed    4 timed out    5 no connection
"""

from __future__ import annotations

import argparse
import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

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
    "JSON",
    "NODE",
    "NO_CONNECTION",
    "OF_RUN",
    "RUN",
    "STORE",
    "TIMED_OUT",
    "TIMEOUT",
    "WRONG_USAGE",
    "Argument",
    "Command",
    "argument",
    "argument_type",
    "command",
    "duration",
    "flag",
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


Run: TypeAlias = "Callable[[argparse.Namespace], Coroutine[Any, Any, int]]"


def _is_url(word: str) -> bool:
    return "://" in word


@dataclass(frozen=True, slots=True, eq=False)
class Argument:
    """One argument of a subcommand: its names, the heading it stands under, and what else argparse is told of it."""

    names: tuple[str, ...]
    heading: str
    settings: dict[str, Any]


def argument(*names: str, heading: str = "", **settings: Any) -> Argument:
    """Describe an argument, in argparse's words; another argument among these stands for its action."""
    return Argument(names, heading, settings)


def flag(name: str, help: str, **settings: Any) -> Argument:
    """Describe an option that is given or not."""
    return argument(name, action="store_true", help=help, **settings)


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
        limited: Whether `--timeout` limits the whole command; else it limits the time until its first output.
    """

    name: str
    help: str
    run: Run
    arguments: tuple[Argument, ...] = ()
    usage: str | None = None
    means_url: Callable[[str], bool] = _is_url
    takes_command: bool = False
    limited: bool = False

    def describe(self, parser: argparse.ArgumentParser) -> None:
        """Let a parser take its arguments."""
        parser.usage = self.usage
        headings: dict[str, Any] = {"": parser}
        made: dict[Argument, argparse.Action] = {}
        for each in self.arguments:
            if each.heading not in headings:
                headings[each.heading] = parser.add_argument_group(each.heading)
            settings = {
                name: made[value] if isinstance(value, Argument) else value for name, value in each.settings.items()
            }
            made[each] = headings[each.heading].add_argument(*each.names, **settings)

    @property
    def takes_url(self) -> bool:
        """Whether it has an argument URL, which may be left out where RDZV_URL is set."""
        return any(each.names == ("url",) for each in self.arguments)


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


TIMEOUT: Final = argument(
    "--timeout",
    type=duration,
    default=ANSWER_WITHIN,
    metavar="SECONDS",
    help="seconds the command may take; if it runs until stopped, until its first output (default: %(default)g)",
)
RUN: Final = (argument("url", metavar="URL", help="scheme://host[:port]/run_id[?parameters]"), TIMEOUT)
STORE: Final = (argument("url", metavar="URL", help="scheme://host[:port][/run_id][?parameters]"), TIMEOUT)
JSON: Final = flag("--json", "as one JSON object")
NODE: Final = argument("node", metavar="NODE", help="the node's id")
