"""Shell: the subcommands of whoever operates a run or its store: close, reopen, ban, unban, drain, resize, ping.

They need no `min_nodes`, and never host a store.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from rdzv.backends.builtin import connect
from rdzv.cli.command import DONE, NODE, RUN, STORE, Argument, argument, command, duration, flag, whole_number
from rdzv.cli.runs import check_exists, open_store
from rdzv.cli.top import cost_of
from rdzv.config.resizing import describe_size
from rdzv.core.keys import Keys
from rdzv.core.state import Closed
from rdzv.errors import RendezvousSettingsError, RendezvousStateError
from rdzv.node.handler import Handler
from rdzv.node.status import read_nodes
from store import when
from store.printable import first_of, in_words, printable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rdzv.interface import RendezvousHandler

VALUES_NAMED_MOST = NODES_NAMED_MOST = 8


@contextlib.asynccontextmanager
async def _connect(options: argparse.Namespace, *, create: bool = False) -> AsyncIterator[RendezvousHandler]:
    """Connect to a run as somebody who steers it; unless it is to be created, it must be there."""
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        if not create and isinstance(handler, Handler):  # what another backend keeps, we do not know
            await check_exists(options)
        yield handler


REASON = argument("--reason", default="", help="why; whom it concerns is told")


@command(
    "close",
    "close a run for all its nodes",
    *RUN,
    REASON,
    flag("--create", "also a run that no node has come to; none will get in"),
)
async def _close(options: argparse.Namespace) -> int:
    async with _connect(options, create=options.create) as handler:
        await handler.set_closed(options.reason)
        shown = (await handler.status()).closed if isinstance(handler, Handler) else options.reason
        before = "" if shown == options.reason else f", and was before: {shown or 'no reason was given'}"
        print(printable(f"run {handler.run_id} is closed{before}"))
        if isinstance(handler, Handler):
            history, cost = await cost_of(handler)
            if history.chapters:
                print(printable(str(cost)))
    return DONE


@command("reopen", "open a run again that was closed, so that nodes may join it", *RUN)
async def _reopen(options: argparse.Namespace) -> int:
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        keys = Keys(settings.prefix, settings.run_id)
        entry = await client.get(keys.closed)
        if entry is None:
            raise RendezvousStateError(f"run {settings.run_id} is not closed; there is nothing to open")
        closed = Closed.of(entry.value)
        # Not one that somebody has written meanwhile: that closing is another's, who was told that it counts.
        await client.delete(keys.closed, when=(when.mod_revision(keys.closed) == entry.mod_revision,))
        before = (
            f"; it was closed{f' by {closed.by}' if closed.by else ''}{f': {closed.reason}' if closed.reason else ''}"
        )
        print(printable(f"run {settings.run_id} is open again{before}"))
    return DONE


class _InsteadOf(argparse.Action):
    """An option in whose presence a positional argument is not needed.

    Were that optional by `nargs="?"`, argparse would take it for left out as soon as an option stands before it.
    """

    def __init__(self, *, instead_of: argparse.Action, **rest: Any) -> None:
        super().__init__(**rest)
        self._instead_of = instead_of

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: Any, _option: str | None = None) -> None:
        """Note the value."""
        setattr(namespace, self.dest, values)
        self._instead_of.required = False


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be an attribute and its value: rack=17")
    return name, value


def _where(help: str) -> Argument:
    return argument(
        "--where", action=_InsteadOf, instead_of=NODE, type=_attribute, metavar="ATTRIBUTE=VALUE", help=help
    )


def _check_who_is_meant(options: argparse.Namespace) -> None:
    if (options.node is None) == (options.where is None):
        raise RendezvousSettingsError("whom? name a NODE, or give --where ATTRIBUTE=VALUE")


@command(
    "ban",
    "keep a node out of a run",
    *RUN,
    NODE,
    _where("instead of NODE: all nodes with this attribute, also those that come later"),
    REASON,
    flag("--now", "put it out of its round at once, not only of the next one"),
    argument(
        "--for", dest="lasts", type=duration, metavar="SECONDS", help="for how long, say 10m (default: until unban)"
    ),
)
async def _ban(options: argparse.Namespace) -> int:
    _check_who_is_meant(options)
    span = "" if options.lasts is None else f" for {in_words(options.lasts)}"
    async with _connect(options) as handler:
        if options.where is None:
            await handler.ban(options.node, options.reason, now=options.now, lasts=options.lasts)
            print(printable(f"node {options.node} is banned from run {handler.run_id}{span}"))
            return DONE
        name, value = options.where
        here = await handler.ban_where(name, value, options.reason, now=options.now, lasts=options.lasts)
    who = f"now {first_of(here, NODES_NAMED_MOST)}" if here else await _no_such_node(options, name)
    print(printable(f"nodes with {name}={value} are banned from run {handler.run_id}{span}: {who}"))
    return DONE


async def _no_such_node(options: argparse.Namespace, name: str) -> str:
    """Say that nobody is here whom the ban hits, and which values there are: it may be a slip of the keyboard."""
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        records = (await read_nodes(client, Keys(settings.prefix, settings.run_id))).values()
    there = sorted({str(record.attributes[name]) for record in records if name in record.attributes})
    has = f"its nodes have {first_of(there, VALUES_NAMED_MOST)}" if there else f"none of its nodes has any {name}"
    return f"only nodes that come later; {has}"


@command(
    "unban",
    "let a banned node come again",
    *RUN,
    NODE,
    _where("instead of NODE: what has banned all nodes with this attribute"),
)
async def _unban(options: argparse.Namespace) -> int:
    _check_who_is_meant(options)
    async with _connect(options) as handler:
        if options.where is None:
            await handler.unban(options.node)
            who = f"node {options.node}"
        else:
            await handler.unban_where(*options.where)
            who = f"nodes with {'='.join(options.where)}"
        print(printable(f"{who} may come again to run {handler.run_id}"))
    return DONE


@command(
    "drain",
    "let a node leave at a step that all members agree on",
    *RUN,
    NODE,
    REASON,
    argument(
        "--in",
        dest="within",
        type=duration,
        default=120.0,
        metavar="SECONDS",
        help="from now; then it leaves, wherever the others are (default: %(default)g)",
    ),
)
async def _drain(options: argparse.Namespace) -> int:
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        if not isinstance(handler, Handler):
            raise RendezvousStateError(f"the backend of run {options.url} does not offer drain")
        await handler.drain_node(options.node, within=options.within, reason=options.reason)
        print(f"node {options.node} is to leave run {handler.run_id} within {options.within:g} s")
    return DONE


@command(
    "resize",
    "give a run another minimum or maximum of nodes while it lives",
    *RUN,
    argument("--min", type=whole_number(1), metavar="N", help="the fewest nodes of a round; not given: as it is"),
    argument("--max", type=whole_number(1), metavar="N", help="the most nodes of a round; not given: as it is"),
    REASON,
)
async def _resize(options: argparse.Namespace) -> int:
    if options.min is None and options.max is None:
        raise RendezvousSettingsError("resize to what? give --min, --max or both")
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        if not isinstance(handler, Handler):
            raise RendezvousStateError(f"the backend of run {options.url} does not offer resize")
        resized = await handler.resize(options.min, options.max, reason=options.reason)
        size = describe_size(resized.min_nodes, resized.max_nodes)
        print(f"run {handler.run_id} is resized to {size}, from its next round on")
    return DONE


@command(
    "ping",
    "measure how quickly a store answers",
    *STORE,
    argument("--count", type=whole_number(1), metavar="N", default=5, help="how often (default: %(default)s)"),
)
async def _ping(options: argparse.Namespace) -> int:
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        for _ in range(options.count):
            seconds = await client.ping()
            print(f"{settings.endpoint.url} answers in {seconds * 1000:.3f} ms", flush=True)
    return DONE
