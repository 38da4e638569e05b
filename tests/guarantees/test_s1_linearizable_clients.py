"""S1: "An acknowledged request took effect once, at one moment between call and return.", seen by real clients.

`RDZV_KILLS` says how often a durable server is killed meanwhile; `RDZV_SEED` when, and what else goes wrong.
"""

import asyncio
import contextlib
import os
import random
from pathlib import Path

import pytest

import store
from store import ConnectionLost, StoreTimeoutError
from tests.support.linearizability import (
    Add,
    CompareAndSet,
    Delete,
    Get,
    Operation,
    Presence,
    Put,
    RegisterInput,
    RegisterModel,
    assert_linearizable,
    carry_out,
)
from tests.support.processes import free_port, start_python
from tests.support.proxy import Proxy
from tests.support.seeds import FRESH

KILLS = int(os.environ.get("RDZV_KILLS", "3"))
SEED = int(os.environ.get("RDZV_SEED", str(FRESH)))
CLIENTS = 5
OPERATIONS = 120  # of each client
KEYS = ("hot/0", "hot/1", "count")


def choose(rng: random.Random) -> RegisterInput:
    key = rng.choice(KEYS)
    value = b"%d" % rng.randrange(4)
    kinds: list[RegisterInput] = [
        Get(key),
        Put(key, value),
        Delete(key),
        Add(key, rng.randrange(1, 3)),
        CompareAndSet(key, value, b"%d" % rng.randrange(4)),
        CompareAndSet(key, value, Presence.MISSING),
    ]
    return rng.choice(kinds)


async def one(
    name: str, client: store.Client, rng: random.Random, history: list[Operation], *, patience: float
) -> None:
    """Send one operation, and record its outcome; every other one has a short timeout."""
    loop = asyncio.get_running_loop()
    wanted = choose(rng)
    call = loop.time()
    try:
        output = await carry_out(client, wanted, timeout=rng.choice([0.02, patience]))
    except (ConnectionLost, StoreTimeoutError) as error:
        if error.maybe_applied:
            history.append(Operation(client=name, call=call, input=wanted))
    else:
        history.append(Operation(client=name, call=call, returned=loop.time(), input=wanted, output=output))


async def use(name: str, url: str, rng: random.Random, history: list[Operation]) -> None:
    async with store.connect(url) as client:
        for _ in range(OPERATIONS):
            await one(name, client, rng, history, patience=5.0)


async def break_things(proxy: Proxy, rng: random.Random) -> None:
    proxy.cut_after(500)
    while True:
        match rng.randrange(4):
            case 0:
                proxy.cut_after(rng.randrange(1, 600))
            case 1:
                proxy.cut()
            case 2:
                proxy.black_hole()
                await asyncio.sleep(rng.uniform(0.01, 0.04))
                proxy.heal()
            case 3:
                proxy.delay = rng.uniform(0.0, 0.003)
        await asyncio.sleep(rng.uniform(0.05, 0.2))


@pytest.mark.parametrize("seed", [1, FRESH])
async def test_s1_histories_of_clients_behind_a_failing_network_are_linearizable(seed: int) -> None:
    history: list[Operation] = []
    async with store.serve() as server, contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy("127.0.0.1", server.port, delay=0.001)) for _ in range(2)]
        trouble = [
            asyncio.create_task(break_things(proxy, random.Random(f"{seed}/{number}")))
            for number, proxy in enumerate(proxies)
        ]
        urls = [f"tcp://127.0.0.1:{proxy.port}" for proxy in proxies]
        async with asyncio.timeout(20):
            await asyncio.gather(
                *[
                    use(f"client {number}", urls[number % 2], random.Random(f"{seed} {number}"), history)
                    for number in range(CLIENTS)
                ]
            )
        for task in trouble:
            task.cancel()
        await asyncio.gather(*trouble, return_exceptions=True)
        assert sum(proxy.connections for proxy in proxies) > CLIENTS, "nothing was broken"
    assert len(history) > CLIENTS * OPERATIONS // 2
    assert_linearizable(history, RegisterModel())


async def kill_again_and_again(
    directory: Path, port: int, history: list[Operation], rng: random.Random, over: asyncio.Event
) -> None:
    """Serve, and be killed under load, repeatedly. The last server runs on, until this is cancelled."""
    arguments = ("serve", "--port", str(port), "--data-dir", str(directory))
    for life in range(KILLS + 1):
        async with start_python("-m", "rdzv", *arguments) as server:
            await server.says("listens on")
            wanted = len(history) + rng.randrange(20, 120)
            while len(history) < wanted:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
            if life < KILLS:
                server.kill()
            else:
                over.set()
                await asyncio.Event().wait()


@pytest.mark.in_ci
async def test_s1_histories_across_kills_of_a_durable_server_are_linearizable(tmp_path: Path) -> None:
    """Real processes and real sockets, through proxies that delay, reset and drop, to a server that is killed under
    load and restarts with the data on its disk.
    """
    print(f"RDZV_SEED={SEED}")  # pytest shows it if the test fails
    history: list[Operation] = []
    port = free_port()
    over = asyncio.Event()

    async def work(number: int, url: str) -> None:
        rng = random.Random(f"{SEED} {number}")
        async with store.connect(url, timeout=30.0) as client:
            while not over.is_set():
                await one(f"client {number}", client, rng, history, patience=30.0)
                await asyncio.sleep(rng.uniform(0.0, 0.01))

    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(30 + 5 * KILLS), asyncio.TaskGroup() as background:
        proxies = [await stack.enter_async_context(Proxy("127.0.0.1", port)) for _ in range(2)]
        troubles = [kill_again_and_again(tmp_path, port, history, random.Random(SEED), over)]
        troubles += [break_things(proxy, random.Random(f"{SEED}/{number}")) for number, proxy in enumerate(proxies)]
        tasks = [background.create_task(trouble) for trouble in troubles]
        async with asyncio.TaskGroup() as workers:
            for number in range(CLIENTS):
                workers.create_task(work(number, f"tcp://127.0.0.1:{proxies[number % 2].port}"))
        for task in tasks:
            task.cancel()
    assert sum(operation.returned is not None for operation in history) > 20 * KILLS
    assert_linearizable(history, RegisterModel())
