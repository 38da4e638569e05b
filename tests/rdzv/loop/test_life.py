"""How a member's round ends for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

import rdzv
from rdzv.core.round import Round
from rdzv.core.round_life import Ending, EndKind
from rdzv.core.state import Head, Phase, Progress
from rdzv.core.stopping import Stop
from rdzv.core.stuck.beats import Beats
from rdzv.loop.life import Life
from rdzv.membership import Membership
from rdzv.testing import ClusterNode, cluster

ROUND = Round(number=7, term=1, size=3, buckets=1, host="h", port=1, in_steps=True)


def test_who_leaves_after_an_agreement_ends_the_round_only_if_it_does_so_before_the_agreed_step() -> None:
    membership = Membership(round=ROUND, rank=0, arrival=3, beats=Beats(7, lambda: 0.0, expected=True))
    node = SimpleNamespace(node_id="a")
    ended: list[Ending] = []
    Life(cast("Any", node), membership, ended.append).start()
    membership.gate.passes(4)
    stop = Stop(round=7, decided=True, step=6)
    left = Progress(phase=Phase.TRAINING, round=7, departed=1, departed_ids=("b",), live=1)
    membership.take(Head(round=ROUND, progress=left, stop=stop))
    assert not ended, "who waits for it in a later step has skipped a check, and that is an error of its own"
    membership.take(Head(round=ROUND, progress=left.replace(left_early=True), stop=stop))
    assert [(ending.kind, ending.node_ids) for ending in ended] == [(EndKind.LEFT, ("b",))]


@pytest.mark.virtual_time
def test_who_stands_still_while_it_waits_for_news_reads_them_before_it_judges() -> None:
    """Its time was over as soon as it went on: a survivor ended with the error of a peer that had been killed."""
    fails: list[int] = []

    async def train(node: ClusterNode) -> None:
        async for round in rdzv.rounds(node.url):
            async with round:
                while round.number or node.index not in fails:  # noqa: ASYNC110  on virtual time it costs nothing
                    await anyio.sleep(0.01)
                raise OSError("connection closed by peer")

    with cluster(3, seed=0, min_nodes=2) as town:
        town.run(train)
        town.advance(5)
        town.kill(2)
        fails.append(0)
        town.advance(0.02)
        town.pause(0, 5)
        town.advance(20)
        assert [one.world_size for one in town.rounds] == [3, 2]
