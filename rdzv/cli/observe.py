"""Shell: the subcommands that look at a run and change nothing: status, history, timeline.

They need no `min_nodes`, and never host a store: with nobody listening there is nothing to look at.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Final

import anyio

from rdzv._version import __version__
from rdzv.backends.builtin import connect
from rdzv.cli.command import DONE, FAILED, Command, add_run
from rdzv.cli.runs import open_store, usages
from rdzv.config.endpoint import split_url
from rdzv.config.resizing import describe_size
from rdzv.core.history import describe, timeline
from rdzv.core.keys import Keys
from rdzv.core.named import named
from rdzv.core.report import report
from rdzv.errors import RendezvousSettingsError
from rdzv.node.handler import Handler
from store.net.address import host_and_port
from store.printable import first_of, printable

if TYPE_CHECKING:
    import argparse

    from rdzv.core.history import Chapter
    from rdzv.core.state import RunStatus

__all__ = ["COMMANDS"]

RUNS_NAMED_MOST: Final = 10  # where a run is not found; `rdzv runs` lists them all

REFUSED_NAMED_MOST = 4  # nodes that are kept out for the same reason


def _add_status_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--watch", action="store_true", help="again at every change, until the run is closed")


async def _status(options: argparse.Namespace) -> int:
    show = _as_json if options.json else _describe
    if not options.watch and not await _exists(options):
        return FAILED
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


async def _exists(options: argparse.Namespace) -> bool:
    """Return whether the store holds anything of the run; if not, say so, and which runs there are."""
    if not split_url(options.url).run_id:
        return True  # `connect` says what is wrong with the URL
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        if await client.count(Keys(settings.prefix, settings.run_id).root):
            return True
        runs = sorted(usage.run_id for usage in await usages(client, settings.prefix))
    there = f"it has {first_of(runs, RUNS_NAMED_MOST)}" if runs else f"it has none under {settings.prefix}"
    sys.stderr.write(printable(f"rdzv status: the store has no run {settings.run_id}; {there}") + "\n")
    return False


def _as_json(status: RunStatus) -> str:
    return json.dumps(report(status))


def _describe(status: RunStatus) -> str:
    lines = [f"run {status.run_id}: {status.phase.value}: {status.reason}"]
    if status.round is not None and status.bootstrap_address is not None:
        where = host_and_port(*status.bootstrap_address)
        lines.append(f"round {status.round}: world size {status.world_size}, rank 0 at {where}")
    lines.extend(f"  rank {member.rank:>4}  {member.node_id}  {member.address}" for member in status.members)
    at = status.addresses.get
    lines.extend(
        f"  {'spare' if node_id in status.spares else 'waiting':>9}  {named(node_id, at(node_id))}"
        for node_id in status.waiting
    )
    lines.extend(f"    missing  {named(node_id, at(node_id))}: {how}" for node_id, how in status.missing.items())
    for node_id, (seconds_left, reason) in status.draining.items():
        lines.append(f"   draining  {node_id}: leaves within {seconds_left:.0f} s{f': {reason}' if reason else ''}")
    if status.resized is not None:
        size = describe_size(status.resized.min_nodes, status.resized.max_nodes)
        why = f": {status.resized.reason}" if status.resized.reason else ""
        lines.append(f"    resized  to {size} from the next round on, by {status.resized.by}{why}")
    by_reason: dict[str, list[str]] = {}
    for node_id, reason in status.refused.items():
        by_reason.setdefault(reason, []).append(node_id)
    lines.extend(
        f"    refused  {first_of(node_ids, REFUSED_NAMED_MOST)}: {reason}" for reason, node_ids in by_reason.items()
    )
    if len(status.releases) > 1 or (status.releases and __version__ not in status.releases):
        counts = sorted(status.releases.items())
        lines.append("releases: " + ", ".join(f"{count} nodes of {release}" for release, count in counts))
    coordinator = status.coordinator
    lines.append(f"coordinator: {named(coordinator, at(coordinator)) if coordinator else 'none'}")
    return "\n".join(map(printable, lines))


async def _history(options: argparse.Namespace) -> int:
    run_id, chapters = await _chapters(options)
    lines = describe(chapters) or [f"run {run_id}: no round has completed, as far as is remembered"]
    print("\n".join(map(printable, lines)))
    return DONE


def _add_timeline_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        *("-o", "--output"),
        required=True,
        metavar="FILE",
        help="where to; - is standard output. ui.perfetto.dev opens it",
    )


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


COMMANDS = (
    Command(
        name="status",
        help="show how a run stands, and what it waits for",
        run=_status,
        add_arguments=_add_status_arguments,
        takes_url=True,
        limited=True,
    ),
    Command(
        name="history",
        help="tell what happened in a run, round by round",
        run=_history,
        add_arguments=add_run,
        takes_url=True,
        limited=True,
    ),
    Command(
        name="timeline",
        help="write what happened in a run as a Chrome trace",
        run=_timeline,
        add_arguments=_add_timeline_arguments,
        takes_url=True,
        limited=True,
    ),
)
