"""The `rdzv` command: the table of subcommands, whose modules are imported when needed, and the parser."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import signal
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NoReturn

from rdzv._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rdzv.cli.command import Command

GROUPS: Final = {
    "begin": {"run": "run", "serve": "serve", "demo": "demo", "token": "data"},
    "look": {"status": "look", "doctor": "doctor", "history": "look", "timeline": "look", "stacks": "operate"},
    "steer a run": {
        **dict.fromkeys(("drain", "resize", "close", "reopen", "ban", "unban", "lost"), "operate"),
        "forget": "runs",
        "chaos": "operate",
    },
    "keep a store": {
        **dict.fromkeys(("ping", "runs", "stats"), "runs"),
        **dict.fromkeys(("check", "backup", "restore"), "data"),
    },
}
"""The groups of `rdzv --help`, in its order, with the module of each subcommand."""

ROOMS: Final = {name: room for group in GROUPS.values() for name, room in group.items()}

MEANT: Final = (
    {name: name for name in ROOMS}
    | {"list": "runs", "ls": "runs", "get": "status", "watch": "status --watch", "nodes": "status", "health": "ping"}
    | {"scale": "resize", "cordon": "ban", "kick": "ban", "uncordon": "unban", "remove": "drain", "evict": "drain"}
    | {"kill": "close", "stop": "close", "delete": "forget", "rm": "forget", "logs": "history", "events": "history"}
    | {"launch": "run", "start": "serve", "server": "serve", "snapshot": "backup", "info": "stats", "dump": "stacks"}
)
"""The subcommand that an unknown word may mean. Users of etcdctl and kubectl know other words than `rdzv` has."""

WRONG_USAGE: Final = 2
INTERRUPTED: Final = 128 + signal.SIGINT
OF_ALL: Final = frozenset({"--version", "--help", "-h"})  # options that need no subcommand
EVERYWHERE: Final = frozenset({"-v", "--verbose", "--debug"})  # options that may precede or follow a subcommand
DEFAULT_URL: Final = "RDZV_URL"  # the environment variable with the default URL; `rdzv run` sets it for its processes


def command_named(name: str) -> Command:
    """Import and return a subcommand."""
    kind = _import_cli_module("command").Command
    there: list[Command] = [each for each in vars(_import_cli_module(ROOMS[name])).values() if isinstance(each, kind)]
    return {command.name: command for command in there}[name]


def _import_cli_module(name: str) -> Any:
    return importlib.import_module(f"rdzv.cli.{name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    if "_ARGCOMPLETE" in os.environ:
        _complete_for_shell()
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        if options is None:
            _overview_parser(ROOMS).print_help()
            return 0
        status: int = _import_cli_module("command").run_command(command_named(options.command), options)
        return status
    except KeyboardInterrupt:
        return INTERRUPTED


def _parse(arguments: Sequence[str]) -> argparse.Namespace | None:
    count = next((at for at, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    flags, words = list(arguments[:count]), list(arguments[count:])
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if words[:1] == ["top"]:
        words = ["status", "--watch", *words[1:]]
    if not words and not flags:
        return None
    if unknown := [flag for flag in flags if flag not in OF_ALL | EVERYWHERE]:
        _overview_parser(()).error(f"there is no option {unknown[0][:80]!r}")
    if words and words[0] not in ROOMS and not OF_ALL & {*flags, words[0]}:
        meant = "".join(f", did you mean {MEANT[near]}?" for near in difflib.get_close_matches(words[0], MEANT, 1))
        _overview_parser(()).error(f"{words[0][:80]!r} is no command{meant or ' of rdzv'}")
    if not words or words[0] not in ROOMS or OF_ALL & set(flags):
        return _overview_parser(() if "--version" in flags else ROOMS).parse_args([*flags, *words])
    command, words = command_named(words[0]), words[1:]
    # The user's command follows after "--": its options are not parsed here.
    split = words.index("--") if command.takes_command and "--" in words else len(words)
    known = argparse.Namespace(command=command.name, words=tuple(words[split + 1 :]))
    try:
        # `parse_args` would miss an optional positional argument that follows an option.
        return parser_of(command).parse_intermixed_args([*flags, *_insert_default_url(command, words[:split])], known)
    except SystemExit as leaving:  # argparse exits after help or an error
        raise SystemExit(command.exit_status_offset + WRONG_USAGE if leaving.code else 0) from None


def _insert_default_url(command: Command, words: list[str]) -> list[str]:
    url = os.environ.get(DEFAULT_URL)
    if not command.takes_url or not url:
        return words
    inner = command.takes_command and "RDZV_ROUND" in os.environ
    # Skip the values of options: the value of `--reason` may contain a URL.
    valued = {name for each in command.arguments if "action" not in each.settings for name in each.names}
    own = (word for before, word in pairwise(["", *words]) if before not in valued and not word.startswith("-"))
    if any(map(command.means_url, own)):
        return words
    if inner:
        parser_of(command).error(
            f"{DEFAULT_URL} is the run of the rdzv run that has started this process, which would be its spare; "
            f"give a URL"
        )
    return [url, *words]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"{self.prog}: {message}{self._hint_for(message)}; see {self.prog} --help\n")

    def _hint_for(self, message: str) -> str:
        words = message.partition("unrecognized arguments: ")[2].split()
        if not words:
            return ""
        if near := difflib.get_close_matches(words[0].partition("=")[0], self._option_string_actions, 1):
            return f"; did you mean {near[0]}?"
        name = words[0].lstrip("-").partition("=")[0].replace("-", "_")
        if words[0].startswith("--") and name in importlib.import_module("rdzv.config.settings").PARAMETERS:
            return f"; {name} is a parameter: put it into the URL (tcp://head:29400/job-7?{name}=...)"
        return "; the command comes after --: rdzv run URL -- COMMAND" if self.prog == "rdzv run" else ""


def _overview_parser(names: Iterable[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rdzv",
        usage="rdzv [-h] [--version] [-v] [--debug] COMMAND ...",
        description="Rendezvous for elastic training jobs: who is in, with what rank, and meeting again.",
        epilog=f"Where URL is left out, {DEFAULT_URL} is taken from the environment. rdzv help COMMAND says more.",
    )
    parser.add_argument("--version", action="version", version=f"rdzv {__version__}")
    _add_common_flags(parser)
    parser.add_argument("command", metavar="COMMAND", help="one of these; each group begins with those used most")
    for title, group in GROUPS.items():
        listed = parser.add_argument_group(title)
        for command in map(command_named, (name for name in group if name in names)):
            listed.add_argument(f"  {command.name}", nargs="?", help=command.help)
    return parser


def parser_of(command: Command) -> _Parser:
    """Return a subcommand's parser."""
    description = f"{command.help[0].upper()}{command.help[1:]}."
    parser = _Parser(prog=f"rdzv {command.name}", usage=command.usage, description=description)
    _add_common_flags(parser)
    for each in command.arguments:
        parser.add_argument(*each.names, **each.settings)
    return parser


def _complete_for_shell() -> None:
    """Complete a command line for a shell and exit, for `eval "$(register-python-argcomplete rdzv)"`."""
    parser = _Parser(prog="rdzv")
    subparsers = parser.add_subparsers()
    for command in map(command_named, ROOMS):
        subparsers.add_parser(command.name, parents=[parser_of(command)], add_help=False)
    importlib.import_module("argcomplete").autocomplete(parser)


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens")
    parser.add_argument("--debug", action="store_true", help="log everything, and show tracebacks of errors")
