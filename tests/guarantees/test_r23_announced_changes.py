"""R23 **Announced changes cost no step.** A node that drains is known to all before it happens; nobody's restart is
counted. A verdict not to go on (`GiveUp`) ends the run everywhere, with one reason, kept in its record.
"""

from __future__ import annotations

import asyncio

import pytest

from rdzv import Draining
from rdzv.loop.ending import EndKind
from rdzv.loop.rounds import rounds_of
from tests.guarantees.test_r21_one_loop import Trainer, a_run, until
from tests.support.runs import listen

pytestmark = pytest.mark.virtual_time


async def test_r23_a_node_that_drains_leaves_at_a_step_that_all_agree_on() -> None:
    async with a_run() as run:
        trainers = [Trainer(name) for name in "abc"]
        handlers = [run.handler(name) for name in "abc"]
        tasks = [
            run.start(trainer.train(rounds_of(handler))) for trainer, handler in zip(trainers, handlers, strict=True)
        ]
        a, b, c = trainers
        await until(lambda: a.step == 5)
        await handlers[1].drain(within=60, reason="maintenance")
        await until(lambda: len(a.played) == 2 and len(c.played) == 2)
        await tasks[1]  # its loop has ended, and its node has left for good
        assert a.left_before[0] == b.left_before[0] == c.left_before[0], "no step is begun by some and not by others"
        stop = a.left_before[0]
        assert [step for of, step in a.begun if of == 0] == list(range(stop)), "no step is lost, none is done twice"
        assert a.rounds[0].ending is not None
        assert a.rounds[0].ending.kind is EndKind.AGREED
        assert a.rounds[0].ending.reason == "b to leave: maintenance"
        assert [played[2] for played in a.played] == [3, 2]


async def test_r23_members_are_told_before_it_happens_and_who_stays_is_put_out_when_the_time_is_over() -> None:
    async with a_run() as run:
        a, b = run.handler("a"), run.handler("b")
        await run.meet(a, b)
        heard = await listen(run, a)
        began = asyncio.get_running_loop().time()
        await b.drain(within=20, reason="spot instance")
        await heard.until(Draining)
        (told,) = [change for change in heard.changes if isinstance(change, Draining)]
        assert (told.node_ids, told.reason) == (("b",), "spot instance")
        assert 19 < told.seconds_left <= 20
        await until(lambda: b.node.membership is not None and b.node.membership.over is not None)
        assert 19.9 < asyncio.get_running_loop().time() - began < 21
