"""The demo, as a newcomer would run it: real processes, one of them killed."""

from __future__ import annotations

import os
import re
import signal

import pytest

from rdzv.cli import demo
from tests.support.processes import start_python


async def test_the_demo_verifies_every_step_and_regroups_within_two_seconds_of_a_kill() -> None:
    took: list[int] = []
    while len(took) < 2 and min(took, default=2000) >= 2000:  # a busy machine gets a second try
        async with start_python("-m", "rdzv", "demo") as child:
            assert await child.wait(timeout=60) == 0
            text = "\n".join(child.output)
        took.extend(map(int, re.findall(r"from SIGKILL to the next round: (\d+) ms", text)))
        assert text.endswith("every step was verified")
        assert "the run is closed, and every node was told why" in text
    assert min(took) < 2000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
async def test_the_nodes_end_with_the_demo_and_say_nothing_of_it(number: signal.Signals) -> None:
    """Ctrl-C at a terminal reaches the whole process group, and who is killed cannot tidy up."""
    async with start_python("-m", "rdzv", "demo") as child:
        await child.line("dan starts")
        if number == signal.SIGINT:
            os.killpg(child.pid, number)
        else:
            child.kill()
        await child.wait()  # all its output is in: nobody is left who could write any
        assert all(re.match(r" +\d+ ms  ", line) for line in child.output), child.written()


async def test_a_node_that_says_something_else_fails_the_demo() -> None:
    told: list[str] = []
    director = demo._Director("tcp://127.0.0.1:1/demo", told.append)
    director._said.put_nowait(("ada", 0.0, {"what": "round", "round": 0, "size": 2, "rank": 0, "total": [0.0] * 4}))
    with pytest.raises(demo._Failed, match="should be in round 0 of 1"):
        await director.expect_round(0, {"ada"})
