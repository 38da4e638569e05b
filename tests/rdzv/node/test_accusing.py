"""Members that accuse another one, in virtual time: the accused reaches the store, but not the members."""

import contextlib

import anyio
import pytest

import rdzv
from rdzv import Dropped, NodesLost
from rdzv.core.report import status_json
from rdzv.errors import RendezvousStateError, RoundSupersededError
from rdzv.testing import ClusterNode, cluster
from tests.support.runs import VirtualRun, listen

pytestmark = pytest.mark.virtual_time


async def test_one_accuser_is_shown_and_two_remove_the_accused_from_the_round() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3, last_call_timeout=1) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        infos = await run.meet(*handlers.values())
        rank = {info.node_id: info.rank for info in infos}
        of_a, of_c = await listen(run, handlers["a"]), await listen(run, handlers["c"])
        await handlers["a"].accuse(rank["c"], "all_reduce: connection refused")
        status = await handlers["b"].status()
        assert status.accused == (("c", "a", "all_reduce: connection refused"),)
        assert status_json(status)["accused"] == [{"node_id": "c", "by": "a", "why": "all_reduce: connection refused"}]
        assert len(status.members) == 3, "one alone may itself be the one that is cut off"
        await handlers["b"].accuse(rank["c"], "no route")
        await of_a.until(NodesLost)
        (lost,) = [change for change in of_a.changes if isinstance(change, NodesLost)]
        assert lost.node_ids == ("c",)
        assert lost.reasons == {"c": "accused by a: all_reduce: connection refused; b: no route"}
        await of_c.until(Dropped)  # at once, and not only after the others have met without it
        (dropped,) = [change for change in of_c.changes if isinstance(change, Dropped)]
        assert dropped.reason == lost.reasons["c"]
        infos = await run.meet(handlers["a"], handlers["b"])
        assert {info.world_size for info in infos} == {2}
        assert (await handlers["a"].status()).accused == (), "the next round begins without"


async def test_only_members_accuse_and_none_accuses_itself() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run:
        a, b = run.handler("a"), run.handler("b")
        with pytest.raises(RoundSupersededError, match="cannot accuse"):
            await a.accuse(0, "it is not there")
        infos = await run.meet(a, b)
        (mine,) = [info.rank for info in infos if info.node_id == "a"]
        for rank in (mine, 2, -1):
            with pytest.raises(RendezvousStateError, match=f"rank {rank} cannot be accused"):
                await a.accuse(rank, "no answer")
        await a.leave()
        with pytest.raises(RoundSupersededError, match="cannot accuse"):
            await a.accuse(1 - mine, "no answer")


def story(*, killed: bool, named: bool, gone_ttl: float = 14) -> list[str]:
    """Run three members; node-2 is killed or not. A moment later node-0 accuses it, or fails with its own error."""
    begin: list[bool] = []

    async def train(node: ClusterNode) -> None:
        with contextlib.suppress(OSError):
            async for round in rdzv.rounds(node.url):
                async with round:
                    while True:
                        if begin and round.number == 0 and node.index == 0:
                            if not named:
                                raise OSError("connection closed by peer")
                            rank = next(one.rank for one in await round.participants() if one.node_id == "node-2")
                            await round.accuse(rank, "all_reduce: connection reset")
                            begin.clear()
                        await anyio.sleep(0.01)

    with cluster(3, seed=1, min_nodes=2, ttl=60, disconnect_ttl=15, gone_ttl=gone_ttl) as made:
        made.run(train)
        made.advance(5)
        if killed:
            made.kill(2)
        made.advance(0.005)
        begin.append(True)
        made.advance(5 if killed or named else 30)
        return made.story


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (True, "accused by node-0: all_reduce: connection reset; and the store does not hear from it"),
        (False, "its process ended, as node-0 noticed first"),
    ],
)
def test_one_accuser_is_believed_if_the_store_suspects_a_node_too(named: bool, why: str) -> None:
    told = [line for line in story(killed=True, named=named) if f"is over: lost: node-2: {why}" in line]
    assert len(told) == 2, "both survivors are told, long before its lease ends"
    assert all(float(line.split()[0]) < 5.1 for line in told)


def test_one_accuser_of_a_live_member_is_not_believed() -> None:
    assert not any("is over" in line for line in story(killed=False, named=True)), "nothing else says so"


@pytest.mark.parametrize("gone_ttl", [14, 15])
def test_a_members_own_error_removes_no_live_member(gone_ttl: float) -> None:
    """Also with the longest gone_ttl, that of a cut connection."""
    told = story(killed=False, named=False, gone_ttl=gone_ttl)
    assert not any("noticed first" in line or "lost" in line for line in told)
    assert any("left: node-0" in line for line in told), "a node that failed by itself has left"
