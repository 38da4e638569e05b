"""How a member's round ends for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rdzv.core.round import Round
from rdzv.core.round_life import Ending, EndKind
from rdzv.core.state import Head, Phase, Progress
from rdzv.core.stuck.beats import Beats
from rdzv.loop.life import Life
from rdzv.membership import Membership
from rdzv.node.wakeup import Listeners

ROUND = Round(number=7, term=1, size=3, buckets=1, host="h", port=1, in_steps=True)


def test_who_leaves_after_an_agreement_ends_the_round_only_if_it_does_so_before_the_agreed_step() -> None:
    membership = Membership(round=ROUND, rank=0, arrival=3, beats=Beats(7, lambda: 0.0, expected=True))
    node = SimpleNamespace(node_id="a", head=Head(round=ROUND), listeners=Listeners())
    ended: list[Ending] = []
    Life(cast("Any", node), membership, ended.append).start()
    membership.gate.passes(4)
    membership.gate.decide(6, why="1 node waiting to come in")
    left = Progress(phase=Phase.TRAINING, round=7, departed=1, departed_ids=("b",))
    node.head = Head(round=ROUND, progress=left)
    node.listeners.changed()
    assert not ended, "who waits for it in a later step has skipped a check, and that is an error of its own"
    node.head = Head(round=ROUND, progress=left.replace(left_early=True))
    node.listeners.changed()
    assert [(ending.kind, ending.node_ids) for ending in ended] == [(EndKind.LEFT, ("b",))]
