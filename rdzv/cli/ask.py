"""Shell: `rdzv stacks` and `rdzv chaos`, which send questions to the launchers of a run; `launcher.launch` answers.

Only launchers with `--allow-chaos` obey `rdzv chaos`. The seed of `rdzv chaos` decides which node it kills, and when.
"""

from __future__ import annotations

import argparse
import random
import secrets
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.cli.command import DONE, FAILED, NAMED_MOST, NODE, RUN, command, duration, flag, option, say
from rdzv.cli.reach import open_store
from rdzv.core.asking import ANSWER_TTL, KILL, STACKS, Question, unpack_answer
from rdzv.errors import RendezvousSettingsError, RendezvousStateError, RendezvousTimeoutError
from rdzv.node.run.status import read_nodes
from store.printable import first_of

if TYPE_CHECKING:
    from rdzv.core.keys import Keys
    from store import Store

ANSWER_WITHIN: Final = 5.0  # seconds
REFUSED: Final = "refused"


async def _ask(client: Store, keys: Keys, what: str, node_id: str) -> str:
    name = secrets.token_hex(8)
    answered = keys.answers(name) + node_id
    await client.put(keys.questions + name, Question(what=what, node_id=node_id).pack(), ttl=ANSWER_TTL)
    await client.wait([answered])
    entry = await client.get(answered)
    assert entry is not None, "answers are kept for as long as questions"
    return unpack_answer(entry.value)


@command("stacks", "show the Python stacks of the processes that a node's rdzv run has started", *RUN, NODE)
async def _stacks(options: argparse.Namespace) -> int:
    async with open_store(options.url, timeout=options.timeout) as (client, keys):
        there = set(await read_nodes(client, keys))
        if options.node not in there:
            here = first_of(sorted(there), NAMED_MOST) or "none"
            raise RendezvousStateError(f"run {keys.run_id} has no node {options.node}; it has {here}")
        with anyio.move_on_after(options.timeout):
            say(*(await _ask(client, keys, STACKS, options.node)).splitlines())
            return DONE
    raise RendezvousTimeoutError(
        f"node {options.node} has not answered within {options.timeout:g} s: only the launcher does, rdzv run, and it "
        f"may hang itself; give it more --timeout, or look on its machine"
    )


def rate(text: str) -> float:
    """Read a mean rate per second (`1/10m` is once in ten minutes); raise ArgumentTypeError for other texts."""
    count, _, within = text.partition("/")
    if count.isdecimal() and int(count) and within and (seconds := duration(within)) > 0:
        return float(int(count) / seconds)
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
                    answer = await _ask(client, keys, KILL, node_id)
                    obeyed += not answer.startswith(REFUSED)
                say(f"{node_id}: {answer}")
                asked += 1
    return DONE if obeyed or not asked else FAILED
