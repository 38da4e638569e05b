"""Kills etcd's leader repeatedly, restarts its members in turn, and checks that nothing was lost or repeated.

    python -m benchmarks.etcd_faults [--kills 100] [--adds 40000] [--rounds 20] [--watchers 150] [--nodes 300]
    RDZV_TEST_ETCD=path/to/etcd python -m benchmarks.etcd_faults                    # another release

Three members on this machine. While clients increment one key, the leader is killed and returns, `--kills` times; then
the key must hold the sum, and each client must have seen growing sums. While nodes meet repeatedly, the leader is
killed at a random moment of each round; all members must agree on every round. After a rolling restart, and the next
tick of their slow clock, the watchers of many clients must be spread over the members again. Many waiting nodes must
not cost the cluster its leader.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

import rdzv
from benchmarks import support
from store.etcd import members as members_room
from store.etcd.client import Client
from store.etcd.codec import Endpoints
from tests.support.etcd import Etcd, Member, serve_etcd
from tests.support.runs import assert_one_round

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.etcd.watch import Watch

T = TypeVar("T")

WRITERS = 8
PATIENCE = 120.0  # seconds for any one thing
DOWN = (0.0, 0.5)  # seconds until a killed leader returns
UP = (0.5, 2.0)  # seconds between its return and the next kill


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work."""
    return await anyio.to_thread.run_sync(work)


async def kill_leader(etcd: Etcd) -> None:
    """Kill the leader, and start it again."""
    leader = await in_thread(etcd.leader)
    await in_thread(leader.kill)
    await anyio.sleep(random.uniform(*DOWN))
    leader.start()
    await in_thread(etcd.wait_until_ready)


async def count(etcd: Etcd, adds: int, kills: int) -> None:
    """Increment one key by several clients, over `kills` deaths of the leader."""
    done = killed = 0

    async def write() -> None:
        nonlocal done
        async with Client(Endpoints.parse(etcd.url), timeout=PATIENCE) as client:
            last = 0
            while done < adds or killed < kills:
                done += 1
                total = await client.add("count", 1)
                assert total > last, f"{total} after {last}"
                last = total

    async def kill() -> None:
        nonlocal killed
        while killed < kills:
            await anyio.sleep(random.uniform(*UP))
            await kill_leader(etcd)
            killed += 1

    began = time.monotonic()
    await asyncio.gather(kill(), *(write() for _ in range(WRITERS)))
    async with Client(Endpoints.parse(etcd.url), timeout=PATIENCE) as client:
        total = await client.add("count", 0)
    seconds = time.monotonic() - began
    print(f"{done} adds through {killed} kills of the leader came to {total}, in {seconds:.0f} s", flush=True)
    assert total == done


async def meet(etcd: Etcd, rounds: int) -> None:
    """Have four nodes meet repeatedly, and kill the leader during each round."""
    url = f"{etcd.url}/meet-{random.getrandbits(32):x}?min_nodes=4&join_timeout={PATIENCE:g}"
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(rdzv.connect(url, node_id=f"n{number}")) for number in range(4)]
        took = []
        for number in range(rounds):
            began = time.monotonic()
            meeting = [asyncio.create_task(node.next_rendezvous()) for node in nodes]
            await anyio.sleep(random.uniform(0, 0.05))
            killing = asyncio.create_task(kill_leader(etcd))
            infos = await asyncio.gather(*meeting)
            took.append(time.monotonic() - began)
            assert_one_round(infos)
            assert infos[0].round == number
            await killing
    print(f"{rounds} rounds of 4 nodes, the leader killed in each: all agree; worst {max(took):.1f} s", flush=True)


async def spread(etcd: Etcd, watchers: int) -> None:
    """Restart the members in turn; check the watchers' members before, right after, and after their slow clock."""
    balance, members_room.BALANCE_AFTER = members_room.BALANCE_AFTER, 10.0
    try:
        async with AsyncExitStack() as stack:
            for _ in range(watchers):
                client = await stack.enter_async_context(Client(Endpoints.parse(etcd.url)))
                watch = await stack.enter_async_context(client.watch("spread/", snapshot=True))
                stack.push_async_callback(_ended, asyncio.create_task(_follow(watch)))
            print(f"{watchers} watchers: {_shown(etcd)} at first", end="", flush=True)
            for member in etcd.members:
                await in_thread(member.kill)
                member.start()
                await in_thread(etcd.wait_until_ready)
                await anyio.sleep(2)
            print(f", {_shown(etcd)} after a rolling restart", end="", flush=True)
            await anyio.sleep(20)
            print(f", {_shown(etcd)} after two of the slow clock's turns", flush=True)
    finally:
        members_room.BALANCE_AFTER = balance


async def _follow(watch: Watch) -> None:
    async for _ in watch:
        pass


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _shown(etcd: Etcd) -> str:
    return "/".join(str(watchers_of(member)) for member in etcd.members)


def watchers_of(member: Member) -> int:
    """Return the number of watchers of a member."""
    for line in member.get("/metrics", timeout=10).decode().splitlines():
        if line.startswith("etcd_debugging_mvcc_watcher_total "):
            return int(float(line.rpartition(" ")[2]))
    return 0


def leader_changes(etcd: Etcd) -> float:
    """Return the most that any member has seen."""
    return max(
        float(line.rpartition(" ")[2])
        for member in etcd.members
        for line in member.get("/metrics", timeout=10).decode().splitlines()
        if line.startswith("etcd_server_leader_changes_seen_total ")
    )


async def keep_leader(etcd: Etcd, nodes: int, seconds: float) -> None:
    """Let `nodes` nodes arrive at once and wait, and check that the cluster keeps its leader."""
    url = f"{etcd.url}/many-{random.getrandbits(32):x}?min_nodes={nodes + 1}&join_timeout=3600"
    before = leader_changes(etcd)
    async with AsyncExitStack() as stack:
        connecting = (stack.enter_async_context(rdzv.connect(url, node_id=f"n{number}")) for number in range(nodes + 1))
        handlers = [await one for one in connecting]
        meeting = [asyncio.create_task(handler.next_rendezvous()) for handler in handlers[:-1]]
        await anyio.sleep(seconds)
        changes = leader_changes(etcd) - before
        began = time.monotonic()
        meeting.append(asyncio.create_task(handlers[-1].next_rendezvous()))
        infos = await asyncio.gather(*meeting)
        took = time.monotonic() - began
        assert len({info.rank for info in infos}) == nodes + 1
    print(
        f"{nodes} nodes waited for {seconds:g} s on three members: {changes:g} changes of leader; "
        f"their round took {took * 1000:.0f} ms",
        flush=True,
    )


async def play(options: argparse.Namespace) -> None:
    with serve_etcd(3) as etcd:
        if options.nodes:
            await keep_leader(etcd, options.nodes, options.idle)
        if options.watchers:
            await spread(etcd, options.watchers)
        if options.rounds:
            await meet(etcd, options.rounds)
        if options.adds:
            await count(etcd, options.adds, options.kills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of the leader, at least, while it is counted")
    parser.add_argument("--adds", type=int, default=40_000, help="to one key, by all clients together")
    parser.add_argument("--rounds", type=int, default=20, help="of four nodes, the leader killed in each")
    parser.add_argument("--watchers", type=int, default=150, help="of clients of their own")
    parser.add_argument("--nodes", type=int, default=300, help="that wait")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds for which they do")
    print(support.describe_machine())
    asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
