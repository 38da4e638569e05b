"""Promise R18 with real handlers: one set of settings."""

import asyncio
from typing import Any

import pytest

from rdzv import RendezvousSettingsError
from tests.support.runs import VirtualRun, assert_one_round, connected
from tests.support.spoken import List, Request

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize(
    ("ours", "difference"),
    [
        ({"min_nodes": 2}, "min_nodes is 2 here and 1 in the run"),
        ({"max_nodes": 5}, "max_nodes is 5 here and 4 in the run"),
        ({"node_unit": 2}, "node_unit is 2 here and 1 in the run"),
        ({"rank_order": "name"}, "rank_order is 'name' here and 'survivors' in the run"),
        ({"last_call_timeout": 9}, "last_call_timeout is 9.0 here and 0.5 in the run"),
        ({"early_last_call": False}, "early_last_call is False here and True in the run"),
    ],
)
async def test_r18_a_node_with_other_settings_gets_an_error_that_names_both(
    ours: dict[str, Any], difference: str
) -> None:
    async with VirtualRun(min_nodes=1, max_nodes=4, last_call_timeout=0.5) as run:
        await run.meet(run.handler("a"))
        with pytest.raises(RendezvousSettingsError, match=difference):
            await run.handler("b", **ours).next_rendezvous()
        assert run.keys("nodes/") == ["a"]


@pytest.mark.parametrize("way", ["aclose", "crash"])
async def test_r18_the_settings_are_rewritten_when_no_live_node_remains(way: str) -> None:
    async with VirtualRun(max_nodes=4, last_call_timeout=0.5) as run:
        a = run.handler("a", min_nodes=1)
        await run.meet(a)
        if way == "aclose":
            await a.aclose()
        else:
            run.crash("a")
        b, c = run.handler("b", min_nodes=2), run.handler("c", min_nodes=2)
        if way == "crash":
            with pytest.raises(RendezvousSettingsError):
                await b.next_rendezvous()
            await asyncio.sleep(2)
        assert_one_round(await run.meet(b, c))


async def test_r18_a_node_that_reads_the_settings_while_an_equal_node_rewrites_them_is_not_refused() -> None:
    """It reads the former settings, and then finds a node in the run that has joined with its own settings."""
    async with VirtualRun(max_nodes=4, last_call_timeout=0.5) as run:
        await run.meet(run.handler("gone", min_nodes=1))
        run.crash("gone")
        await asyncio.sleep(2)
        first, late = run.handler("first", min_nodes=2), run.handler("late", min_nodes=2)
        for node in (first, late):
            await connected(node)
        held_up, arrived = asyncio.Event(), asyncio.Event()

        async def hold_up(request: Request[Any], when: str) -> None:
            if isinstance(request, List) and when == "before":
                held_up.set()
                await arrived.wait()

        async def see_arrival(_request: Request[Any], _when: str) -> None:
            if run.keys("nodes/") == ["first"]:
                arrived.set()

        run.clients["late"].hook, run.clients["first"].hook = hold_up, see_arrival
        looking = run.start(late.next_rendezvous())
        await held_up.wait()
        assert_one_round(await asyncio.gather(first.next_rendezvous(), looking))


async def test_r18_nodes_that_come_at_once_with_different_settings_do_not_mix() -> None:
    for seed in range(10):
        async with VirtualRun(last_call_timeout=0.5, seed=seed) as run:
            nodes = [run.handler(f"n{at}", min_nodes=1 + at % 2, max_nodes=6, join_timeout=60) for at in range(6)]
            tasks = [run.start(node.next_rendezvous()) for node in nodes]
            infos, refused = [], 0
            for task in tasks:
                try:
                    infos.append(await task)
                except RendezvousSettingsError:
                    refused += 1
            assert_one_round(infos)
            assert len({node.settings.min_nodes for node in nodes if node.node_id in {i.node_id for i in infos}}) == 1
            assert len(infos) + refused == 6
