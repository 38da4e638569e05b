"""Promise R12: "Ranks come from one pure pluggable function"."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.runs import VirtualRun, assert_one_round

pytestmark = pytest.mark.virtual_time


def largest_first(arrivals: Sequence[Any], previous: Mapping[str, int]) -> Sequence[Any]:
    assert previous == {}
    return sorted(arrivals, key=lambda record: -record.payload)


def racks(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {"attributes": {"rack": name[0]}} for name in names}


async def ranked(run: VirtualRun, nodes: dict[str, dict[str, Any]]) -> list[str]:
    """Let these nodes join one after the other; return the members of the round that they form, by rank."""
    joining = [await run.join(run.handler(name, **given)) for name, given in nodes.items()]
    done, waiting = await asyncio.wait(joining, timeout=60)
    infos = [task.result() for task in done]
    assert_one_round(infos)
    for spare in waiting:
        spare.cancel()
    return [info.node_id for info in sorted(infos, key=lambda info: info.rank)]


@pytest.mark.parametrize(
    ("order", "nodes", "by_rank"),
    [
        ("survivors", {"b": {}, "a": {}}, ["b", "a"]),
        ("arrival", {"b": {}, "a": {}}, ["b", "a"]),
        ("name", {"host10": {}, "host2": {}, "host1": {}}, ["host1", "host2", "host10"]),
        ("requested", {"a": {"requested_rank": 2}, "b": {}, "c": {"requested_rank": 0}}, ["c", "b", "a"]),
        ("topology:rack", racks("y1", "x1", "y2", "x2"), ["x1", "x2", "y1", "y2"]),
        (largest_first, {"small": {"payload": 1}, "large": {"payload": 8}}, ["large", "small"]),
    ],
)
async def test_r12_the_order_that_was_chosen_gives_the_ranks(
    order: Any, nodes: dict[str, dict[str, Any]], by_rank: list[str]
) -> None:
    """ "by arrival, by node name (natural order: host10 after host2), by a requested rank, by a topology attribute"."""
    async with VirtualRun(min_nodes=len(nodes), rank_order=order) as run:
        assert await ranked(run, nodes) == by_rank


@pytest.mark.parametrize(
    ("order", "lost", "by_rank"),
    [("survivors", "a", ["b", "c", "d", "new"]), ("in_place", "b", ["a", "new", "c", "d"])],
)
async def test_r12_survivors_keep_their_order_or_their_very_ranks(order: str, lost: str, by_rank: list[str]) -> None:
    """Survivors keep their order and newcomers follow, whichever node coordinates and whichever returns first."""
    async with VirtualRun(min_nodes=4, rank_order=order) as run:
        nodes = {name: run.handler(name) for name in "abcd"}
        joining = [await run.join(node) for node in nodes.values()]
        assert [(await task).rank for task in joining] == [0, 1, 2, 3]
        run.crash(lost)
        del nodes[lost]
        joining = [await run.join(node) for node in (run.handler("new"), *reversed(nodes.values()))]
        infos = [await task for task in joining]
        assert_one_round(infos)
        assert [info.node_id for info in sorted(infos, key=lambda info: info.rank)] == by_rank


@pytest.mark.parametrize("forced_by", [{"max_nodes": 4}, {"max_nodes": 8, "node_unit": 4}])
async def test_r12_by_topology_whole_domains_are_taken_in_when_not_all_can_be(forced_by: dict[str, Any]) -> None:
    """ "nodes of one domain adjacent": a whole rack is preferred to a single node of another rack."""
    async with VirtualRun(
        min_nodes=4, last_call_timeout=1, early_last_call=False, rank_order="topology:rack", **forced_by
    ) as run:
        first = [run.handler(name, **given) for name, given in racks("x1", "x2", "x3", "x4").items()]
        await run.meet(*first)
        late = [
            await run.join(run.handler(name, **given)) for name, given in racks("a1", "b1", "c1", "b2", "c2").items()
        ]
        for node in first:
            await node.leave()
        done, _ = await asyncio.wait(late, timeout=60)
        by_rank = sorted((task.result() for task in done), key=lambda info: info.rank)
        assert [info.node_id for info in by_rank] == ["b1", "b2", "c1", "c2"]
