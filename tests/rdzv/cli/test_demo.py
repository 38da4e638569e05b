"""`rdzv demo`: every claim it makes is verified, and a machine that is merely busy makes none of them untrue."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import deque
from typing import Any

import pytest

from rdzv.cli import demo
from tests.support.processes import start_python


async def test_the_demo_verifies_every_step() -> None:
    async with start_python("-m", "rdzv", "demo") as child:
        assert await child.wait(timeout=120) == 0
        text = "\n".join(child.output)
    assert text.endswith("every step was verified")
    assert "the run is closed, and every node was told why" in text
    assert re.search(r"from SIGKILL to the next round: \d+ ms", text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
async def test_the_nodes_end_with_the_demo_and_say_nothing_of_it(number: signal.Signals) -> None:
    """Ctrl-C at a terminal reaches the whole process group, and who is killed cannot tidy up."""
    async with start_python("-m", "rdzv", "demo") as child:
        await child.line("dan starts", timeout=60)
        if number == signal.SIGINT:
            os.killpg(child.pid, number)
        else:
            child.kill()
        await child.wait(timeout=60)  # all its output is in: nobody is left who could write any
        assert all(re.match(r" +\d+ ms  ", line) for line in child.output), child.written()


# What nodes say, handed to the director without processes: each list is one node's, in its own order.


class Played(demo._Actor):
    """A node that has said all of this already."""

    def __init__(self, name: str, *said: dict[str, Any]) -> None:
        self.name = name
        self._said = asyncio.Queue()
        for at, what in enumerate(said):
            self._said.put_nowait((float(at), what))
        self._last_words = deque(["Traceback ...", "MemoryError"])


def round_of(number: int, rank: int, size: int = 2) -> dict[str, Any]:
    return {"what": "round", "round": number, "rank": rank, "size": size, "total": [size * (size + 1) / 2] * 4}


GONE = {"what": "gone", "nodes": ["cleo"]}


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def director(told: list[str]) -> demo._Director:
    return demo._Director(told.append)


async def test_a_fast_node_may_be_a_round_ahead_of_what_a_slow_one_has_said(director: demo._Director) -> None:
    waiting = {"what": "waiting", "count": 1}
    director._actors = {
        "ada": Played("ada", GONE, round_of(1, 0), waiting, round_of(2, 0)),
        "ben": Played("ben", {"what": "gone", "nodes": ["ada"]}, round_of(1, 1), round_of(2, 1)),
    }
    names = {"ada", "ben"}
    gone = await director.hear({"ada"}, "gone")
    assert gone["ada"]["nodes"] == ["cleo"]
    await director.hear({"ben"}, "gone")
    await director.expect_round(1, names)
    await director.expect_round(2, names)


async def test_a_node_that_dies_ends_the_wait_with_its_last_words(director: demo._Director) -> None:
    ada, ben = Played("ada"), Played("ben", {"what": "ended"})
    ben.process = await asyncio.create_subprocess_exec("false")
    await ben.process.wait()
    director._actors = {"ada": ada, "ben": ben}
    with pytest.raises(demo._Failed, match=r"ben ended with status 1 while it should say round(.|\n)*MemoryError"):
        await director.expect_round(0, {"ada", "ben"})


async def test_a_node_that_says_something_else_fails_the_demo(director: demo._Director) -> None:
    director._actors = {"ada": Played("ada", round_of(0, 0, size=2))}
    with pytest.raises(demo._Failed, match="should be in round 0 of 1"):
        await director.expect_round(0, {"ada"})
    director._actors = {"ada": Played("ada", {"what": "closed", "reason": ""})}
    with pytest.raises(demo._Failed, match="while it should say gone"):
        await director.hear({"ada"}, "gone")
