"""Connects subcommands to a store and a run, without `min_nodes`; they start no node and host no store."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

from rdzv.backends.builtin import make_client
from rdzv.backends.credentials import Credentials
from rdzv.backends.registry import rendezvous_handler_registry
from rdzv.config.endpoint import SCHEMES, split_url
from rdzv.config.settings import parse
from rdzv.core.keys import Keys
from rdzv.errors import RendezvousSettingsError
from rdzv.node.link.head_watcher import follow_head
from rdzv.node.run.run import Run
from store.net.process import host_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from rdzv.config.settings import Settings
    from rdzv.listeners import ChangeListener
    from store import Store

ANY_RUN: Final = "any"  # the run_id for a URL that names only a store


def url_settings(url: str, *, needs_run: bool = False, **given: Any) -> Settings:
    """Parse a URL, which must name a run only if `needs_run`; raise RendezvousSettingsError if the URL is invalid."""
    parts = split_url(url)
    if parts.scheme not in SCHEMES and parts.scheme in rendezvous_handler_registry.known():
        raise RendezvousSettingsError(
            f"the backend {parts.scheme!r} is not one of ours, and only its own tools know its store: rdzv's commands "
            f"are for {', '.join(SCHEMES)}"
        )
    if not (parts.run_id or needs_run):
        where, question_mark, parameters = url.partition("?")
        url = f"{where.rstrip('/')}/{ANY_RUN}{question_mark}{parameters}"
    return parse(url, given, os.environ)


@contextlib.asynccontextmanager
async def open_store(url: str, *, timeout: float) -> AsyncIterator[tuple[Store, Keys]]:
    """Connect to a URL's store; yield the store, and the keys of the URL's run."""
    settings = url_settings(url)
    async with make_client(settings, Credentials(settings), timeout=timeout) as client:
        yield client, Keys(settings.prefix, settings.run_id)


@contextlib.asynccontextmanager
async def open_run(
    options: argparse.Namespace, *, follow: ChangeListener | None = None, must_exist: bool = True
) -> AsyncIterator[Run]:
    """Connect to the run's store at `options.url`; with `must_exist`, raise RendezvousStateError for a missing run.

    `follow` is notified when the run's head changes. Without `follow` the head is not read, so the run has no status.
    """
    settings = url_settings(options.url, needs_run=True)
    by = settings.node_id or f"{host_name()}-{os.getpid()}"
    keys = Keys(settings.prefix, settings.run_id)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(make_client(settings, Credentials(settings), timeout=options.timeout))
        run = Run(client, keys, by=by, keep=settings.closed_ttl)
        if must_exist:
            await run.check_exists()
        if follow is not None:
            follower = await stack.enter_async_context(follow_head(client, keys))
            stack.enter_context(follower.listeners.subscribed(follow))
            run.head = lambda: follower.head
        yield run
