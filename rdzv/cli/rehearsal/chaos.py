"""Shell: `rdzv chaos`: kills and stops nodes of a run at random, to see whether it recovers.

Only launchers obey that were started with `--allow-chaos`; what is done is decided here, by a seed.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from rdzv.cli.command import DONE, FAILED, RUN, argument, command, duration, flag
from rdzv.cli.runs import open_store
from rdzv.cli.stacks import ask
from rdzv.core.asking import KILL, PAUSE, Question
from rdzv.core.keys import Keys
from rdzv.errors import RendezvousSettingsError
from rdzv.node.status import read_nodes
from store.printable import printable

if TYPE_CHECKING:
    from store import Store

__all__ = ["Rate", "rate"]

ANSWER_WITHIN: Final = 5.0  # seconds for a launcher to say what it does
REFUSED: Final = "refused"


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
    count, slash, within = text.partition("/")
    if not slash or not count.isdecimal() or not int(count):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must say how often: 1/10m is once in ten minutes")
    seconds = duration(within)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} names no time: 1/10m is once in ten minutes")
    return Rate(count=int(count), seconds=seconds)


@command(
    "chaos",
    "kill and stop nodes of a run of one's own at random, to rehearse failures",
    *RUN,
    argument(
        "--kill", type=rate, metavar="N/TIME", help="kill nodes, launcher and processes: 1/10m is once in ten minutes"
    ),
    argument("--pause", type=rate, metavar="N/TIME", help="stop the processes of nodes for --pause-for"),
    argument(
        "--pause-for",
        type=duration,
        default=30.0,
        metavar="SECONDS",
        help="for how long; then they go on (default: %(default)g)",
    ),
    argument("--for", dest="lasting", type=duration, metavar="SECONDS", help="end after so long; without, by Ctrl-C"),
    argument("--seed", type=int, metavar="N", help="of what happens when, and to whom; without it, another each time"),
    flag("--yes", "this really kills: without it nothing is done"),
    limited=False,
)
async def _run(options: argparse.Namespace) -> int:
    rates = {kind: given for kind, given in ((KILL, options.kill), (PAUSE, options.pause)) if given is not None}
    if not rates:
        raise RendezvousSettingsError("chaos of which kind? give --kill 1/10m, --pause 1/5m or both")
    if not options.yes:
        raise RendezvousSettingsError(
            "chaos kills and stops nodes of the run, and was not confirmed: add --yes. Only launchers started with "
            "--allow-chaos obey"
        )
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: " + ", ".join(f"{kind.split()[1]} {given}" for kind, given in rates.items()), flush=True)
    rng = random.Random(seed)
    obeyed = asked = 0
    async with open_store(options.url, timeout=options.timeout) as (settings, client):
        keys = Keys(settings.prefix, settings.run_id)
        with anyio.move_on_after(options.lasting):
            while True:
                waits = {kind: rng.expovariate(given.count / given.seconds) for kind, given in rates.items()}
                kind = min(waits, key=lambda one: waits[one])
                await anyio.sleep(waits[kind])
                what = kind if kind == KILL else f"{kind}{options.pause_for:g}"
                answer = await _befall(client, keys, what, rng)
                asked += answer is not None
                obeyed += answer is not None and not answer.startswith(REFUSED)
    return DONE if obeyed or not asked else FAILED


async def _befall(client: Store, keys: Keys, what: str, rng: random.Random) -> str | None:
    """Let something befall a node, any; what its launcher says, or None if there is nobody."""
    there = sorted(await read_nodes(client, keys))
    if not there:
        print("nobody is in the run", flush=True)
        return None
    node_id = rng.choice(there)
    answer = "no answer: only a launcher gives one, rdzv run"
    with anyio.move_on_after(ANSWER_WITHIN):
        async with ask(client, keys, Question(what=what, node_ids=(node_id,)), expected=1) as answers:
            async for _, text in answers:
                answer = text
    print(printable(f"{node_id}: {answer}"), flush=True)
    return answer
