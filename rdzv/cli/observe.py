"""Shell: the subcommands that look at a run and change nothing: status, history, timeline.

They need no `min_nodes`, and never host a store: with nobody listening there is nothing to look at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import anyio

from rdzv._version import __version__
from rdzv.backends.builtin import connect
from rdzv.cli.command import DONE, Command, add_run
from rdzv.core.history import describe, timeline
from rdzv.core.state import Participant, RunStatus
from rdzv.errors import RendezvousSettingsError
from rdzv.node.handler import Handler
from store.net.address import host_and_port
from store.printable import printable

if TYPE_CHECKING:
    import argparse

    from rdzv.core.history import Chapter

__all__ = ["COMMANDS"]

REFUSED_NAMED_MOST = 4  # nodes that are kept out for the same reason


def _add_status_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--watch", action="store_true", help="again at every change, until the run is closed")


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
    fields["releases"] = dict(status.releases)
    return json.dumps(fields, default=plain)


def _describe(status: RunStatus) -> str:
    lines = [f"run {status.run_id}: {status.phase.value}: {status.reason}"]
    if status.round is not None and status.bootstrap_address is not None:
        where = host_and_port(*status.bootstrap_address)
        lines.append(f"round {status.round}: world size {status.world_size}, rank 0 at {where}")
    lines.extend(f"  rank {member.rank:>4}  {member.node_id}  {member.address}" for member in status.members)
    lines.extend(f"  {'spare' if node_id in status.spares else 'waiting':>9}  {node_id}" for node_id in status.waiting)
    by_reason: dict[str, list[str]] = {}
    for node_id, reason in status.refused.items():
        by_reason.setdefault(reason, []).append(node_id)
    for reason, node_ids in by_reason.items():
        more = f" and {len(node_ids) - REFUSED_NAMED_MOST} more" if len(node_ids) > REFUSED_NAMED_MOST else ""
        lines.append(f"    refused  {', '.join(node_ids[:REFUSED_NAMED_MOST])}{more}: {reason}")
    if len(status.releases) > 1 or (status.releases and __version__ not in status.releases):
        counts = sorted(status.releases.items())
        lines.append("releases: " + ", ".join(f"{count} nodes of {release}" for release, count in counts))
    lines.append(f"coordinator: {status.coordinator or 'none'}")
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
    ),
    Command(
        name="history",
        help="tell what happened in a run, round by round",
        run=_history,
        add_arguments=add_run,
        takes_url=True,
    ),
    Command(
        name="timeline",
        help="write what happened in a run as a Chrome trace",
        run=_timeline,
        add_arguments=_add_timeline_arguments,
        takes_url=True,
    ),
)
