"""Promise R15: a node brings a small payload; every member can read all of them."""

import asyncio

import pytest

from tests.support.runs import VirtualRun

pytestmark = pytest.mark.virtual_time

PAYLOAD_BYTES_MAX = 4096
ANYTHING = [None, True, 8, -0.5, "8xH100", b"\x00\xff", [1, [2]], {"gpus": 8, "hosts": ["a", "b"]}]


async def test_r15_every_member_reads_the_payload_of_every_member() -> None:
    async with VirtualRun(min_nodes=len(ANYTHING)) as run:
        infos = await run.meet(*(run.handler(f"n{at}", payload=payload) for at, payload in enumerate(ANYTHING)))
        for info in infos:
            roster = await info.participants()
            assert [one.rank for one in roster] == list(range(len(ANYTHING)))
            assert {one.node_id: one.payload for one in roster} == {f"n{at}": one for at, one in enumerate(ANYTHING)}


async def test_r15_of_the_largest_payload_that_is_taken_all_of_it_arrives_and_a_larger_one_is_refused_at_once() -> None:
    most = "x" * (PAYLOAD_BYTES_MAX - 3)  # msgpack's header of a string so long takes 3
    async with VirtualRun(min_nodes=2) as run:
        infos = await run.meet(run.handler("a", payload=most), run.handler("b", payload=most))
        assert [one.payload for one in await infos[0].participants()] == [most, most]
        with pytest.raises(ValueError):
            run.handler("c", payload=most + "x")


async def test_r15_each_round_has_the_payloads_of_its_own_members() -> None:
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=1) as run:
        a, b = run.handler("a", payload="a1"), run.handler("b", payload="b1")
        (first, _) = await run.meet(a, b)
        run.crash("b")
        (second, *_) = await run.meet(a, run.handler("another", payload="b2"), run.handler("c", payload="c1"))
        assert {one.payload for one in await second.participants()} == {"a1", "b2", "c1"}
        assert second.round == first.round + 1


async def test_r15_the_payload_of_a_spare_is_not_listed_with_the_members() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=1) as run:
        (info,) = await run.meet(run.handler("a", payload="in"))
        spare = await run.join(run.handler("b", payload="spare"))
        await asyncio.sleep(5)
        assert [one.payload for one in await info.participants()] == ["in"]
        assert not spare.done()
