"""Shell: the subcommands that change a run: close, reopen, ban, unban, drain, resize, lost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rdzv.backends.asking import tell_lost
from rdzv.backends.credentials import Credentials
from rdzv.cli.command import DONE, NAMED_MOST, NODE, RUN, argument, command, duration, flag, option, say, whole_number
from rdzv.cli.reach import open_run, settings_of
from rdzv.config.resizing import describe_size
from rdzv.errors import RendezvousSettingsError, RendezvousStateError
from rdzv.node.link.wakeup import Wakeup
from rdzv.node.run.status import read_nodes
from store.printable import first_of, in_words

if TYPE_CHECKING:
    from rdzv.node.run.run import Run


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be an attribute and its value: rack=17")
    return name, value


REASON = argument("--reason", default="", help="why; whom it concerns is told")
WHERE = "--where ATTRIBUTE=VALUE"
NODE_OR_WHERE = argument(*NODE.names, **NODE.settings, nargs="?")


def _check_who_is_meant(options: argparse.Namespace) -> None:
    if (options.node is None) == (options.where is None):
        raise RendezvousSettingsError("name a NODE, or give --where ATTRIBUTE=VALUE")


@command(
    "close",
    "close a run for all its nodes",
    *RUN,
    REASON,
    flag("--create", "also a run that no node has come to; none will get in"),
)
async def _close(options: argparse.Namespace) -> int:
    async with open_run(options, follow=Wakeup(), must_exist=not options.create) as run:
        closed = await run.close(options.reason)
        _, history, cost = await run.account()
    before = "" if closed.reason == options.reason else f", and was before: {closed.reason or 'no reason was given'}"
    say(f"run {run.run_id} is closed{before}", *([str(cost)] if history.chapters else []))
    return DONE


@command(
    "lost",
    "say that a host of the store is dead, so that the next one serves",
    *RUN,
    argument("host", metavar="HOST", help="the host, as in the URL; if it is still at work, two runs go on"),
)
async def _lost(options: argparse.Namespace) -> int:
    settings = settings_of(options.url)
    said = await tell_lost(settings, Credentials(settings), options.host)
    say(said, "if that host is at work after all, two runs go on now: end one of them")
    return DONE


@command("reopen", "open a run again that was closed, so that nodes may join it", *RUN)
async def _reopen(options: argparse.Namespace) -> int:
    async with open_run(options) as run:
        closed = await run.reopen()
    if closed is None:
        raise RendezvousStateError(f"run {run.run_id} is not closed; there is nothing to open")
    by, why = f" by {closed.by}" if closed.by else "", f": {closed.reason}" if closed.reason else ""
    say(f"run {run.run_id} is open again; it was closed{by}{why}")
    return DONE


@command(
    "ban",
    "keep a node out of a run",
    *RUN,
    NODE_OR_WHERE,
    option(WHERE, _attribute, "instead of NODE: all nodes with this attribute, also those that come later"),
    REASON,
    flag("--now", "put it out of its round at once, not only of the next one"),
    option("--for SECONDS", duration, "for how long, say 10m (default: until unban)", dest="lasts"),
)
async def _ban(options: argparse.Namespace) -> int:
    _check_who_is_meant(options)
    span = "" if options.lasts is None else f" for {in_words(options.lasts)}"
    async with open_run(options) as run:
        here = await run.ban(
            options.node or "", options.reason, where=options.where, now=options.now, lasts=options.lasts
        )
        if options.where is None:
            say(f"node {options.node} is banned from run {run.run_id}{span}")
            return DONE
        name, value = options.where
        who = f"now {first_of(here, NAMED_MOST)}" if here else await _no_such_node(run, name)
    say(f"nodes with {name}={value} are banned from run {run.run_id}{span}: {who}")
    return DONE


async def _no_such_node(run: Run, name: str) -> str:
    """Say that the ban concerns no present node, and list this attribute's values, as the value may be mistyped."""
    records = (await read_nodes(run.store, run.keys)).values()
    there = sorted({str(record.attributes[name]) for record in records if name in record.attributes})
    has = f"its nodes have {first_of(there, NAMED_MOST)}" if there else f"none of its nodes has any {name}"
    return f"only nodes that come later; {has}"


@command(
    "unban",
    "let a banned node come again",
    *RUN,
    NODE_OR_WHERE,
    option(WHERE, _attribute, "instead of NODE: what has banned all nodes with this attribute"),
    argument("--reason", default="", help="why; the history says it"),
)
async def _unban(options: argparse.Namespace) -> int:
    _check_who_is_meant(options)
    async with open_run(options) as run:
        was_banned = await run.unban(options.node or "", options.reason, where=options.where)
    who = f"node {options.node}" if options.where is None else f"nodes with {'='.join(options.where)}"
    if not was_banned:
        raise RendezvousStateError(f"there is no ban of {who} in run {run.run_id}; rdzv status shows those there are")
    say(f"{who} may come again to run {run.run_id}")
    return DONE


@command(
    "drain",
    "let a node leave at a step that all members agree on",
    *RUN,
    NODE,
    REASON,
    option("--within --in SECONDS", duration, "from now; then it leaves, wherever the others are", default=120.0),
)
async def _drain(options: argparse.Namespace) -> int:
    async with open_run(options) as run:
        await run.drain(options.node, options.within, options.reason)
    say(f"node {options.node} is to leave run {run.run_id} within {options.within:g} s")
    return DONE


@command(
    "resize",
    "give a run another minimum or maximum of nodes while it lives",
    *RUN,
    option("--min N", whole_number(1), "the fewest nodes of a round; not given: as it is"),
    option("--max N", whole_number(1), "the most nodes of a round; not given: as it is"),
    REASON,
)
async def _resize(options: argparse.Namespace) -> int:
    if options.min is None and options.max is None:
        raise RendezvousSettingsError("give --min, --max or both")
    async with open_run(options) as run:
        resized = await run.resize(options.min, options.max, reason=options.reason)
    size = describe_size(resized.min_nodes, resized.max_nodes)
    say(f"run {run.run_id} is resized to {size}, from its next round on")
    return DONE
