"""`rdzv demo` plays an elastic run with real processes on this machine, prints each event, and verifies the run.

Each node is a process of this module. Their parent, the director, serves the store and checks what they print as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import anyio

import rdzv
import store
from rdzv.cli.command import DONE, FAILED, command, say
from store.net.tasks import cancel_and_wait
from store.net.threads import new_loop

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from rdzv.loop.rounds import Round

NODES: Final = ("ada", "ben", "cleo", "dan")
VICTIM: Final = "cleo"
REPLACEMENT: Final = "eve"
REACHED_WITHIN: Final = 5.0  # seconds to connect to the store over loopback
VECTOR: Final = 4  # numbers in the all-reduce
STEP_WITHIN: Final = 120.0  # seconds for each step; only on a busy machine does a step take more than one

SETTINGS: Final = f"min_nodes=2&max_nodes={len(NODES)}&last_call_timeout={STEP_WITHIN:g}&ttl=60"
"""On a busy machine no node is lost, and no round begins without a slow node; a killed process is noticed at once."""

LAST_WORDS: Final = 20  # lines of a dead node's output that are shown


async def _run_demo_node(name: str, url: str) -> None:
    async for round in rdzv.rounds(url, node_id=name, is_host=False):
        async with round:
            total = await _all_reduce(round, [float(round.rank + 1)] * VECTOR)
            _print_json_line("round", round=round.number, rank=round.rank, size=round.world_size, total=total)
            await anyio.sleep_forever()
        _print_json_line("over", reason="" if round.ending is None else round.ending.reason)


async def _all_reduce(round: Round, vector: list[float]) -> list[float]:
    await round.store.set(f"vector/{round.rank}", json.dumps(vector))
    parts = [json.loads(await round.store.get(f"vector/{rank}")) for rank in range(round.world_size)]
    return [sum(column) for column in zip(*parts, strict=True)]


def _print_json_line(what: str, **details: Any) -> None:
    print(json.dumps({"what": what, **details}), flush=True)


def _exit_when_director_ends() -> None:
    """Exit when standard input ends: the director has ended, perhaps by SIGKILL."""
    sys.stdin.read()
    os._exit(1)


class _DemoFailed(Exception):
    """A step of the demo had a wrong result."""


class _NodeProcess:
    def __init__(self, name: str, process: Process) -> None:
        self._name = name
        self.process = process
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self.reading = asyncio.create_task(self._read_output())

    async def _read_output(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.startswith(b"{"):
                self._said.put_nowait({**json.loads(line), "at": time.monotonic()})
            else:
                self._last_words.append(line.decode(errors="replace").rstrip())
        await self.process.wait()
        self._said.put_nowait({"what": "ended"})

    async def wait_for_reports(self, what: str) -> dict[str, Any]:
        while True:
            said = await self._said.get()
            if said["what"] == what:
                return said
            if said["what"] == "ended":
                words = "".join(f"\n    {line}" for line in self._last_words)
                raise _DemoFailed(
                    f"{self._name} ended with status {self.process.returncode} while it should say {what!r}"
                    f"{'; its last words:' if words else ', without a word'}{words}"
                )


class _DemoDirector:
    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._actors: dict[str, _NodeProcess] = {}
        self._began = time.monotonic()

    def narrate(self, text: str) -> None:
        self._tell(f"{(time.monotonic() - self._began) * 1000:7.0f} ms  {text}")

    async def start_node(self, name: str, url: str, *, what: str = "starts") -> None:
        # In its own session the node gets no Ctrl-C: the director ends the node.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rdzv.cli.demo", name, url),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
        )
        self._actors[name] = _NodeProcess(name, process)
        self.narrate(f"{name} {what}")

    def kill_node(self, name: str) -> float:
        self.narrate(f"SIGKILL to {name}")
        self._actors[name].process.kill()
        return time.monotonic()

    async def wait_for_reports(self, names: set[str], what: str) -> dict[str, dict[str, Any]]:
        """Wait until each of these nodes has printed a report of the kind `what`; return the reports by node."""
        listening = {name: asyncio.create_task(self._actors[name].wait_for_reports(what)) for name in names}
        try:
            await asyncio.wait(listening.values(), timeout=STEP_WITHIN, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            silent = [task for task in listening.values() if not task.done()]
            await cancel_and_wait(*silent)
        heard = {name: task.result() for name, task in listening.items() if task not in silent}
        if silent:
            raise _DemoFailed(f"not all of {', '.join(names)} said {what!r} within {STEP_WITHIN:g} s")
        return heard

    async def expect_round(self, number: int, names: set[str]) -> float:
        """Verify that exactly these nodes form a round with correct sums; return the time of the last report."""
        heard = await self.wait_for_reports(names, "round")
        size = len(names)
        total = [size * (size + 1) / 2] * VECTOR
        for name, said in heard.items():
            if said["round"] != number or said["size"] != size or said["total"] != total:
                raise _DemoFailed(f"{name} should be in round {number} of {size} with total {total}, and said {said}")
        by_rank = sorted((said["rank"], name) for name, said in heard.items())
        if [rank for rank, _ in by_rank] != list(range(size)):
            raise _DemoFailed(f"the ranks are not 0 to {size - 1}: {heard}")
        ranks = ", ".join(f"{name} has rank {rank}" for rank, name in by_rank)
        self.narrate(f"round {number} is complete with {size} nodes: {ranks}")
        self.narrate(f"all-reduce over the round's store: each node has {total}")
        return max(float(said["at"]) for said in heard.values())

    async def kill_all(self) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(ProcessLookupError):
                actor.process.kill()
        if self._actors:
            await asyncio.wait([actor.reading for actor in self._actors.values()])


async def _play_demo(director: _DemoDirector) -> None:
    everyone = set(NODES)
    async with store.serve("127.0.0.1", 0) as server:
        url = f"{server.url}/demo?{SETTINGS}"
        try:
            async with store.connect(server.url, timeout=REACHED_WITHIN):
                pass
        except store.StoreError as error:
            raise _DemoFailed(f"{error}; is the loopback interface up? ip link set lo up") from None
        director.narrate(f"a store listens at {server.url}; {len(NODES)} nodes, each a process, will meet at it")
        for name in NODES:
            await director.start_node(name, url)
        await director.expect_round(0, everyone)

        survivors = everyone - {VICTIM}
        killed_at = director.kill_node(VICTIM)
        over = await director.wait_for_reports(survivors, "over")
        # One such report is enough: a slow node may only report that others meet again.
        if not any(VICTIM in said["reason"] for said in over.values()):
            raise _DemoFailed(f"nobody misses {VICTIM}: {over}")
        told = max(said["at"] for said in over.values()) - killed_at
        director.narrate(f"the survivors were told of it {told * 1000:.0f} ms later, and meet again")
        regrouped = await director.expect_round(1, survivors) - killed_at
        director.narrate(
            f"from SIGKILL to the next round: {regrouped * 1000:.0f} ms; for 100 ms {VICTIM} could reconnect"
        )

        started_at = time.monotonic()
        await director.start_node(REPLACEMENT, url, what=f"starts, in place of {VICTIM}")
        everyone = survivors | {REPLACEMENT}
        admitted = await director.expect_round(2, everyone) - started_at
        director.narrate(f"{REPLACEMENT} was in a round after {admitted * 1000:.0f} ms, most of it the start of Python")

        async with rdzv.connect(url, is_host=False) as handler:
            await handler.set_closed("the demo is over")
        closed = await director.wait_for_reports(everyone, "over")
        if not all("the demo is over" in said["reason"] for said in closed.values()):
            raise _DemoFailed(f"the reason for closing did not reach everyone: {closed}")
        director.narrate("the run is closed, and every node was told why: the demo is over")
        await director.wait_for_reports(everyone, "ended")
        director.narrate("every node has ended")


@command("demo", "an elastic run on this machine: join, kill, regroup, grow, close", ends_in_order=True)
async def _run_demo(_: argparse.Namespace) -> int:
    director = _DemoDirector(say)
    try:
        await _play_demo(director)
    except _DemoFailed as failure:
        director.narrate(f"FAILED: {failure}")
        return FAILED
    finally:
        with anyio.CancelScope(shield=True):
            await director.kill_all()
    director.narrate("every step was verified")
    return DONE


if __name__ == "__main__":
    threading.Thread(target=_exit_when_director_ends, daemon=True).start()
    with asyncio.Runner(loop_factory=new_loop) as _runner:
        _runner.run(_run_demo_node(*sys.argv[1:3]))
