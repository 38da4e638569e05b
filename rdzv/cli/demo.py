"""Shell: `rdzv demo`: an elastic run on this machine with real processes, narrated and verified.

The nodes are processes of this very module (`python -m rdzv.cli.demo NODE [URL]`). The first hosts the store, on a port
that the system gives it, and says where. Each node meets the others, shares a value, does a small all-reduce over the
shared store, and reports in lines of JSON; then it trains on until its round changes. The parent starts them, kills
one, starts a replacement, checks every claim, and tells what happens when it happens.

Every node is judged by what it says itself, in its own order. On a busy machine one node may be a round ahead of what
another has said yet, or hear that others have left to meet again before it hears why; neither is a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread

import rdzv
from rdzv.cli.command import DONE, FAILED, command
from rdzv.core.state import Closed, Dropped, NodesLeft, NodesLost, NodesWaiting
from rdzv.errors import RoundSupersededError
from store.net.threads import loop_factory

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Callable

    from rdzv.membership import RendezvousInfo

__all__ = ["run"]

NODES: Final = ("ada", "ben", "cleo", "dan")
HOST = NODES[0]
VICTIM: Final = "cleo"  # not the host of the store, which ends with it
REPLACEMENT: Final = "eve"
VECTOR: Final = 4  # numbers in the all-reduce

STEP_WITHIN: Final = 120.0
"""Seconds for a step that takes a fraction of one: the machine may be busy. A node that dies ends the wait before."""

SETTINGS: Final = f"min_nodes=2&max_nodes={len(NODES)}&last_call_timeout={STEP_WITHIN:g}&ttl=60"
"""With a `ttl` and a last call so long that a machine that is merely busy loses no node, and no round is short of one;
a process that is killed is noticed by `gone_ttl`."""

LAST_WORDS: Final = 20  # lines of what a node wrote on standard error that are shown if it dies


# ------------------------------------------------------------------------------------------------- one node


async def _node(name: str, url: str | None = None) -> None:
    """Be one node, which hosts the store if it is told of none."""
    if url is not None:
        await _take_part(name, url)
        return
    async with rdzv.serve("127.0.0.1", 0) as server:
        url = f"{server.url}/demo?{SETTINGS}"
        _say("serves", url=url)
        await _take_part(name, url)
        await anyio.to_thread.run_sync(server.way_out.wait_until_alone, STEP_WITHIN)  # or the others lose it


async def _take_part(name: str, url: str) -> None:
    """Meet, compute, and meet again whenever somebody has gone or come, until the run is closed."""
    async with rdzv.connect(url, node_id=name, is_host=False) as handler, handler.changes() as changes:
        while True:
            info = await handler.next_rendezvous()
            with contextlib.suppress(RoundSupersededError):  # the round changed in the middle of it: meet again
                total = await _all_reduce(info, [float(info.rank + 1)] * VECTOR)
                _say("round", round=info.round, rank=info.rank, size=info.world_size, total=total)
            async for change in changes:
                match change:
                    case NodesLost(node_ids=ids) | NodesLeft(node_ids=ids):
                        _say("gone", round=info.round, nodes=list(ids))
                        break
                    case NodesWaiting(count=count) if count:
                        _say("waiting", round=info.round, count=count)
                        break
                    case Closed(reason=reason):
                        _say("closed", reason=reason)
                        return
                    case Dropped():
                        break  # it was away for too long, and the others have gone on: meet them again


async def _all_reduce(info: RendezvousInfo, vector: list[float]) -> list[float]:
    """Sum the members' vectors, over the shared store alone."""
    await info.store.set(f"vector/{info.rank}", json.dumps(vector))
    parts = [json.loads(await info.store.get(f"vector/{rank}")) for rank in range(info.world_size)]
    return [sum(column) for column in zip(*parts, strict=True)]


def _end_with_the_director() -> None:
    """Wait for the end of what nobody writes: then the director is gone, by SIGKILL perhaps."""
    sys.stdin.read()
    os._exit(1)


def _say(what: str, **details: Any) -> None:
    print(json.dumps({"what": what, **details}), flush=True)


# ---------------------------------------------------------------------------------------------- the director


class _Failed(Exception):
    """A step did not go as promised."""


class _Actor:
    """A node's process, as the director sees it: what it says, in its own order."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self._said: asyncio.Queue[tuple[float, dict[str, Any]]] = asyncio.Queue()
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)

    async def read(self) -> None:
        """Take down what it says until it has ended."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        async with anyio.create_task_group() as reading:
            reading.start_soon(self._read_last_words, self.process.stderr)
            async for line in self.process.stdout:
                self._said.put_nowait((time.monotonic(), json.loads(line)))
        await self.process.wait()
        self._said.put_nowait((time.monotonic(), {"what": "ended"}))

    async def _read_last_words(self, lines: AsyncIterator[bytes]) -> None:
        async for line in lines:
            self._last_words.append(line.decode(errors="replace").rstrip())

    async def hear(self, *what: str, passing_over: tuple[str, ...] = ()) -> dict[str, Any]:
        """Wait until it says one of these; it may say the others before."""
        while True:
            at, said = await self._said.get()
            if said["what"] in what:
                return {**said, "at": at}
            if said["what"] == "ended":
                words = "".join(f"\n    {line}" for line in self._last_words)
                raise _Failed(
                    f"{self.name} ended with status {self.process.returncode} while it should say {' or '.join(what)}"
                    f"{'; its last words:' if words else ', without a word'}{words}"
                )
            if said["what"] not in passing_over:
                raise _Failed(f"{self.name} said {said} while it should say {' or '.join(what)}")


class _Director:
    """Starts and kills the nodes, and checks what they say."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._actors: dict[str, _Actor] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._began = time.monotonic()

    def narrate(self, text: str) -> None:
        self._tell(f"{(time.monotonic() - self._began) * 1000:7.0f} ms  {text}")

    async def start(self, name: str, *url: str) -> None:
        # Ctrl-C is for the director, who ends them: else each would print where in its imports it was hit.
        command = (sys.executable, "-m", "rdzv.cli.demo", name, *url)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        actor = self._actors[name] = _Actor(name, process)
        self._readers.append(asyncio.create_task(actor.read()))

    def kill(self, name: str) -> float:
        self._actors[name].process.kill()
        return time.monotonic()

    async def hear(self, names: set[str], *what: str, passing_over: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        """Wait until each of these nodes has said one of these things; what each said.

        Raises:
            _Failed: One of them says something else, or has ended, or the time is up.
        """
        heard: dict[str, dict[str, Any]] = {}

        async def listen(name: str) -> None:
            heard[name] = await self._actors[name].hear(*what, passing_over=passing_over)

        listeners = [asyncio.create_task(listen(name)) for name in sorted(names)]
        try:
            await asyncio.wait(listeners, timeout=STEP_WITHIN, return_when=asyncio.FIRST_EXCEPTION)
        finally:  # Ctrl-C cancels the wait alone
            for listener in listeners:
                listener.cancel()
            ended = await asyncio.gather(*listeners, return_exceptions=True)
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure
        if missing := sorted(names - heard.keys()):
            raise _Failed(f"{', '.join(missing)} did not say {' or '.join(what)} within {STEP_WITHIN:g} s")
        return heard

    async def expect_round(self, number: int, names: set[str]) -> float:
        """Verify that these nodes, and no others, make up a round whose sums are right; when the last had it."""
        heard = await self.hear(names, "round", passing_over=("gone", "waiting"))
        size = len(names)
        total = [size * (size + 1) / 2] * VECTOR
        for name, said in heard.items():
            if said["round"] != number or said["size"] != size or said["total"] != total:
                raise _Failed(f"{name} should be in round {number} of {size} with total {total}, and said {said}")
        if sorted(said["rank"] for said in heard.values()) != list(range(size)):
            raise _Failed(f"the ranks are not 0 to {size - 1}: {heard}")
        ranks = ", ".join(
            f"{said['rank']} {name}" for name, said in sorted(heard.items(), key=lambda one: one[1]["rank"])
        )
        self.narrate(f"round {number} is complete, world size {size}: {ranks}")
        self.narrate(f"all-reduce over the shared store: every node has {total}")
        return max(float(said["at"]) for said in heard.values())

    async def end(self) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(ProcessLookupError):
                actor.process.kill()
        await asyncio.gather(*self._readers, return_exceptions=True)  # each until its process has ended


async def run(tell: Callable[[str], None]) -> bool:
    """Play the whole piece; True if every step was verified.

    Args:
        tell: Is given each line as it happens.
    """
    director = _Director(tell)
    try:
        await _play(director)
    except _Failed as failure:
        director.narrate(f"FAILED: {failure}")
        return False
    finally:
        with anyio.CancelScope(shield=True):
            await director.end()
    director.narrate("every step was verified")
    return True


async def _play(director: _Director) -> None:
    everyone = set(NODES)
    await director.start(HOST)
    url: str = (await director.hear({HOST}, "serves"))[HOST]["url"]
    director.narrate(f"{HOST} starts and hosts the store: {url}")
    for name in NODES[1:]:
        await director.start(name, url)
        director.narrate(f"{name} starts")
    await director.expect_round(0, everyone)

    survivors = everyone - {VICTIM}
    director.narrate(f"SIGKILL for {VICTIM}")
    killed_at = director.kill(VICTIM)
    gone = await director.hear(survivors, "gone")
    # A slow node may be told first that the others have left in order to meet again; but somebody began.
    if not any(VICTIM in said["nodes"] for said in gone.values()):
        raise _Failed(f"nobody misses {VICTIM}: {gone}")
    told = max(said["at"] for said in gone.values()) - killed_at
    director.narrate(f"the survivors were told {told * 1000:.0f} ms after the kill, and meet again")
    regrouped = await director.expect_round(1, survivors) - killed_at
    director.narrate(f"from SIGKILL to the next round: {regrouped * 1000:.0f} ms, most of it gone_ttl (100 ms)")

    director.narrate(f"{REPLACEMENT} starts, as a replacement")
    started_at = time.monotonic()
    await director.start(REPLACEMENT, url)
    everyone = survivors | {REPLACEMENT}
    admitted = await director.expect_round(2, everyone) - started_at
    director.narrate(f"from start to admission: {admitted * 1000:.0f} ms, most of it starting Python")

    async with rdzv.connect(url, is_host=False) as handler:
        await handler.set_closed("the demo is over")
    closed = await director.hear(everyone, "closed")
    if {said["reason"] for said in closed.values()} != {"the demo is over"}:
        raise _Failed(f"the reason for closing did not reach everyone: {closed}")
    director.narrate("the run is closed, and every node was told why")
    await director.hear(everyone, "ended")
    director.narrate("every node has ended")


@command("demo", "an elastic run on this machine: join, kill, regroup, grow, close")
async def _demo(_: argparse.Namespace) -> int:
    return DONE if await run(print) else FAILED


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_director, daemon=True).start()
    with asyncio.Runner(loop_factory=loop_factory()) as _runner:
        _runner.run(_node(*sys.argv[1:3]))
