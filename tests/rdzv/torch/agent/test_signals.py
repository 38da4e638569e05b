"""Agents of torchrun that get a signal: while they wait, while the store does not answer, and as they host it."""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import store
from tests.support.processes import Child, free_port, require, start, start_python
from tests.support.saving import saves

require("torch")

from rdzv.torch import pytorch  # noqa: E402
from rdzv.torch.agent.signals import AGAIN_AFTER, LEAVES_WITHIN  # noqa: E402

SLEEPER = """
import os, time

agent = os.getppid()
print("begun", flush=True)
while os.getppid() == agent:  # workers lead sessions of their own, and survive an agent that is killed
    time.sleep(0.05)
"""

STUBBORN = f"import signal; signal.signal(signal.SIGTERM, lambda *_: print('told SIGTERM', flush=True)){SLEEPER}"

pytestmark = pytest.mark.timeout(240)


class Agents:
    """The agents at one endpoint."""

    def __init__(
        self, folder: Path, port: int, stack: contextlib.AsyncExitStack, *, script: str = SLEEPER, more: str = ""
    ) -> None:
        self._script = folder / "train.py"
        self._script.write_text(script, encoding="utf-8")
        self._at = f"--rdzv-endpoint=127.0.0.1:{port}{more}"
        self._stack = stack

    async def start(self, run: str, *options: str) -> Child:
        named = ("--rdzv-backend=rdzv", self._at, f"--rdzv-id={run}", *options)
        command = (sys.executable, "-m", "rdzv.torchrun", *named, str(self._script))
        return await self._stack.enter_async_context(start(*command, env={"OMP_NUM_THREADS": "1"}))


@pytest.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


async def ended(agent: Child, number: signal.Signals) -> float:
    """Send a signal to an agent. Return the seconds until its end."""
    began = time.monotonic()
    agent.send_signal(number)
    assert await agent.wait() != 0
    assert "Traceback" not in agent.written()
    assert f"this agent ends, since it was told to end by {number.name}" in agent.written()
    return time.monotonic() - began


@pytest.mark.in_ci
@pytest.mark.parametrize("pair", ["TERM TERM", "TERM INT", "INT QUIT", "HUP TERM"])
@pytest.mark.parametrize("pause", [0.004, 0.3])
async def test_of_two_signals_within_a_second_the_workers_get_one(
    pair: str, pause: float, tmp_path: Path, stack: contextlib.AsyncExitStack
) -> None:
    """Regression: PyTorch's agent signalled its workers again at the second, in the middle of their checkpoint."""
    first, second = (signal.Signals[f"SIG{name}"] for name in pair.split())
    agents = Agents(tmp_path, free_port(), stack, script=saves(1))
    agent = await agents.start("job", "--nnodes=1")
    await agent.says("ready")
    agent.send_signal(first)
    await asyncio.sleep(pause)
    agent.send_signal(second)
    await agent.wait()
    assert [line for line in agent.output if "saved" in line] == [f"saved after {first.name}"]
    assert f"this agent ends, since it was told to end by {first.name}" in agent.written()
    assert "Traceback" not in agent.written()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_waiting_agent_leaves_and_does_not_close_the_run(
    number: signal.Signals, tmp_path: Path, stack: contextlib.AsyncExitStack
) -> None:
    agents = Agents(tmp_path, free_port(), stack)
    host = await agents.start("job", "--nnodes=1")
    await host.says("begun")
    spare = await agents.start("job", "--nnodes=1")
    await spare.says("1 spare")
    await ended(spare, number)
    assert "is closed" not in host.written()
    newcomer = await agents.start("job", "--nnodes=1")
    await newcomer.says("1 spare")  # the run is still open


@pytest.mark.some_of(2)
@pytest.mark.parametrize("answers", [True, False], ids=["a store that answers", "a store that stands still"])
@pytest.mark.parametrize(
    ("nodes", "waits"),
    [("--nnodes=9", "of at least 9 nodes"), ("--nnodes=1:9", "live member to leave"), ("--nnodes=1", " spare")],
    ids=["the first round", "a newcomer", "a spare"],
)
async def test_ctrl_c_ends_a_waiting_agent_within_two_seconds(
    nodes: str, waits: str, answers: bool, tmp_path: Path, stack: contextlib.AsyncExitStack
) -> None:
    """Regression: as long as the store stood still, nothing happened. Of three agents the quickest counts."""
    port = free_port()
    agents = Agents(tmp_path, port, stack)
    server = await stack.enter_async_context(start_python("-m", "rdzv", "serve", "--port", str(port)))
    await server.says("listens on")
    options = (nodes, "--rdzv-conf=ttl=100")
    if "9 nodes" not in waits:
        member = await agents.start("job", *options)
        await member.says("begun")
        if "leave" in waits:
            member.stop()
    three = [await agents.start("job", *options) for _ in range(3)]
    for agent in three:
        await agent.says(waits)
    if not answers:
        server.stop()
        for agent in three:
            await agent.says("has not answered for")
    assert LEAVES_WITHIN < 2
    assert min([await ended(agent, signal.SIGINT) for agent in three]) < 5, "2 s where the machine is not busy"
    server.resume()
    async with store.connect(f"tcp://127.0.0.1:{port}") as client:
        assert await client.get("/rdzv/job/head/closed") is None


async def test_an_agent_that_was_told_to_end_does_not_host_the_next_store_at_once(
    tmp_path: Path, stack: contextlib.AsyncExitStack
) -> None:
    """Regression: while PyTorch stopped its workers it became the next host, and its store ended soon afterwards."""
    ports = free_port(), free_port()
    agents = Agents(tmp_path, ports[0], stack, script=STUBBORN, more=f",127.0.0.1:{ports[1]}")
    both = [await agents.start("job", "--nnodes=2") for _ in range(2)]
    for one in both:
        await one.says("begun")
    host, leaves = sorted(both, key=lambda one: "and serves the store" not in one.written())
    leaves.terminate()
    await leaves.says("told SIGTERM")  # from its worker
    host.kill()
    await host.wait()
    until = time.monotonic() + 2
    while time.monotonic() < until:
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.1)


@pytest.mark.skipif(pytorch.RELEASE < (2, 5), reason="agents of 2.4 heed a second signal as they handle the first")
async def test_an_agent_hosts_the_store_until_other_jobs_have_ended_or_a_second_signal(
    tmp_path: Path, stack: contextlib.AsyncExitStack
) -> None:
    """Regression: its SIGTERM ended the other job, too. A second SIGTERM within a second counts as the same one."""
    agents = Agents(tmp_path, free_port(), stack)
    host = await agents.start("one", "--nnodes=1")
    await host.says("begun")
    other = await agents.start("other", "--nnodes=1")
    await other.says("begun")
    assert f"(process {host.pid} on " in other.written()
    assert "; run one, node " in other.written()
    host.terminate()
    host.terminate()
    await host.says("1 of run other use it: its process stays")
    assert host.returncode is None
    assert "nobody listens" not in other.written()
    await asyncio.sleep(AGAIN_AFTER)
    host.terminate()
    assert await host.wait() == 128 + signal.SIGTERM
    await other.says("nobody listens")
