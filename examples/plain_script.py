"""A plain script under `rdzv run`, which only knows its rank, the world size, and rank 0's address.

    python examples/plain_script.py

Three nodes count primes together. Without a rank, this file starts them, each as a user would:

    rdzv run 'tcp://127.0.0.1:29400/primes?min_nodes=2&max_nodes=3' -- python examples/plain_script.py

One node is killed with SIGKILL while they count. None of its processes stays; the scripts of the other two are stopped,
get new ranks, and count everything. When all have succeeded, the run is closed and every launcher ends with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process

BELOW = 20_000
TOTAL = 2_262  # primes below that
SHARE_TIME = 2.0  # seconds; without it the example would end before the kill


def count(rank: int, world_size: int) -> int:
    """Count the primes in this rank's share of the numbers."""
    time.sleep(SHARE_TIME / world_size)
    mine = range(2 + rank, BELOW, world_size)
    return sum(all(number % divisor for divisor in range(2, int(number**0.5) + 1)) for number in mine)


def script() -> None:
    """Run under `rdzv run`."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting_point = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    print(f"rank {rank} of {world_size} counts", flush=True)
    if rank > 0:
        found = count(rank, world_size)
        with _connect(meeting_point) as peer:
            peer.sendall(f"{found}\n".encode())
        return
    with socket.create_server(meeting_point) as server:
        total = count(rank, world_size)
        for _ in range(world_size - 1):
            peer, _ = server.accept()
            with peer, peer.makefile() as lines:
                total += int(lines.readline())
    print(f"{total} primes below {BELOW}", flush=True)


def _connect(address: tuple[str, int]) -> socket.socket:
    """Connect to rank 0, which may start a little later."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


# ------------------------------------------------------------------------------------------ the nodes, on one machine


async def start(url: str, name: str, ending: contextlib.ExitStack) -> Process:
    """Start one node, which ends with this process."""
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rdzv", "run", f"{url}&node_id={name}", "--", sys.executable, __file__), stdout=PIPE
    )
    ending.callback(end, node)
    return node


def end(process: Process) -> None:
    """End a process that still runs."""
    if process.returncode is None:
        process.terminate()


async def lines_of(name: str, node: Process, *, until: str) -> str:
    """Print a node's lines until one contains this text."""
    assert node.stdout is not None
    async for line in node.stdout:
        text = line.decode().rstrip()
        print(f"{name}: {text}", flush=True)
        if until in text:
            return text
    raise AssertionError(f"{name} never said {until!r}")


async def main() -> None:
    """Start three nodes, kill one, and check the results of the others."""
    with contextlib.ExitStack() as ending:
        await tell(ending)


async def tell(ending: contextlib.ExitStack) -> None:
    """Play the example; its nodes end with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}/primes?min_nodes=2&max_nodes=3&rank_order=name"
    ada = await start(url, "ada", ending)  # hosts the store
    others = {name: await start(f"{url}&is_host=no", name, ending) for name in ("ben", "cleo")}
    await asyncio.gather(
        lines_of("ada", ada, until="of 3 counts"),
        *(lines_of(name, node, until="of 3 counts") for name, node in others.items()),
    )
    print("SIGKILL for cleo", flush=True)
    others["cleo"].kill()
    await lines_of("ada", ada, until="rank 0 of 2 counts")
    told = await lines_of("ada", ada, until=f"{TOTAL} primes below {BELOW}")
    assert await ada.wait() == 0
    assert await others["ben"].wait() == 0
    await others["cleo"].wait()
    print(f"verified: {told.removeprefix('[0] ')}, counted by two after the death of the third", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        script()
    else:
        asyncio.run(main())
