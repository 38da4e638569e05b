"""The `rdzv` command: the table of its subcommands, exit statuses, and one line per error.

Each subcommand is described in a room of its own, in the words of `rdzv.cli.command`; nothing is decided here.
`rdzv run` ends with its command's own status, and says 120 to 124 for the statuses 1 to 5.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Final, NoReturn

import store
from rdzv import logs
from rdzv._version import __version__
from rdzv.cli import data, demo, doctor, observe, operate, run, runs, serve, stacks, token, top
from rdzv.cli.command import CLOSED, DONE, FAILED, NO_CONNECTION, TIMED_OUT, WRONG_USAGE, limited_by_timeout
from rdzv.cli.launcher import slurm
from rdzv.cli.rehearsal import chaos
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousSettingsError,
    RendezvousTimeoutError,
)
from store.connecting import is_etcd
from store.net.threads import loop_factory
from store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.cli.command import Command

__all__ = ["COMMANDS", "main"]

ERROR_LETTERS_MOST: Final = 4000  # of a line that says what went wrong
ROOMS: Final = (demo, serve, run, observe, top, doctor, operate, stacks, chaos, runs, data, token)
"""Where subcommands are described, in the order in which `rdzv --help` lists them."""

COMMANDS: Final[dict[str, Command]] = {command.name: command for room in ROOMS for command in room.COMMANDS}

OF_RUN: Final = 119
"""What is added to an exit status of ours under `rdzv run`: commands seldom end with 120 to 124 themselves."""

LOG_FORMAT: Final = "--log-format"
DEFAULT_URL: Final = "RDZV_URL"
"""The environment variable with the URL for subcommands that are given none. `rdzv run` sets it for its processes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options is None:
        _parser().print_help()
        return DONE
    level = logging.DEBUG if options.debug else logging.INFO if options.verbose else logging.WARNING
    logs.configure(level, as_json=options.log_format == "json")
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_run(COMMANDS[options.command], options))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has enough of it, and of what is still to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (RendezvousError, store.StoreError, OSError, ValueError, ImportError) as error:
        if options.debug:
            traceback.print_exc()
        sys.stderr.write(f"rdzv {options.command}: {printable(str(error), most=ERROR_LETTERS_MOST)}\n")
        return _status_of(error) + (OF_RUN if COMMANDS[options.command].takes_command else 0)


async def _run(command: Command, options: argparse.Namespace) -> int:
    """Run a subcommand, within its `--timeout`; one that goes on for long takes care of that itself."""
    if command.takes_url and is_etcd(options.url):
        # Importing gRPC takes longer than a short `--timeout`, and says nothing of the store.
        importlib.import_module("store.etcd.client")
    if not command.limited or getattr(options, "watch", False):
        return await command.run(options)
    with limited_by_timeout(options.timeout):
        return await command.run(options)


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


# ------------------------------------------------------------------------------------------------ the command line


def _parse(arguments: Sequence[str]) -> argparse.Namespace | None:
    """Read the command line; None if it only asks for help."""
    flags, words = _without_flags(arguments)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words and not flags:
        return None
    command = COMMANDS.get(words[0]) if words else None
    if command is None:
        return _parser().parse_args([*flags, *words])
    if not command.takes_command:
        return _parser().parse_args([*flags, *_with_default_url(command, words)])
    # What comes after "--" is a command of the user's, and nothing in it is an option of ours.
    split = words.index("--") if "--" in words else len(words)
    ours, theirs = words[:split], tuple(words[split + 1 :])
    try:
        return _parser().parse_args([*flags, *_with_default_url(command, ours)], argparse.Namespace(words=theirs))
    except SystemExit as leaving:  # with the help, or with what is wrong
        raise SystemExit(OF_RUN + WRONG_USAGE if leaving.code else DONE) from None


def _without_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the options that stand before the subcommand."""
    count = 0
    while count < len(arguments) and arguments[count].startswith("-"):
        count += 2 if arguments[count] == LOG_FORMAT else 1  # its value follows
    return list(arguments[:count]), list(arguments[count:])


def _with_default_url(command: Command, words: list[str]) -> list[str]:
    """Add the URL from the environment if a subcommand needs one and is given none.

    argparse's own way to leave an argument out, `nargs="?"`, does not do: Python 3.11 then takes the URL as left out
    as soon as an option comes before it.
    """
    url = os.environ.get(DEFAULT_URL)
    if not command.takes_url or not url or any("://" in word or slurm.is_meant_by(word) for word in words):
        return words
    return [words[0], url, *words[1:]]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all our errors are; argparse would put the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rdzv",
        description="Rendezvous for elastic training jobs: who is in, with what rank, and meeting again.",
        epilog=f"Where URL is left out, {DEFAULT_URL} is taken from the environment. rdzv help COMMAND says more.",
    )
    parser.add_argument("--version", action="version", version=f"rdzv {__version__}")
    _add_flags(parser, default=False)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        sub = subparsers.add_parser(
            command.name, help=command.help, description=command.help[0].upper() + command.help[1:] + "."
        )
        _add_flags(sub, default=argparse.SUPPRESS)  # left out here, what was said before the subcommand holds
        command.add_arguments(sub)
    return parser


def _add_flags(parser: argparse.ArgumentParser, *, default: object) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", default=default, help="log what happens")
    parser.add_argument(
        "--debug", action="store_true", default=default, help="log everything, and show tracebacks of errors"
    )
    parser.add_argument(
        LOG_FORMAT,
        choices=("text", "json"),
        default=default or "text",
        help="text, or a JSON object per line, with run, round and node as fields (default: text)",
    )
