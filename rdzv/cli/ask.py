"""Shell: the subcommands that ask the launchers of a run to do something, and show their answers: stacks and chaos.

What launchers answer is told in `launcher.launch`. Chaos is decided here, by a seed; only launchers obey that were
started with `--allow-chaos`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.cli.command import DONE, FAILED, RUN, argument, command, duration, flag, option, say
from rdzv.cli.reach import open_store
from rdzv.core.asking import ANSWER_TTL, KILL, STACKS, Question, unpack_answer
from rdzv.display.stacks import describe_groups, processes_in
from rdzv.errors import RendezvousSettingsError, RendezvousStateError, RendezvousTimeoutError
from rdzv.node.status import read_nodes
from rdzv.node.stuck.others import read_beats
from store.printable import first_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from rdzv.core.keys import Keys
    from store import Store
    from store.interface import Watch

__all__ = ["Rate", "ask", "rate"]

NODES_NAMED_MOST: Final = 8
ANSWER_WITHIN: Final = 5.0  # seconds for a launcher to say what it does
REFUSED: Final = "refused"


@contextlib.asynccontextmanager
async def ask(
    client: Store, keys: Keys, question: Question, *, expected: int = 1
) -> AsyncIterator[AsyncIterator[tuple[str, str]]]:
    """Ask nodes of a run, and iterate over what they answer: node and text, until as many as expected have answered.

    It waits for ever for who does not answer: enter it within a time limit.
    """
    name = secrets.token_hex(8)
    prefix = keys.answers(name)

    async def answers(watch: Watch) -> AsyncGenerator[tuple[str, str], None]:
        heard: set[str] = set()
        async for event in watch:
            if event.kind == "put":
                node_id = event.key.removeprefix(prefix)
                heard.add(node_id)
                yield node_id, unpack_answer(event.value)
            if len(heard) >= expected:
                return

    async with client.watch(prefix, snapshot=True) as watch:
        await client.put(keys.questions + name, question.pack(), ttl=ANSWER_TTL)
        async with contextlib.aclosing(answers(watch)) as heard:
            yield heard


async def _ask_one(client: Store, keys: Keys, what: str, node_id: str) -> str:
    """Return what one node answers; it waits as `ask` does."""
    async with ask(client, keys, Question(what=what, node_ids=(node_id,))) as answers:
        _, text = await anext(answers)
    return text


# ------------------------------------------------------------------------------------------ stacks


@command(
    "stacks",
    "show the Python stacks of the processes that a node's rdzv run has started",
    *RUN,
    argument("node", metavar="NODE", nargs="?", help="the node's id; without it, with --group, all nodes"),
    flag("--group", "where the processes of all nodes are: those in the same lines together, the odd ones first"),
)
async def _stacks(options: argparse.Namespace) -> int:
    if (options.node is None) != options.group:
        raise RendezvousSettingsError("stacks of whom? name a NODE, or give --group for those of all nodes")
    async with open_store(options.url, timeout=options.timeout) as (client, keys):
        there = set(await read_nodes(client, keys))
        if not there:
            raise RendezvousStateError(f"nobody is in run {keys.run_id}")
        if options.group:
            return await _group(client, keys, there, within=options.timeout / 2)
        if options.node not in there:
            here = first_of(sorted(there), NODES_NAMED_MOST)
            raise RendezvousStateError(f"run {keys.run_id} has no node {options.node}; it has {here}")
        with anyio.move_on_after(options.timeout):
            say(*(await _ask_one(client, keys, STACKS, options.node)).splitlines())
            return DONE
    raise RendezvousTimeoutError(
        f"node {options.node} has not answered within {options.timeout:g} s: only the launcher does, rdzv run, and it "
        f"may hang itself; give it more --timeout, or look on its machine"
    )


async def _group(client: Store, keys: Keys, there: set[str], *, within: float) -> int:
    """Show what all nodes answer in groups. Who has not answered in half of the time is named, and holds nobody up."""
    told: dict[str, str] = {}
    with anyio.move_on_after(within):
        async with ask(client, keys, Question(what=STACKS), expected=len(there)) as answers:
            async for node_id, text in answers:
                told[node_id] = text  # noqa: PERF403  what has come by the end of the time is kept
    stacks = [one for node_id in sorted(told) for one in processes_in(node_id, told[node_id])]
    say(*describe_groups(stacks, await read_beats(client, keys), silent=there - told.keys()))
    return DONE if told else FAILED


# ------------------------------------------------------------------------------------------ chaos


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How often something befalls a run: `count` times in `seconds`, on average."""

    count: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.count} in {self.seconds:g} s"


def rate(text: str) -> Rate:
    """Read a rate: `1/10m` is once in ten minutes.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    count, _, within = text.partition("/")
    if count.isdecimal() and int(count) and within and (seconds := duration(within)) > 0:
        return Rate(count=int(count), seconds=seconds)
    raise argparse.ArgumentTypeError(f"{text[:80]!r} must say how often: 1/10m is once in ten minutes")


@command(
    "chaos",
    "kill nodes of a run of one's own at random, to rehearse failures",
    *RUN,
    option("--kill N/TIME", rate, "kill nodes, launcher and processes: 1/10m is once in ten minutes", required=True),
    option("--for SECONDS", duration, "end after so long; without, by Ctrl-C", dest="lasting"),
    option("--seed N", int, "of what happens when, and to whom; without it, another each time"),
    flag("--yes", "this really kills: without it nothing is done"),
    limited=False,
)
async def _chaos(options: argparse.Namespace) -> int:
    if not options.yes:
        raise RendezvousSettingsError(
            "chaos kills nodes of the run, and was not confirmed: add --yes. Only launchers started with --allow-chaos "
            "obey"
        )
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    say(f"seed {seed}: kill {options.kill}")
    rng = random.Random(seed)
    obeyed = asked = 0
    async with open_store(options.url, timeout=options.timeout) as (client, keys):
        with anyio.move_on_after(options.lasting):
            while True:
                await anyio.sleep(rng.expovariate(options.kill.count / options.kill.seconds))
                there = sorted(await read_nodes(client, keys))
                if not there:
                    say("nobody is in the run")
                    continue
                node_id, answer = rng.choice(there), "no answer: only a launcher gives one, rdzv run"
                with anyio.move_on_after(ANSWER_WITHIN):
                    answer = await _ask_one(client, keys, KILL, node_id)
                say(f"{node_id}: {answer}")
                asked += 1
                obeyed += not answer.startswith(REFUSED)
    return DONE if obeyed or not asked else FAILED
