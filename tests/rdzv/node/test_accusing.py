"""Members that accuse another one, in virtual time: it reaches the store, and not them."""

from __future__ import annotations

import pytest

from rdzv import Dropped, NodesLost
from rdzv.core.report import report
from rdzv.errors import RendezvousStateError, RoundSupersededError
from tests.support.runs import VirtualRun, listen

pytestmark = pytest.mark.virtual_time


async def test_one_accuser_is_shown_and_two_take_the_accused_out_of_the_round_with_their_reasons() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=3, last_call_timeout=1) as run:
        handlers = {name: run.handler(name) for name in "abc"}
        infos = await run.meet(*handlers.values())
        rank = {info.node_id: info.rank for info in infos}
        of_a, of_c = await listen(run, handlers["a"]), await listen(run, handlers["c"])
        await handlers["a"].accuse(rank["c"], "all_reduce: connection refused")
        status = await handlers["b"].status()
        assert status.accused == (("c", "a", "all_reduce: connection refused"),)
        assert report(status)["accused"] == [
            {"node_id": "c", "by": "a", "why": "all_reduce: connection refused"},
        ]
        assert len(status.members) == 3, "one alone may itself be the one that is cut off"
        await handlers["b"].accuse(rank["c"], "no route")
        await of_a.until(NodesLost)
        (lost,) = [change for change in of_a.changes if isinstance(change, NodesLost)]
        assert lost.node_ids == ("c",)
        assert lost.reasons == {"c": "accused by a: all_reduce: connection refused; b: no route"}
        infos = await run.meet(handlers["a"], handlers["b"])
        assert {info.world_size for info in infos} == {2}
        await of_c.until(Dropped)
        assert (await handlers["a"].status()).accused == (), "the next round begins without"


async def test_who_is_in_no_round_accuses_nobody_and_nobody_accuses_itself() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run:
        a, b = run.handler("a"), run.handler("b")
        with pytest.raises(RoundSupersededError, match="accuses nobody"):
            await a.accuse(0, "it is not there")
        infos = await run.meet(a, b)
        (mine,) = [info.rank for info in infos if info.node_id == "a"]
        for rank in (mine, 2, -1):
            with pytest.raises(RendezvousStateError, match=f"rank {rank} cannot be accused"):
                await a.accuse(rank, "no answer")
        await a.leave()
        with pytest.raises(RoundSupersededError, match="accuses nobody"):
            await a.accuse(1 - mine, "no answer")
