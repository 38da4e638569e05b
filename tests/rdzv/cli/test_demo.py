"""`rdzv demo`: every claim that it prints is verified, and holds also on a busy machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from typing import Any

import pytest

from rdzv.cli import demo
from tests.support.processes import start_python

pytestmark = pytest.mark.some_here(2)


async def test_the_demo_verifies_every_step() -> None:
    async with start_python("-m", "rdzv", "demo") as child:
        assert await child.wait(timeout=120) == 0
        text = "\n".join(child.output)
    assert text.endswith("every step was verified")
    assert "the run is closed, and every node was told why: the demo is over" in text
    assert re.search(r"from SIGKILL to the next round: \d+ ms", text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
async def test_the_nodes_end_with_the_demo_and_print_nothing(number: signal.Signals) -> None:
    """Ctrl-C at a terminal reaches the whole process group, and a killed demo cannot clean up."""
    async with start_python("-m", "rdzv", "demo") as child:
        await child.line("dan starts", timeout=60)
        if number == signal.SIGINT:
            os.killpg(child.pid, number)
        else:
            child.kill()
        await child.wait(timeout=60)  # end of file: no process is left that could write
        assert all(re.match(r" +\d+ ms  ", line) for line in child.output), child.written()


# The director with scripted nodes in place of a run: each node prints all its lines at once.


async def directed(**nodes: str) -> demo._DemoDirector:
    director = demo._DemoDirector(lambda _: None)
    for name, script in nodes.items():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=PIPE, stderr=STDOUT)
        director._actors[name] = demo._NodeProcess(name, process)
    return director


def says(*told: dict[str, Any]) -> str:
    return "\n".join(f"print('{json.dumps(one)}')" for one in told)


def round_of(number: int, rank: int, size: int = 2) -> dict[str, Any]:
    return {"what": "round", "round": number, "rank": rank, "size": size, "total": [size * (size + 1) / 2] * 4}


OVER = {"what": "over", "reason": "lost: cleo"}


async def test_a_fast_node_may_be_a_round_ahead_of_a_slow_one() -> None:
    director = await directed(
        ada=says(OVER, round_of(1, 0), OVER, round_of(2, 0)), ben=says(OVER, round_of(1, 1), round_of(2, 1))
    )
    assert (await director.wait_for_reports({"ada"}, "over"))["ada"]["reason"] == "lost: cleo"
    for number in (1, 2):
        await director.expect_round(number, {"ada", "ben"})
    await director.kill_all()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("raise MemoryError", r"ben ended with status 1 (.|\n)*MemoryError"),
        (says(round_of(0, 1, size=3)), "ben should be in round 0 of 2"),
        (says(round_of(0, 0)), "the ranks are not 0 to 1"),
    ],
)
async def test_a_node_that_dies_or_reports_something_else_fails_the_demo(script: str, why: str) -> None:
    director = await directed(ada=says(round_of(0, 0)), ben=script)
    with pytest.raises(demo._DemoFailed, match=why):
        await director.expect_round(0, {"ada", "ben"})
    await director.kill_all()
