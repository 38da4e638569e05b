"""The `rdzv` command: argparse, exit statuses, and one line per error.

    0 done    1 failed    2 wrong usage    3 closed    4 timed out    5 no connection

`rdzv run` ends with its command's own status, and says 120 to 124 for 1 to 5.

Everything it does is the library's; nothing is decided here. Commands that only look at a run, or close it, need no
`min_nodes`, and never host a store: with nobody listening there is nothing to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NoReturn

import anyio

import store
from rdzv.backends.builtin import Credentials, connect
from rdzv.cli import demo, serve
from rdzv.cli import run as launcher
from rdzv.config.endpoint import split_url
from rdzv.config.settings import parse
from rdzv.core.history import describe, timeline
from rdzv.core.state import Participant, RunStatus
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousSettingsError,
    RendezvousTimeoutError,
)
from rdzv.node.handler import Handler
from store.net.address import host_and_port
from store.net.threads import loop_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from rdzv.core.history import Chapter

__all__ = ["main"]

DONE, FAILED, WRONG_USAGE, CLOSED, TIMED_OUT, NO_CONNECTION = range(6)

DURATION_MAX = 1e9  # seconds, 31 years: what event loops still take
OF_RUN = 119  # what is added to the above for `rdzv run`: commands that fail seldom end with 120 to 124 themselves

LOOK_WITHIN = 10.0  # seconds in which a store must answer somebody who only looks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.debug else logging.INFO if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            status: int = runner.run(options.run(options))
            return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has enough of it, and of what is still to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (RendezvousError, store.StoreError, OSError, ValueError, ImportError) as error:
        if options.debug:
            traceback.print_exc()
        sys.stderr.write(f"rdzv {options.command}: {error}\n")
        return _status_of(error) + (OF_RUN if options.command == "run" else 0)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for. What comes after "--" is the command of `rdzv run`, and none of our business."""
    if arguments[:1] != ["run"]:
        return _parser().parse_args(arguments)
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    try:
        return _parser().parse_args(arguments[:split], argparse.Namespace(words=tuple(arguments[split + 1 :])))
    except SystemExit as leaving:  # with the help, or with what is wrong
        raise SystemExit(OF_RUN + WRONG_USAGE if leaving.code else DONE) from None


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


def _version() -> str:
    try:
        return version("rdzv")
    except PackageNotFoundError:  # a checkout on the path
        return "(not installed)"


class _Parser(argparse.ArgumentParser):
    """Its errors are one line, as all of ours; argparse would put the usage before it, which may be twenty."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rdzv", description="Rendezvous for elastic training jobs: who is in, with what rank, and meeting again."
    )
    parser.add_argument("--version", action="version", version=f"rdzv {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], Coroutine[Any, Any, int]], help: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run)
        sub.add_argument("-v", "--verbose", action="store_true", help="log what happens")
        sub.add_argument("--debug", action="store_true", help="log everything, and show tracebacks")
        return sub

    command("demo", _demo, "an elastic run on this machine: join, kill, regroup, grow, close")

    sub = command("serve", _serve, "serve a store that outlives the nodes of its runs")
    serve.add_arguments(sub)

    sub = command("run", _run, "run a command under rendezvous, and again whenever the nodes change")
    sub.usage = "rdzv run [options] URL -- COMMAND ..."
    sub.add_argument("url", metavar="URL", help="scheme://host[:port]/run_id?min_nodes=2, say")
    sub.add_argument(
        "--max-restarts", type=_whole(0), default=0, metavar="N", help="after failures here (default: %(default)s)"
    )
    sub.add_argument("--nproc", type=_whole(1), default=1, metavar="N", help="processes here (default: %(default)s)")
    sub.add_argument(
        "--grace",
        type=_duration,
        default=10.0,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL (default: %(default)s)",
    )
    sub.add_argument(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="pass output through, without the rank before each line",
    )

    sub = _looking_at_a_run(command("status", _status, "show how a run stands, and what it waits for"))
    sub.add_argument("--json", action="store_true", help="as one JSON object")
    sub.add_argument("--watch", action="store_true", help="again at every change, until the run is closed")

    _looking_at_a_run(command("history", _history, "tell what happened in a run, round by round"))

    sub = _looking_at_a_run(command("timeline", _timeline, "write what happened in a run as a Chrome trace"))
    sub.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="where to; - is standard output. ui.perfetto.dev opens it"
    )

    sub = _looking_at_a_run(command("close", _close, "close a run for all its nodes"))
    sub.add_argument("--reason", default="", help="why; every node is told")

    sub = _looking_at_a_run(command("ban", _ban, "keep a node out of a run"))
    sub.add_argument("node", metavar="NODE", help="the node's id")
    sub.add_argument("--reason", default="", help="why; the node is told")
    sub.add_argument("--now", action="store_true", help="put it out of its round at once, not only of the next one")

    sub = _looking_at_a_run(command("unban", _unban, "let a banned node come again"))
    sub.add_argument("node", metavar="NODE", help="the node's id")

    sub = command("ping", _ping, "measure how quickly a store answers")
    sub.add_argument("url", metavar="URL", help="scheme://host[:port][/run_id][?parameters]")
    sub.add_argument("--count", type=_whole(1), metavar="N", default=5, help="how often (default: %(default)s)")
    _within(sub)
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return read


def _duration(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= DURATION_MAX:  # false for NaN, too
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to {DURATION_MAX:.0f} seconds")
    return seconds


def _looking_at_a_run(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
    sub.add_argument("url", metavar="URL", help="scheme://host[:port]/run_id[?parameters]")
    return _within(sub)


def _within(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
    sub.add_argument(
        "--timeout",
        type=_duration,
        default=LOOK_WITHIN,
        metavar="SECONDS",
        help="how long the store may take to answer (default: %(default)g)",
    )
    return sub


async def _demo(_: argparse.Namespace) -> int:
    return DONE if await demo.run(print) else FAILED


async def _run(options: argparse.Namespace) -> int:
    if not options.words:
        raise RendezvousSettingsError("there is no command; write it at the end, after --")
    job = launcher.Job(
        url=options.url,
        command=options.words,
        nproc=options.nproc,
        max_restarts=options.max_restarts,
        grace=options.grace,
        prefix=options.prefix,
    )
    return await launcher.run(job)


async def _serve(options: argparse.Namespace) -> int:
    await serve.serve(options)
    return DONE


# ---------------------------------------------------------------------------------------------------- looking


async def _status(options: argparse.Namespace) -> int:
    show = _as_json if options.json else _describe
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        if options.watch and isinstance(handler, Handler):
            shown = ""
            async with contextlib.aclosing(handler.statuses()) as statuses:
                async for status in statuses:
                    if shown != (shown := show(status)):
                        print(shown, flush=True)
        else:
            print(show(await handler.status()), flush=True)
        return DONE


def _as_json(status: RunStatus) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, Participant):
            return {
                "node_id": value.node_id,
                "rank": value.rank,
                "address": value.address,
                "payload": value.payload,
                "attributes": dict(value.attributes),
            }
        return repr(value)

    fields = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
    fields["phase"] = status.phase.value
    fields["refused"] = dict(status.refused)
    return json.dumps(fields, default=plain)


def _describe(status: RunStatus) -> str:
    lines = [f"run {status.run_id}: {status.phase.value}: {status.reason}"]
    if status.round is not None and status.bootstrap_address is not None:
        where = host_and_port(*status.bootstrap_address)
        lines.append(f"round {status.round}: world size {status.world_size}, rank 0 at {where}")
    lines.extend(f"  rank {member.rank:>4}  {member.node_id}  {member.address}" for member in status.members)
    lines.extend(f"  {'spare' if node_id in status.spares else 'waiting':>9}  {node_id}" for node_id in status.waiting)
    lines.extend(f"    refused  {node_id}: {reason}" for node_id, reason in status.refused.items())
    lines.append(f"coordinator: {status.coordinator or 'none'}")
    return "\n".join(lines)


async def _history(options: argparse.Namespace) -> int:
    run_id, chapters = await _chapters(options)
    print("\n".join(describe(chapters) or [f"run {run_id}: no round has completed, as far as is remembered"]))
    return DONE


async def _timeline(options: argparse.Namespace) -> int:
    run_id, chapters = await _chapters(options)
    text = json.dumps(timeline(run_id, chapters))
    if options.output == "-":
        print(text)
    else:
        await anyio.Path(options.output).write_text(text + "\n", encoding="utf-8")
    return DONE


async def _chapters(options: argparse.Namespace) -> tuple[str, list[Chapter]]:
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        if not isinstance(handler, Handler):
            raise RendezvousSettingsError(f"the backend of {handler.run_id} keeps no history")
        return handler.run_id, await handler.history()


async def _close(options: argparse.Namespace) -> int:
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        await handler.set_closed(options.reason)
        shown = (await handler.status()).closed if isinstance(handler, Handler) else options.reason
        before = "" if shown == options.reason else f", and was before: {shown or 'no reason was given'}"
        print(f"run {handler.run_id} is closed{before}")
    return DONE


async def _ban(options: argparse.Namespace) -> int:
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        await handler.ban(options.node, options.reason, now=options.now)
        print(f"node {options.node} is banned from run {handler.run_id}")
    return DONE


async def _unban(options: argparse.Namespace) -> int:
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        await handler.unban(options.node)
        print(f"node {options.node} may come again to run {handler.run_id}")
    return DONE


async def _ping(options: argparse.Namespace) -> int:
    url = options.url
    if not split_url(url).run_id:  # a store answers without one
        where, question_mark, parameters = url.partition("?")
        url = f"{where.rstrip('/')}/ping{question_mark}{parameters}"
    settings = parse(url, {}, os.environ)
    credentials = Credentials.of(settings)
    connecting = store.connect(
        settings.endpoint.url,
        token=credentials.token,
        tls=credentials.client_tls(),
        user=settings.user,
        password=credentials.password,
        timeout=options.timeout,
    )
    async with connecting as client:
        for _ in range(options.count):
            seconds = await client.ping()
            print(f"{settings.endpoint.url} answers in {seconds * 1000:.3f} ms", flush=True)
    return DONE
