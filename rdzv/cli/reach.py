"""Shell: how subcommands reach a store and a run. They need no `min_nodes`, and never host a store."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any, Final

from rdzv.backends.builtin import client_of
from rdzv.backends.credentials import Credentials
from rdzv.config.endpoint import split_url
from rdzv.config.settings import parse
from rdzv.core.keys import Keys
from rdzv.errors import RendezvousStateError
from rdzv.loop.rounds import handler_of
from rdzv.node.run.run import Run
from rdzv.node.run.status import run_ids
from store.printable import first_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from rdzv.config.settings import Settings
    from rdzv.node.handler import Handler
    from store import Store

__all__ = ["check_exists", "no_such_run", "open_run", "open_store", "settings_of", "steer"]

ANY_RUN: Final = "any"  # the run_id where a URL names only a store, and none is needed
RUNS_NAMED_MOST: Final = 10  # where a run is not found; `rdzv runs` lists them all


def settings_of(url: str, **given: Any) -> Settings:
    """Return what a URL says, which need not name a run."""
    if not split_url(url).run_id:
        where, question_mark, parameters = url.partition("?")
        url = f"{where.rstrip('/')}/{ANY_RUN}{question_mark}{parameters}"
    return parse(url, given, os.environ)


@contextlib.asynccontextmanager
async def open_store(url: str, *, timeout: float) -> AsyncIterator[tuple[Store, Keys]]:
    """Connect to the store of a URL; give it with the keys of the run."""
    settings = settings_of(url)
    async with client_of(settings, Credentials(settings), timeout=timeout) as client:
        yield client, Keys(settings.prefix, settings.run_id)


@contextlib.asynccontextmanager
async def steer(options: argparse.Namespace) -> AsyncIterator[Run]:
    """Connect to the store of a run, to steer it: that takes no node.

    Raises:
        RendezvousSettingsError: The URL names no run.
    """
    settings = parse(options.url, {}, os.environ)
    by = settings.node_id or f"{socket.gethostname()}-{os.getpid()}"
    async with client_of(settings, Credentials(settings), timeout=options.timeout) as client:
        yield Run(client, Keys(settings.prefix, settings.run_id), by=by, keep=settings.closed_ttl)


@contextlib.asynccontextmanager
async def open_run(options: argparse.Namespace) -> AsyncIterator[Handler]:
    """Connect to a run as somebody who looks at it or steers it.

    Raises:
        RendezvousSettingsError: Something is wrong with the URL, or its backend is somebody else's.
    """
    async with handler_of(options.url, {"is_host": False, "join_timeout": options.timeout}) as handler:
        yield handler


async def check_exists(options: argparse.Namespace) -> None:
    """Raise unless the store holds something of the run that is meant: a name may be mistyped.

    Raises:
        RendezvousSettingsError: The URL names no run.
        RendezvousStateError: There is no such run.
    """
    parse(options.url, {}, os.environ)
    async with open_store(options.url, timeout=options.timeout) as (client, keys):
        if not await client.count(keys.root):
            raise await no_such_run(client, keys)


async def no_such_run(client: Store, keys: Keys) -> RendezvousStateError:
    """Return the error, which names the runs that there are."""
    runs = await run_ids(client, keys.prefix)
    there = f"it has {first_of(runs, RUNS_NAMED_MOST)}" if runs else f"it has none under {keys.prefix}"
    return RendezvousStateError(f"the store has no run {keys.run_id}; {there}")
