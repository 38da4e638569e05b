"""The subcommands that change a run: close, reopen, ban, unban, drain, resize, lost; and stacks and chaos.

`rdzv stacks` and `rdzv chaos` send questions to a run's launchers (`launcher.launch`). Only launchers with
`--allow-chaos` obey `rdzv chaos`, whose seed decides which node dies, and when.
"""

from __future__ import annotations

import argparse
import math
import random
import secrets
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.backends.credentials import Credentials
from rdzv.backends.host_queries import report_lost_host
from rdzv.cli.command import (
    DONE,
    FAILED,
    NAMED_MOST,
    NODE,
    RUN,
    Argument,
    command,
    duration,
    flag,
    integer_type,
    option,
    say,
)
from rdzv.cli.reach import open_run, open_store, url_settings
from rdzv.config.resizing import describe_size
from rdzv.core.questions import ANSWER_TTL, KILL, STACKS, OperatorQuestion, decompress_answer
from rdzv.errors import RendezvousSettingsError, RendezvousStateError, RendezvousTimeoutError
from rdzv.node.link.wakeup import Wakeup
from rdzv.node.run.status import read_nodes
from store.printable import short_names, time_text

if TYPE_CHECKING:
    from rdzv.core.keys import Keys
    from rdzv.node.run.run import Run
    from store import Store

ANSWER_WITHIN: Final = 5.0  # seconds for a launcher to answer `rdzv chaos`
REFUSED: Final = "refused"


def _parse_attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be an attribute and its value: rack=17")
    return name, value


REASON = Argument("--reason", default="", help="why; whom it concerns is told")
WHERE = "--where ATTRIBUTE=VALUE"
NODE_OR_WHERE = Argument(*NODE.names, **NODE.settings, nargs="?")


def _check_one_target(options: argparse.Namespace) -> None:
    if (options.node is None) == (options.where is None):
        raise RendezvousSettingsError("name a NODE, or give --where ATTRIBUTE=VALUE")


@command(
    "close",
    "close a run for all its nodes",
    *RUN,
    REASON,
    flag("--create", "also a run that no node has come to; none will get in"),
)
async def _close_run(options: argparse.Namespace) -> int:
    async with open_run(options, follow=Wakeup(), must_exist=not options.create) as run:
        closed = await run.set_closed(options.reason)
        _, history, cost = await run.status_and_cost()
    before = "" if closed.reason == options.reason else f", and was before: {closed.reason or 'no reason was given'}"
    say(f"run {run.run_id} is closed{before}", *([str(cost)] if history.chapters else []))
    return DONE


@command(
    "lost",
    "say that a host of the store is dead, so that the next one serves",
    *RUN,
    Argument("host", metavar="HOST", help="the host, as in the URL; if it is still at work, two runs go on"),
)
async def _declare_host_lost(options: argparse.Namespace) -> int:
    settings = url_settings(options.url)
    said = await report_lost_host(settings, Credentials(settings), options.host)
    say(said, "if that host is at work after all, two runs go on until it sees the later store, and gives way")
    return DONE


@command("reopen", "open a run again that was closed, so that nodes may join it", *RUN)
async def _reopen_run(options: argparse.Namespace) -> int:
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
    option(WHERE, _parse_attribute, "instead of NODE: all nodes with this attribute, also those that come later"),
    REASON,
    flag("--now", "put it out of its round at once, not only of the next one"),
    option("--for SECONDS", duration, "for how long, say 10m (default: until unban)", dest="lasts"),
)
async def _ban_nodes(options: argparse.Namespace) -> int:
    _check_one_target(options)
    span = "" if options.lasts is None else f" for {time_text(options.lasts)}"
    async with open_run(options) as run:
        here = await run.ban(
            options.node or "", options.reason, where=options.where, now=options.now, lasts=options.lasts
        )
        if options.where is None:
            say(f"node {options.node} is banned from run {run.run_id}{span}")
            return DONE
        name, value = options.where
        who = f"now {short_names(here, NAMED_MOST)}" if here else await _no_match_message(run, name)
    say(f"nodes with {name}={value} are banned from run {run.run_id}{span}: {who}")
    return DONE


async def _no_match_message(run: Run, name: str) -> str:
    """Return that the ban matches no present node, and the nodes' values of the attribute: a typo is likely."""
    records = (await read_nodes(run.store, run.keys)).values()
    there = sorted({str(record.attributes[name]) for record in records if name in record.attributes})
    has = f"its nodes have {short_names(there, NAMED_MOST)}" if there else f"none of its nodes has any {name}"
    return f"only nodes that come later; {has}"


@command(
    "unban",
    "let a banned node come again",
    *RUN,
    NODE_OR_WHERE,
    option(WHERE, _parse_attribute, "instead of NODE: what has banned all nodes with this attribute"),
    Argument("--reason", default="", help="why; the history says it"),
)
async def _unban_nodes(options: argparse.Namespace) -> int:
    _check_one_target(options)
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
async def _drain_node(options: argparse.Namespace) -> int:
    async with open_run(options) as run:
        await run.drain(options.node, options.within, options.reason)
    say(f"node {options.node} is to leave run {run.run_id} within {options.within:g} s")
    return DONE


@command(
    "resize",
    "give a run another minimum or maximum of nodes while it lives",
    *RUN,
    option("--min N", integer_type(1), "the fewest nodes of a round; not given: as it is"),
    option("--max N", integer_type(1), "the most nodes of a round; not given: as it is"),
    REASON,
)
async def _resize_run(options: argparse.Namespace) -> int:
    if options.min is None and options.max is None:
        raise RendezvousSettingsError("give --min, --max or both")
    async with open_run(options) as run:
        resized = await run.resize(options.min, options.max, reason=options.reason)
    size = describe_size(resized.min_nodes, resized.max_nodes)
    say(f"run {run.run_id} is resized to {size}, from its next round on")
    return DONE


async def _ask_node_launcher(client: Store, keys: Keys, what: str, node_id: str) -> str:
    name = secrets.token_hex(8)
    answered = keys.operator_answers(name) + node_id
    await client.put(keys.questions + name, OperatorQuestion(what=what, node_id=node_id).pack(), ttl=ANSWER_TTL)
    await client.wait([answered])
    entry = await client.get(answered)
    assert entry is not None, "answers are kept for as long as questions"
    return decompress_answer(entry.value)


@command("stacks", "show the Python stacks of the processes that a node's rdzv run has started", *RUN, NODE)
async def _print_stacks(options: argparse.Namespace) -> int:
    async with open_store(options.url, timeout=options.timeout) as (client, keys):
        there = set(await read_nodes(client, keys))
        if options.node not in there:
            here = short_names(sorted(there), NAMED_MOST) or "none"
            raise RendezvousStateError(f"run {keys.run_id} has no node {options.node}; it has {here}")
        with anyio.move_on_after(options.timeout):
            say(*(await _ask_node_launcher(client, keys, STACKS, options.node)).splitlines())
            return DONE
    raise RendezvousTimeoutError(
        f"node {options.node} has not answered within {options.timeout:g} s: only the launcher does, rdzv run, and it "
        f"may hang itself; give it more --timeout, or look on its machine"
    )


def to_rate(text: str) -> float:
    """Read a mean rate per second (`1/10m` is once in ten minutes); raise ArgumentTypeError for other texts."""
    count, _, within = text.partition("/")
    if count.isdecimal() and within and (seconds := duration(within)) > 0 and 0 < float(count) / seconds < math.inf:
        return float(float(count) / seconds)
    raise argparse.ArgumentTypeError(f"{text[:80]!r} must say how often: 1/10m is once in ten minutes")


@command(
    "chaos",
    "kill nodes of a run of one's own at random, to rehearse failures",
    *RUN,
    option("--kill N/TIME", to_rate, "kill nodes, launcher and processes: 1/10m is once in ten minutes", required=True),
    option("--for SECONDS", duration, "end after so long; without, by Ctrl-C", dest="lasting"),
    option("--seed N", int, "of what happens when, and to whom; without it, another each time"),
    flag("--yes", "this really kills: without it nothing is done"),
    limited=False,
)
async def _run_chaos(options: argparse.Namespace) -> int:
    if not options.yes:
        raise RendezvousSettingsError(
            "chaos kills nodes of the run, and was not confirmed: add --yes. Only launchers started with --allow-chaos "
            "obey"
        )
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    say(f"seed {seed}: kill one in {1 / options.kill:g} s")
    rng = random.Random(seed)
    obeyed = asked = 0
    async with open_store(options.url, timeout=options.timeout) as (client, keys):
        with anyio.move_on_after(options.lasting):
            while True:
                await anyio.sleep(rng.expovariate(options.kill))
                there = sorted(await read_nodes(client, keys))
                if not there:
                    say("the run has no nodes")
                    continue
                node_id, answer = rng.choice(there), "no answer: only a launcher gives one, rdzv run"
                with anyio.move_on_after(ANSWER_WITHIN):
                    answer = await _ask_node_launcher(client, keys, KILL, node_id)
                    obeyed += not answer.startswith(REFUSED)
                say(f"{node_id}: {answer}")
                asked += 1
    return DONE if obeyed or not asked else FAILED
