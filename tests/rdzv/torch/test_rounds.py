"""In process: survivors of a loss go on with the state in memory, newcomers get it, and no process is restarted."""

import asyncio
import json
import os
import signal
import time
from datetime import timedelta
from typing import Any

import anyio
import pytest

import rdzv
import store
from rdzv.node.handler import Handler
from tests.support.processes import Child, free_port, require, start_python
from tests.support.twins import TWINS

require("torch")

import rdzv.torch  # noqa: E402


def parsed(program: Child) -> list[dict[str, Any]]:
    lines = [line for line in program.stdout if line.startswith("{")]
    return sorted((json.loads(line) for line in lines), key=lambda one: float(one["at"]))


async def test_a_killed_node_costs_no_restart_and_a_newcomer_gets_the_state(url: str, run_id: str) -> None:
    """Some members block and some await. One of the latter is killed in a collective, one joins, and one is drained."""
    run = f"{url}/{run_id}?min_nodes=2&max_nodes=4&last_call_timeout=1&is_host=false"
    names = "a,b*,c*,+d*,+e"
    async with start_python("-m", "tests.rdzv.torch.rounds_program", run, names, "80") as program:
        pids = {}
        for _ in names.split(","):
            started = json.loads(await program.line('"started"', timeout=30))
            pids[started["name"]] = started["pid"]
        await program.line('"step": 20,', timeout=60)
        os.kill(pids["b"], signal.SIGKILL)
        await program.line('"number": 1,', timeout=60)
        os.kill(pids["d"], signal.SIGUSR1)
        await program.line('"number": 2,', timeout=60)
        async with rdzv.connect(run) as handler:
            assert isinstance(handler, Handler)
            await handler.drain(within=600, reason="its turn", node_id="c")
        await program.line('"number": 3,', timeout=60)
        os.kill(pids["e"], signal.SIGUSR1)
        await program.wait(timeout=90)
        told = parsed(program)
    assert not [one for one in told if one["what"] == "error"], told
    done = {one["name"]: one["step"] for one in told if one["what"] == "done"}
    drained = done.pop("c")
    assert set(done) == {"a", "d", "e"}
    # After the same step all members have the same model, whichever rounds they were in.
    digests: dict[int, set[str]] = {}
    for one in told:
        if one["what"] == "step" and one["name"] != "b":
            digests.setdefault(one["step"], set()).add(one["digest"])
    last = max(digests)
    assert last >= 80
    assert sorted(digests) == list(range(1, last + 1))
    assert set(done.values()) == {last}, "all have come equally far"
    assert all(len(found) == 1 for found in digests.values()), "states have come apart"
    of_a = [one for one in told if one["what"] == "step" and one["name"] == "a"]
    steps = [one["step"] for one in of_a]
    assert steps == sorted(steps), "no step goes backwards"
    assert len(steps) - len(set(steps)) <= 1, "at most the one in flight of the kill is done again"
    assert of_a[-1]["loss"] < of_a[0]["loss"] / 2
    sizes = [one["size"] for one in told if one["what"] == "round" and one["name"] == "a"]
    assert sizes == [3, 2, 3, 2, 3]
    of_c = [one["step"] for one in told if one["what"] == "step" and one["name"] == "c"]
    before = [one["step"] for one in of_a if one["round"] < 3]
    assert drained == of_c[-1] == before[-1], "the drained and the other members leave before the same step"
    threads = {one["name"]: one["left"] for one in told if one["what"] == "threads"}
    assert threads == {"c": [], "d": []}, "a round's thread ends with it"


async def test_a_cancelled_body_does_not_wait_for_a_key_that_is_never_written(url: str, run_id: str) -> None:
    """Otherwise the round's thread waits for the store's timeout, and the code that cancelled the body waits for it."""
    async for round in rdzv.torch.rounds(f"{url}/{run_id}?min_nodes=1"):
        async with round:
            round.blocking_store.set_timeout(timedelta(seconds=20))
            began = time.monotonic()
            with anyio.move_on_after(0.1):
                await round.in_thread(round.blocking_store.get, "a key")
            assert time.monotonic() - began < 10


async def test_a_call_cancelled_before_its_work_begins_ends_no_other_call(url: str, run_id: str) -> None:
    ran: list[int] = []
    async for round in rdzv.torch.rounds(f"{url}/{run_id}?min_nodes=1"):
        async with round:
            works = asyncio.create_task(round.in_thread(round.blocking_store.get, "a key"))
            await asyncio.sleep(0)  # the task has called `in_thread`
            with anyio.move_on_after(0.1):
                await round.in_thread(ran.append, 1)
            await round.store.set("a key", b"value")
            assert (await works, ran) == (b"value", [])
        with pytest.raises(rdzv.RoundChanged, match="is over"):
            await round.sync_state()


GIVES_UP = """
import asyncio, sys
import rdzv, rdzv.torch

async def fail():
    raise rdzv.GiveUp("loss is NaN", status=93)

async def tasks():
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())

async def awaited():
    async for round in rdzv.torch.rounds(sys.argv[1]):
        async with round:
            await tasks()

try:
    if sys.argv[2] == "awaited":
        asyncio.run(awaited())
    else:
        for round in rdzv.torch.rounds(sys.argv[1]):
            with round:
                asyncio.run(tasks())
except rdzv.GiveUp as error:
    print("gave up:", error.reason, error.status, flush=True)
"""


@pytest.mark.parametrize("twin", TWINS)
async def test_a_verdict_in_a_group_of_tasks_ends_the_run(url: str, run_id: str, twin: str) -> None:
    at = f"{url}/{run_id}?min_nodes=1&max_nodes=1&is_host=false"
    async with start_python("-c", GIVES_UP, at, twin) as child:
        await child.says("gave up: loss is NaN 93")
    async with rdzv.connect(at) as late:
        with pytest.raises(rdzv.RendezvousClosedError) as closed:
            await late.next_rendezvous()
    assert (closed.value.given_up, closed.value.status) == (True, 93)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"timeout": 30}, r"timeout=30 .*timedelta\(seconds=30\).*join_timeout=30"),
        ({"timeout": timedelta(0)}, "above 0"),
        ({"backend": "glue"}, "backend='glue' is none that this PyTorch has"),
        ({"backend": "cpu:gloo,cuda:glue"}, "none that this PyTorch has"),
    ],
)
def test_invalid_options_of_the_group_are_an_error_before_the_node_joins(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(rdzv.RendezvousSettingsError, match=said):
        rdzv.torch.rounds("tcp://127.0.0.1:1/job?min_nodes=1", **wrong)


HOLDS_THE_GIL = """
import asyncio, os, sys
import rdzv, rdzv.sync, rdzv.torch

async def awaited(rounds):
    async for round in rounds:
        async with round:
            hold()

def hold():
    os.write(1, b"holds\\n")
    sum(range(10**12))  # in C

url, kind = sys.argv[1:]
if kind == "rdzv.rounds":
    asyncio.run(awaited(rdzv.rounds(url)))
elif kind == "rdzv.torch.rounds, awaited":
    asyncio.run(awaited(rdzv.torch.rounds(url)))
else:
    for round in (rdzv.torch if kind == "rdzv.torch.rounds" else rdzv.sync).rounds(url):
        with round:
            hold()
"""


@pytest.mark.parametrize("kind", ["rdzv.torch.rounds", "rdzv.torch.rounds, awaited", "rdzv.rounds", "rdzv.sync.rounds"])
async def test_a_loop_may_host_the_store_in_a_process_of_its_own(kind: str) -> None:
    """So the store serves the others while the program is in C code that holds the GIL."""
    url = f"tcp://127.0.0.1:{free_port()}"
    async with start_python("-c", HOLDS_THE_GIL, f"{url}/job?min_nodes=1&host=process", kind) as child:
        await child.line("holds")
        async with store.connect(url, timeout=5) as client:
            for number in range(100):
                await client.put("key", b"%d" % number, timeout=2)


TWO_LOOPS = """
import asyncio, contextlib, sys
import torch.distributed as dist
import rdzv, rdzv.torch

at = f"{sys.argv[1]}-%s?min_nodes=1&max_nodes=1&is_host=false"

async def second():
    async for round in rdzv.torch.rounds(at % "second"):
        print("mixed")

def refused():
    for begin in (lambda: next(rdzv.torch.rounds(at % "second")), lambda: asyncio.run(second())):
        try:
            begin()
        except rdzv.RendezvousStateError as error:
            assert "has a process group already" in str(error)
        else:
            raise AssertionError("two loops have a group")

for round in rdzv.torch.rounds(at % "first"):
    with round:
        refused()
        break
for round in rdzv.torch.rounds(at % "break-before-body"):
    break
for round in rdzv.torch.rounds(at % "after-break"):
    with round:
        pass
async def leave_before_body():
    async with contextlib.aclosing(rdzv.torch.rounds(at % "left-before-body")) as rounds:
        async for _ in rounds:
            break
asyncio.run(leave_before_body())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
refused()
dist.destroy_process_group()
left = rdzv.torch.rounds(at % "open-at-exit")
next(left)
print("all is well", flush=True)
"""


async def test_a_second_loop_is_refused_while_the_first_has_a_group(url: str, run_id: str) -> None:
    async with start_python("-c", TWO_LOOPS, f"{url}/{run_id}") as child:
        await child.says("all is well")
        assert await child.wait() == 0
        assert "mixed" not in child.output
    async with store.connect(url) as client:
        assert await client.count(f"/rdzv/{run_id}-first/") > 0
        assert await client.count(f"/rdzv/{run_id}-second/") == 0, "it is refused before its node joins"
