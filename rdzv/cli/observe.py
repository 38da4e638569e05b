"""Shell: the subcommands that look at a run and change nothing: status, history, timeline.

They need no `min_nodes`, and never host a store: with nobody listening there is nothing to look at.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import anyio

from rdzv.backends.builtin import connect
from rdzv.cli import top
from rdzv.cli.command import DONE, FAILED, JSON, RUN, argument, command, flag, limited_by_timeout
from rdzv.cli.runs import open_store
from rdzv.config.endpoint import split_url
from rdzv.core.keys import Keys
from rdzv.core.report import report
from rdzv.display.history import as_json, chrome_trace, describe, timeline
from rdzv.display.pages import timeline_page
from rdzv.display.status import describe_health, exceptions, member_lines, summary
from rdzv.errors import RendezvousSettingsError
from rdzv.node.handler import Handler
from rdzv.node.status import run_ids
from store.printable import first_of, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from rdzv.core.history import History
    from rdzv.core.report import RunStatus
    from rdzv.display.history import Account

    Show = Callable[[RunStatus, Account | None, dict[str, Any]], str]

RUNS_NAMED_MOST: Final = 10  # where a run is not found; `rdzv runs` lists them all


@command(
    "status",
    "show how a run stands, and what it waits for",
    *RUN,
    JSON,
    flag("--watch", "again at every change, until the run is closed; on a terminal redrawn in place, as by rdzv top"),
)
async def _status(options: argparse.Namespace) -> int:
    if not options.watch and not await _exists(options):
        return FAILED
    if options.watch and not options.json and sys.stdout.isatty():
        return await top.follow(options)
    show = _as_json if options.json else _describe
    with limited_by_timeout(options.timeout) as answered:
        return await _show(options, show, answered)


async def _show(options: argparse.Namespace, show: Show, answered: Callable[[], None]) -> int:
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        if not isinstance(handler, Handler):
            print(show(await handler.status(), None, {}), flush=True)
        elif options.watch:
            shown = ""
            async with contextlib.aclosing(handler.statuses()) as statuses:
                async for status in statuses:
                    answered()
                    if shown != (shown := show(status, None, {})):
                        print(shown, flush=True)
        else:
            health = await handler.store_health()
            status, _, cost = await top.read(handler)
            print(show(status, cost, health), flush=True)
        return DONE


def _as_json(status: RunStatus, cost: Account | None, health: dict[str, Any]) -> str:
    told = report(status)
    if cost is not None:
        told["cost"] = cost.plain()
    if health:
        told["store"] = health
    return json.dumps(told)


def _describe(status: RunStatus, cost: Account | None, health: dict[str, Any]) -> str:
    lines = [*summary(status), *([str(cost)] if cost is not None and cost.rounds else ())]
    lines += [*exceptions(status), *member_lines(status)]
    if health:
        lines.append(f"store: {describe_health(health)}")
    return "\n".join(map(printable, lines))


async def _exists(options: argparse.Namespace) -> bool:
    """Return whether the store holds anything of the run; if not, say so, and which runs there are."""
    if not split_url(options.url).run_id:
        return True  # `connect` says what is wrong with the URL
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        if await client.count(Keys(settings.prefix, settings.run_id).root):
            return True
        runs = await run_ids(client, settings.prefix)
    there = f"it has {first_of(runs, RUNS_NAMED_MOST)}" if runs else f"it has none under {settings.prefix}"
    sys.stderr.write(printable(f"rdzv status: the store has no run {settings.run_id}; {there}") + "\n")
    return False


@command("history", "tell what happened in a run, round by round", *RUN, JSON)
async def _history(options: argparse.Namespace) -> int:
    run_id, history, cost = await _told(options)
    if options.json:
        print(json.dumps(as_json(run_id, history, cost)))
        return DONE
    lines = describe(history) or [f"run {run_id}: no round has completed, as far as is remembered"]
    if history.chapters:
        lines.append(str(cost))
    print("\n".join(map(printable, lines)))
    return DONE


@command(
    "timeline",
    "write what happened in a run as a page for a browser, or as a Chrome trace",
    *RUN,
    argument(
        *("-o", "--output"),
        required=True,
        metavar="FILE",
        help="where to: a page for a browser, or, if it ends with .json, a Chrome trace, which ui.perfetto.dev opens; "
        "- is standard output",
    ),
)
async def _timeline(options: argparse.Namespace) -> int:
    run_id, history, cost = await _told(options)
    shown = timeline(run_id, history, now=time.time())
    as_trace = options.output.endswith(".json")
    text = json.dumps(chrome_trace(shown)) if as_trace else timeline_page(shown, cost)
    if options.output == "-":
        print(text)
    else:
        await anyio.Path(options.output).write_text(text + "\n", encoding="utf-8")
    return DONE


async def _told(options: argparse.Namespace) -> tuple[str, History, Account]:
    """Read the history of a run, and what it has cost until now."""
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        if not isinstance(handler, Handler):
            raise RendezvousSettingsError(f"the backend of {handler.run_id} keeps no history")
        return handler.run_id, *await top.cost_of(handler)
