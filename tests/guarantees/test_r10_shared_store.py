"""R10 and R9: the members of a round share a store under the round's own prefix, and only they write there.

"Its writes to the round's shared store fail with RoundSupersededError and its waits there end with it: every such write
is conditional on the round and on the node's own record."
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import store
from rdzv import RoundSupersededError
from store import when
from tests.support.twins import TWINS, open_shared_store, until_waits

ROUND, NODE, PREFIX = "/run/head/round", "/run/nodes/a", "/run/rounds/7/store/"

CALLS: dict[str, Callable[[Any], Any]] = {
    "set": lambda shared: shared.set("k", "late"),
    "get": lambda shared: shared.get("k"),
    "wait": lambda shared: shared.wait(["k"]),
    "check, true": lambda shared: shared.check(["k"]),
    "check, false": lambda shared: shared.check(["nope"]),
    "add": lambda shared: shared.add("n", 1),
    "append": lambda shared: shared.append("k", "late"),
    "compare_set": lambda shared: shared.compare_set("k", "v", "late"),
    "delete_key": lambda shared: shared.delete_key("k"),
    "num_keys": lambda shared: shared.num_keys(),
    "list_keys": lambda shared: shared.list_keys(),
    "multi_get": lambda shared: shared.multi_get(["k"]),
    "multi_set": lambda shared: shared.multi_set(["k"], ["late"]),
    "queue_push": lambda shared: shared.queue_push("q", "late"),
    "queue_pop": lambda shared: shared.queue_pop("q"),
    "queue_pop, not waiting": lambda shared: shared.queue_pop("q", block=False),
    "queue_len": lambda shared: shared.queue_len("q"),
    "barrier": lambda shared: shared.barrier("b", 1),
}

WAITS: dict[str, Callable[[Any], Any]] = {
    "get": lambda shared: shared.get("nope"),
    "wait": lambda shared: shared.wait(["k", "nope"]),
    "multi_get": lambda shared: shared.multi_get(["nope"]),
    "queue_pop": lambda shared: shared.queue_pop("empty"),
    "barrier": lambda shared: shared.barrier("b", 2),
}


class Room:
    """A round with one member, its shared store, and other clients."""

    def __init__(self, shared: Any, others: store.Client) -> None:
        self.shared = shared
        self.others = others


async def a_later_round_completes(others: store.Client) -> None:
    await others.put(ROUND, b"8")


async def the_node_arrives_anew(others: store.Client) -> None:
    await others.put(NODE, b"again")


async def the_node_is_removed(others: store.Client) -> None:
    await others.delete(NODE)


ENDINGS = (a_later_round_completes, the_node_arrives_anew, the_node_is_removed)


@pytest.fixture(params=TWINS)
async def room(request: pytest.FixtureRequest) -> AsyncIterator[Room]:
    async with store.serve() as server, store.connect(server.url) as others:
        fence = (
            when.mod_revision(ROUND) == await others.put(ROUND, b"7"),
            when.mod_revision(NODE) == await others.put(NODE, b"here"),
        )
        async with open_shared_store(request.param, server, prefix=PREFIX, fence=fence) as shared:
            await shared.set("k", "v")
            await shared.queue_push("q", "item")
            yield Room(shared, others)


@pytest.mark.parametrize("call", CALLS)
async def test_r10_a_member_may_do_everything(room: Room, call: str) -> None:
    await CALLS[call](room.shared)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("call", CALLS)
async def test_r10_nothing_can_be_done_once_the_node_is_no_member(
    room: Room, call: str, ending: Callable[[store.Client], Any]
) -> None:
    await ending(room.others)
    before = await room.others.list(PREFIX)
    with pytest.raises(RoundSupersededError) as caught:
        await CALLS[call](room.shared)
    assert PREFIX in str(caught.value) and str(caught.value).endswith("; call next_rendezvous again")
    assert await room.others.list(PREFIX) == before


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("wait", WAITS)
async def test_r10_waits_end_by_push_when_the_node_is_dropped(
    room: Room, wait: str, ending: Callable[[store.Client], Any]
) -> None:
    waiting = asyncio.ensure_future(WAITS[wait](room.shared))
    await until_waits(room.others, 1)
    requests = (await room.others.stats())["requests"]
    await ending(room.others)
    async with asyncio.timeout(60):  # its own timeout is 300 s
        with pytest.raises(RoundSupersededError, match=PREFIX):
            await waiting
    # The call that ends the wait, and this `stats` call. So the waiting member sent no other request.
    assert (await room.others.stats())["requests"] == requests + 2


async def test_r10_the_stores_keys_all_lie_under_the_rounds_prefix(room: Room) -> None:
    for call in ("set", "add", "append", "compare_set", "multi_set", "queue_push", "barrier"):
        await CALLS[call](room.shared)
    outside = [entry.key for entry in await room.others.list("/") if not entry.key.startswith(PREFIX)]
    assert outside == [ROUND, NODE]
