"""Shell: `rdzv stacks`: asks the launcher of a node for the Python stacks of the processes that it runs.

`ask` is for any question to any number of nodes: what they answer is yielded as it comes.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

import anyio

from rdzv.cli.command import DONE, FAILED, RUN, argument, command, flag
from rdzv.cli.runs import open_store
from rdzv.core.asking import ANSWER_TTL, NATIVE_STACKS, STACKS, Question, unpack_answer
from rdzv.core.keys import Keys
from rdzv.display.stacks import describe_groups, processes_in
from rdzv.errors import RendezvousSettingsError, RendezvousStateError, RendezvousTimeoutError
from rdzv.node.status import read_nodes
from rdzv.node.stuck.others import read_beats
from store.printable import first_of, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, AsyncIterator

    from store import Store
    from store.interface import Watch

__all__ = ["ask"]

NODES_NAMED_MOST = 8


@contextlib.asynccontextmanager
async def ask(
    client: Store, keys: Keys, question: Question, *, expected: int
) -> AsyncIterator[AsyncIterator[tuple[str, str]]]:
    """Ask nodes of a run, and iterate over what they answer: node and text, until all expected ones have answered.

    It waits for ever for who does not answer: enter it within a time limit.

    Args:
        client: Of the run's store.
        keys: The run's keys.
        question: What, and whom.
        expected: How many nodes are to answer.
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


@command(
    "stacks",
    "show the Python stacks of the processes that a node's rdzv run has started",
    *RUN,
    argument("node", metavar="NODE", nargs="?", help="the node's id; without it, with --group, all nodes"),
    flag("--group", "where the processes of all nodes are: those in the same lines together, the odd ones first"),
    flag(
        "--native",
        "of one node: with the frames of C and C++, by py-spy, where that is installed and may look at processes",
    ),
)
async def _run(options: argparse.Namespace) -> int:
    if (options.node is None) != options.group:
        raise RendezvousSettingsError("stacks of whom? name a NODE, or give --group for those of all nodes")
    if options.group and options.native:
        raise RendezvousSettingsError("--native asks one node: name it, the odd one of --group, say")
    return await (_group(options) if options.group else _one(options))


async def _group(options: argparse.Namespace) -> int:
    """Ask all nodes, and show what they answer in groups."""
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        keys = Keys(settings.prefix, settings.run_id)
        there = set(await read_nodes(client, keys))
        if not there:
            raise RendezvousStateError(f"nobody is in run {settings.run_id}")
        told: dict[str, str] = {}
        # Half of the time: who has not answered then is named, and nothing is kept from those who ask.
        with anyio.move_on_after(options.timeout / 2):
            async with ask(client, keys, Question(what=STACKS), expected=len(there)) as answers:
                async for node_id, text in answers:
                    told[node_id] = text  # noqa: PERF403  what has come by the end of the time is kept
        stacks = [one for node_id in sorted(told) for one in processes_in(node_id, told[node_id])]
        heard = await read_beats(client, keys)
        print("\n".join(map(printable, describe_groups(stacks, heard, silent=there - told.keys()))))
    return DONE if told else FAILED


async def _one(options: argparse.Namespace) -> int:
    answer_by = anyio.current_time() + options.timeout
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        keys = Keys(settings.prefix, settings.run_id)
        there = sorted(await read_nodes(client, keys))
        if options.node not in there:
            here = f"it has {first_of(there, NODES_NAMED_MOST)}" if there else "nobody is in it"
            raise RendezvousStateError(f"run {settings.run_id} has no node {options.node}; {here}")
        question = Question(what=NATIVE_STACKS if options.native else STACKS, node_ids=(options.node,))
        with anyio.CancelScope(deadline=answer_by):
            async with ask(client, keys, question, expected=1) as answers:
                async for _, text in answers:
                    print("\n".join(map(printable, text.splitlines())))
                return DONE
    raise RendezvousTimeoutError(
        f"node {options.node} has not answered within {options.timeout:g} s: only the launcher does, rdzv run, and it "
        f"may hang itself; give it more --timeout, or look on its machine"
    )
