"""Shell: the subcommands of whoever operates a store for many runs: runs, forget, stats.

They look at the store, and not at one run as its nodes do: a run that nobody can join any more is listed and forgotten
like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

import store
from rdzv.backends.builtin import connect
from rdzv.backends.credentials import Credentials
from rdzv.cli.command import DONE, FAILED, JSON, RUN, STORE, command, flag
from rdzv.config.endpoint import split_url
from rdzv.config.settings import parse
from rdzv.core.keys import Keys
from rdzv.core.round import Round
from rdzv.display.history import long_duration
from rdzv.errors import RendezvousStateError
from rdzv.node.status import count_keys, read_account
from store.messages import Revoke
from store.printable import first_of, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from rdzv.config.settings import Settings

__all__ = ["Usage", "check_exists", "open_store", "usages"]

ANY_RUN = "any"  # the run_id where a URL names only a store, and none is needed
NODES_NAMED_MOST = 8
DELETED_AT_ONCE = 100  # keys: what one transaction of etcd takes
GONE_WITHIN = 5.0  # seconds in which the nodes of a run that was closed by force leave, if they can


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one run takes in the store; None where the store keeps no account (an etcd cluster)."""

    run_id: str
    keys: int
    bytes: int | None
    age: float | None
    at_least: bool = False  # it is older than the server's process, and nobody knows by how much


@contextlib.asynccontextmanager
async def open_store(url: str, *, timeout: float) -> AsyncIterator[tuple[Settings, store.Store]]:
    """Connect to the store of a URL, which need not name a run; give the settings that it was found with."""
    if not split_url(url).run_id:
        where, question_mark, parameters = url.partition("?")
        url = f"{where.rstrip('/')}/{ANY_RUN}{question_mark}{parameters}"
    settings = parse(url, {}, os.environ)
    credentials = Credentials.of(settings)
    connecting = store.connect(
        settings.endpoint.url,
        token=credentials.token,
        tls=credentials.client_tls(),
        user=settings.user,
        password=credentials.password,
        timeout=timeout,
    )
    async with connecting as client:
        yield settings, client


async def check_exists(options: argparse.Namespace) -> None:
    """Raise unless the store holds something of the run that is meant: a name may be mistyped.

    Raises:
        RendezvousStateError: There is no such run.
    """
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        if not await client.count(Keys(settings.prefix, settings.run_id).root):
            raise _no_such_run(settings.run_id)


def _no_such_run(run_id: str) -> RendezvousStateError:
    return RendezvousStateError(f"there is no run {run_id} in this store; rdzv runs URL lists those that there are")


# ------------------------------------------------------------------------------------------------ runs


@command(
    "runs",
    "list the runs that a store holds, with the keys, bytes and age of each",
    *STORE,
    flag("--json", "as one JSON object per run"),
)
async def _runs(options: argparse.Namespace) -> int:
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        runs = await usages(client, settings.prefix)
    runs.sort(key=lambda run: (-(run.bytes or 0), -run.keys, run.run_id))
    if options.json:
        for run in runs:
            print(json.dumps({"run_id": run.run_id, "keys": run.keys, "bytes": run.bytes, "age": run.age}))
    elif runs:
        print("\n".join(map(printable, _table(runs))))
    else:
        print(f"there are no runs under {settings.prefix}")
    return DONE


async def usages(client: store.Store, prefix: str) -> list[Usage]:
    """What each run under a prefix takes, by the store's account; else by counting keys."""
    account = await read_account(client, prefix)
    if account is None:
        counts = await count_keys(client, prefix)
        return [Usage(run_id=run_id, keys=count, bytes=None, age=None) for run_id, count in counts.items()]
    uptime = (await client.stats()).get("uptime", 0.0)
    return [
        Usage(run_id=run_id, keys=group.keys, bytes=group.bytes, age=group.age, at_least=group.age > uptime - 1.0)
        for run_id, group in account.items()
    ]


def _table(runs: list[Usage]) -> list[str]:
    width = max(6, *(len(run.run_id) for run in runs))
    lines = [f"{'run':<{width}}  {'keys':>8}  {'bytes':>14}  {'age':>10}"]
    for run in runs:
        held = "unknown" if run.bytes is None else f"{run.bytes:,}"
        lines.append(f"{run.run_id:<{width}}  {run.keys:>8,}  {held:>14}  {_age(run):>10}")
    return lines


def _age(run: Usage) -> str:
    if run.age is None:
        return "unknown"
    return (">" if run.at_least else "") + long_duration(run.age)


# ------------------------------------------------------------------------------------------------ forget


@command(
    "forget",
    "delete all that a store holds of a run of which nobody is left",
    *RUN,
    flag("--force", "also if nodes are left; the run is closed for them first"),
)
async def _forget(options: argparse.Namespace) -> int:
    if not split_url(options.url).run_id:
        raise store.StoreUsageError("the URL names no run to forget; rdzv runs URL lists those that there are")
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        keys = Keys(settings.prefix, settings.run_id)
        nodes = await _nodes(client, keys)
        if nodes and not options.force:
            named = printable(first_of(nodes, NODES_NAMED_MOST))
            print(f"run {settings.run_id} has {len(nodes)} nodes: {named}; close it first, or forget it with --force")
            return FAILED
        if nodes:
            await _close(options, client, keys)
        forgotten = await _delete(client, keys)
        if not forgotten:
            raise _no_such_run(settings.run_id)
        print(f"run {settings.run_id} is forgotten: {forgotten} keys")
    return DONE


async def _delete(client: store.Store, keys: Keys) -> int:
    """Delete what a run holds now, and return how many keys that was.

    Only what was listed is deleted: a node that comes meanwhile begins the run anew, and keeps its record.
    """
    entries = await client.list(keys.root, keys_only=True)
    leases = {entry.lease for entry in entries}
    round = await client.get(keys.round)
    if round is not None:  # what its members shared is on a lease of its own, which may hold nothing now
        with contextlib.suppress(RendezvousStateError):
            leases.add(Round.unpack(round.value, revision=round.mod_revision).lease)
    for lease in sorted(lease for lease in leases if lease is not None):
        with contextlib.suppress(store.LeaseNotFound):  # it has lapsed meanwhile, and its keys with it
            await client.call(Revoke(lease=lease))
    names = [entry.key for entry in entries if entry.lease is None]
    for at in range(0, len(names), DELETED_AT_ONCE):
        await client.transact(then=map(store.Delete, names[at : at + DELETED_AT_ONCE]))
    return len(entries)


async def _nodes(client: store.Store, keys: Keys) -> list[str]:
    entries = await client.list(keys.nodes, keys_only=True)
    return [entry.key[len(keys.nodes) :] for entry in entries if entry.key != keys.marker]


async def _close(options: argparse.Namespace, client: store.Store, keys: Keys) -> None:
    """Close a run for the nodes that are left, and let them go."""
    async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
        await handler.set_closed("the run was forgotten by its operator")
    with anyio.move_on_after(GONE_WITHIN):
        async with client.watch(keys.nodes) as watch:
            while await _nodes(client, keys):
                await anext(aiter(watch))


# ------------------------------------------------------------------------------------------------ stats


@command("stats", "show what a store's limits are, and how much of them is used", *STORE, JSON)
async def _stats(options: argparse.Namespace) -> int:
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        figures = await client.stats()
        runs = [] if "keys_max" not in figures else await usages(client, settings.prefix)
    if options.json:
        print(json.dumps(figures))
        return DONE
    limits = {used: limit for limit, used in store.Limits.used_by().items()}
    for name, figure in figures.items():
        if name in limits and limits[name] in figures:
            most = figures[limits[name]]
            print(f"{name:<20} {_shown(figure):>18} of {_shown(most)} ({100 * figure / most:.0f} %)")
        elif name not in store.Limits.used_by() and not hasattr(store.Limits, name):
            print(f"{printable(name):<20} {printable(_shown(figure)):>18}")
    if runs:
        largest = max(runs, key=lambda run: (run.bytes or 0, run.keys))
        print(f"run {printable(largest.run_id)} holds most: {largest.keys:,} keys, {largest.bytes or 0:,} bytes")
    return DONE


def _shown(figure: Any) -> str:
    if isinstance(figure, float):
        return f"{figure:,.1f}"
    return f"{figure:,}" if isinstance(figure, int) else str(figure)
