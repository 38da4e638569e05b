"""S1: "An acknowledged request took effect once, at one moment between call and return.", seen by real clients."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

import store
from store.errors import ConnectionLost, StoreTimeoutError
from tests.support.linearizability import (
    Add,
    CompareAndSet,
    Compared,
    Delete,
    Get,
    Operation,
    Presence,
    Put,
    RegisterInput,
    RegisterModel,
    assert_linearizable,
)
from tests.support.proxy import Proxy
from tests.support.seeds import FRESH

CLIENTS = 5
OPERATIONS = 120  # of each client
KEYS = ("hot/0", "hot/1", "count")


async def carry_out(client: store.Client, wanted: RegisterInput, timeout: float) -> object:
    """Ask for it, and say the answer in the words of the model."""
    match wanted:
        case Get(key=key):
            entry = await client.get(key, timeout=timeout)
            return None if entry is None else entry.value
        case Put(key=key, value=value):
            return await client.put(key, value, timeout=timeout)
        case Delete(key=key):
            return await client.delete(key, timeout=timeout)
        case Add(key=key, amount=amount):
            return await client.add(key, amount, timeout=timeout)
        case CompareAndSet(key=key, value=value, expected=expected):
            if expected is Presence.MISSING:
                result = await client.compare_and_set(key, value, expected_revision=0, timeout=timeout)
            else:
                assert isinstance(expected, bytes)
                result = await client.compare_and_set(key, value, expected_value=expected, timeout=timeout)
            return Compared(result.succeeded, None if result.entry is None else result.entry.value)


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


async def use(name: str, url: str, rng: random.Random, history: list[Operation]) -> None:
    loop = asyncio.get_running_loop()
    async with store.connect(url) as client:
        for _ in range(OPERATIONS):
            wanted = choose(rng)
            call = loop.time()
            try:
                output = await carry_out(client, wanted, timeout=rng.choice([0.02, 5.0]))
            except (ConnectionLost, StoreTimeoutError) as error:
                if error.maybe_applied:
                    history.append(Operation(client=name, call=call, input=wanted))
            else:
                history.append(Operation(client=name, call=call, returned=loop.time(), input=wanted, output=output))


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
async def test_histories_of_clients_behind_a_failing_network_are_linearizable(seed: int) -> None:
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
