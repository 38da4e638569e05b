"""Shell: `rdzv demo`: an elastic run on this machine with real processes, narrated and verified.

The nodes are processes of this very module (`python -m rdzv.cli.demo URL NODE`). Each meets the others, shares a value,
does a small all-reduce over the shared store, and reports in lines of JSON; then it trains on until its round changes.
The parent starts them, kills one, starts a replacement, checks every claim, and tells what happens when it happens.
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
from typing import TYPE_CHECKING, Any

import anyio

import rdzv
from rdzv.core.state import Closed, Dropped, NodesLeft, NodesLost, NodesWaiting
from rdzv.errors import RoundSupersededError
from store.net.sockets import free_port
from store.net.threads import loop_factory

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.node.handler import RendezvousInfo

__all__ = ["run"]

NODES = ("ada", "ben", "cleo", "dan")
VICTIM = "cleo"
REPLACEMENT = "eve"
STEP_WITHIN = 30.0  # seconds; a step takes a fraction of one, unless the machine is busy with something else
VECTOR = 4  # numbers in the all-reduce


# ------------------------------------------------------------------------------------------------- one node


async def _node(url: str, name: str) -> None:
    """One node's life: meet, compute, and meet again whenever somebody has gone or come."""
    # Any of them would start the store if it came first; the one that is to be killed must not be the one that did.
    is_host = name == NODES[0]
    async with (
        rdzv.connect(url, node_id=name, is_host=is_host) as handler,
        handler.changes() as changes,
    ):
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


class _Director:
    """Starts and kills the nodes, and checks what they say."""

    def __init__(self, url: str, tell: Callable[[str], None]) -> None:
        self._url = url
        self._tell = tell
        self._processes: dict[str, Process] = {}
        self._said: asyncio.Queue[tuple[str, float, dict[str, Any]]] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []
        self._began = time.monotonic()

    def narrate(self, text: str) -> None:
        self._tell(f"{(time.monotonic() - self._began) * 1000:7.0f} ms  {text}")

    async def start(self, name: str) -> None:
        # Ctrl-C is for the director, who ends them: else each would print where in its imports it was hit.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rdzv.cli.demo", self._url, name), stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._processes[name] = process
        self._readers.append(asyncio.create_task(self._read(name, process)))

    async def _read(self, name: str, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._said.put_nowait((name, time.monotonic(), json.loads(line)))
        self._said.put_nowait((name, time.monotonic(), {"what": "ended"}))

    def kill(self, name: str) -> float:
        self._processes[name].kill()
        return time.monotonic()

    async def hear(self, what: str, names: set[str], *, ignoring: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        """Wait until each of these nodes has said this, and nothing unexpected."""
        heard: dict[str, dict[str, Any]] = {}
        try:
            with anyio.fail_after(STEP_WITHIN):
                while heard.keys() != names:
                    name, at, said = await self._said.get()
                    if said["what"] == what and name in names:
                        heard[name] = {**said, "at": at}
                    elif said["what"] not in ignoring:
                        raise _Failed(
                            f"{name} said {said} while {', '.join(sorted(names - heard.keys()))} should say {what}"
                        )
        except TimeoutError:
            missing = ", ".join(sorted(names - heard.keys()))
            raise _Failed(f"{missing} did not say {what!r} within {STEP_WITHIN:g} s") from None
        return heard

    async def expect_round(self, number: int, names: set[str]) -> float:
        """Verify that these nodes, and no others, make up a round whose sums are right; when the last had it."""
        heard = await self.hear("round", names, ignoring=("gone", "waiting", "ended"))
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
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes.values():
            await process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


async def run(tell: Callable[[str], None]) -> bool:
    """Play the whole piece; True if every step was verified.

    Args:
        tell: Is given each line as it happens.
    """
    url = f"tcp://127.0.0.1:{free_port()}/demo?min_nodes=2&max_nodes={len(NODES)}"
    director = _Director(url, tell)
    try:
        await _play(director, url)
    except _Failed as failure:
        director.narrate(f"FAILED: {failure}")
        return False
    finally:
        await director.end()
    director.narrate("every step was verified")
    return True


async def _play(director: _Director, url: str) -> None:
    everyone = set(NODES)
    director.narrate(f"{NODES[0]} starts and hosts the store: {url}")
    await director.start(NODES[0])
    for name in NODES[1:]:
        await director.start(name)
        director.narrate(f"{name} starts")
    await director.expect_round(0, everyone)

    survivors = everyone - {VICTIM}
    director.narrate(f"SIGKILL for {VICTIM}")
    killed_at = director.kill(VICTIM)
    gone = await director.hear("gone", survivors, ignoring=("ended", "round", "waiting"))
    for name, said in gone.items():
        if said["nodes"] != [VICTIM]:
            raise _Failed(f"{name} should miss {VICTIM}, and misses {said['nodes']}")
    told = max(said["at"] for said in gone.values()) - killed_at
    director.narrate(f"the survivors were told {told * 1000:.0f} ms after the kill, and meet again")
    regrouped = await director.expect_round(1, survivors) - killed_at
    director.narrate(f"from SIGKILL to the next round: {regrouped * 1000:.0f} ms, most of it disconnect_ttl (1 s)")

    director.narrate(f"{REPLACEMENT} starts, as a replacement")
    started_at = time.monotonic()
    await director.start(REPLACEMENT)
    await director.hear("waiting", survivors)
    admitted = await director.expect_round(2, survivors | {REPLACEMENT}) - started_at
    director.narrate(f"from start to admission: {admitted * 1000:.0f} ms, most of it starting Python")

    async with rdzv.connect(url, is_host=False) as handler:
        await handler.set_closed("the demo is over")
    closed = await director.hear("closed", survivors | {REPLACEMENT})
    if {said["reason"] for said in closed.values()} != {"the demo is over"}:
        raise _Failed(f"the reason for closing did not reach everyone: {closed}")
    director.narrate("the run is closed, and every node was told why")
    await director.hear("ended", survivors | {REPLACEMENT})
    director.narrate("every node has ended")


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_director, daemon=True).start()
    with asyncio.Runner(loop_factory=loop_factory()) as _runner:
        _runner.run(_node(*sys.argv[1:3]))
