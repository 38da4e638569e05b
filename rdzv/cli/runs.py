"""The subcommands for a store with many runs: ping, runs, forget, stats.

They read the store's keys directly, so they also list and delete runs that no node can join any more.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

import anyio

import store
from rdzv.cli.command import DONE, JSON, NAMED_MOST, RUN, STORE, command, flag, integer_type, option, print_text, say
from rdzv.cli.reach import open_run, open_store, url_settings
from rdzv.core.report import long_duration
from rdzv.core.round import Round
from rdzv.errors import RendezvousStateError
from rdzv.node.run.status import RunUsage, usage_by_run
from store.messages import Revoke
from store.printable import plural, short_names

if TYPE_CHECKING:
    import argparse

    from rdzv.core.keys import Keys

DELETED_AT_ONCE: Final = 100  # keys in one transaction, within etcd's limit
GONE_WITHIN: Final = 5.0  # seconds for the nodes of a run closed by --force to leave


@command(
    "ping", "measure how quickly a store answers", *STORE, option("--count N", integer_type(1), "how often", default=5)
)
async def _ping_store(options: argparse.Namespace) -> int:
    url = url_settings(options.url).endpoint.url
    async with open_store(options.url, timeout=options.timeout) as (client, _):
        for _ in range(options.count):
            say(f"{url} answers in {await client.ping() * 1000:.3f} ms")
    return DONE


@command(
    "runs",
    "list the runs that a store holds, with the keys, bytes and age of each",
    *STORE,
    flag("--json", "as one JSON object per run"),
)
async def _list_runs(options: argparse.Namespace) -> int:
    async with open_store(options.url, timeout=options.timeout) as (client, keys):
        runs = list((await usage_by_run(client, keys.prefix)).values())
        uptime = (await client.stats()).get("uptime", 0.0)
    runs.sort(key=lambda run: (-(run.bytes or 0), -run.keys, run.run_id))
    if options.json:
        for run in runs:
            print_text(json.dumps(run._asdict()))
    elif runs:
        say(*_table_of_runs(runs, uptime))
    else:
        say(f"there are no runs under {keys.prefix}")
    return DONE


def _table_of_runs(runs: list[RunUsage], uptime: float) -> list[str]:
    """Return one line per run; ">" marks the age of a run that is older than the server's process."""
    width = max(6, *(len(run.run_id) for run in runs))
    lines = [f"{'run':<{width}}  {'keys':>8}  {'bytes':>14}  {'age':>10}"]
    for run in runs:
        held = "unknown" if run.bytes is None else f"{run.bytes:,}"
        age = "unknown" if run.age is None else f"{'>' if run.age > uptime - 1.0 else ''}{long_duration(run.age)}"
        lines.append(f"{run.run_id:<{width}}  {run.keys:>8,}  {held:>14}  {age:>10}")
    return lines


@command(
    "forget",
    "delete a run without nodes from a store",
    *RUN,
    flag("--force", "also a run with nodes, which is closed for them first"),
)
async def _forget_run(options: argparse.Namespace) -> int:
    async with open_run(options) as run:
        client, keys = run.store, run.keys
        nodes = await _list_node_ids(client, keys)
        if nodes and not options.force:
            named = short_names(nodes, NAMED_MOST)
            raise RendezvousStateError(
                f"run {keys.run_id} has {plural(len(nodes))}: {named}; close it first, or forget it with --force"
            )
        if nodes:
            await run.set_closed("the run was forgotten by its operator")
            with anyio.move_on_after(GONE_WITHIN):
                async with client.watch(keys.nodes) as watch:
                    while await _list_node_ids(client, keys):
                        await anext(aiter(watch))
        forgotten = await _delete_run_keys(client, keys)
        say(f"run {keys.run_id} is forgotten: {forgotten} keys")
    return DONE


async def _delete_run_keys(client: store.Store, keys: Keys) -> int:
    """Delete the present keys of a run and return their number; the record of a node that joins meanwhile stays."""
    entries = await client.list(keys.root, keys_only=True)
    leases = {entry.lease for entry in entries}
    round = await client.get(keys.round)
    if round is not None:  # revoke the lease of this round's store even if it has no key yet
        with contextlib.suppress(RendezvousStateError):
            leases.add(Round.unpack(round.value, revision=round.mod_revision).lease)
    for lease in sorted(lease for lease in leases if lease is not None):
        with contextlib.suppress(store.LeaseNotFound):  # the lease has expired meanwhile
            await client.call(Revoke(lease=lease))
    names = [entry.key for entry in entries if entry.lease is None]
    for at in range(0, len(names), DELETED_AT_ONCE):
        await client.transact(then=map(store.Delete, names[at : at + DELETED_AT_ONCE]))
    return len(entries)


async def _list_node_ids(client: store.Store, keys: Keys) -> list[str]:
    entries = await client.list(keys.nodes, keys_only=True)
    return [entry.key[len(keys.nodes) :] for entry in entries if entry.key != keys.marker]


@command("stats", "show what a store's limits are, and how much of them is used", *STORE, JSON)
async def _print_stats(options: argparse.Namespace) -> int:
    async with open_store(options.url, timeout=options.timeout) as (client, keys):
        figures = await client.stats()
        runs = await usage_by_run(client, keys.prefix) if "keys_max" in figures else {}
    if options.json:
        print_text(json.dumps(figures))
        return DONE
    limits = {used: limit for limit, used in store.Limits.figure_by_limit().items()}
    for name, figure in figures.items():
        if name in limits and limits[name] in figures:
            most = figures[limits[name]]
            say(f"{name:<20} {_figure_text(figure):>18} of {_figure_text(most)} ({100 * figure / most:.0f} %)")
        elif name not in store.Limits.figure_by_limit() and not hasattr(store.Limits, name):
            say(f"{name:<20} {_figure_text(figure):>18}")
    if runs:
        largest = max(runs.values(), key=lambda run: (run.bytes or 0, run.keys))
        say(f"run {largest.run_id} holds most: {largest.keys:,} keys, {largest.bytes or 0:,} bytes")
    return DONE


def _figure_text(figure: Any) -> str:
    if isinstance(figure, float):
        return f"{figure:,.1f}"
    return f"{figure:,}" if isinstance(figure, int) else str(figure)
