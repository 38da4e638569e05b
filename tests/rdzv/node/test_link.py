"""What a node knows of its connection to the store."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from rdzv.node.link import ANSWERS_KEPT, Link


def test_one_answer_that_was_held_up_does_not_make_the_store_slow() -> None:
    link = Link.__new__(Link)
    link._answered_in = deque(maxlen=ANSWERS_KEPT)
    link.follower = SimpleNamespace(opened_in=0.01)  # type: ignore[assignment]
    for count in range(ANSWERS_KEPT):
        assert link.round_trip == 0.01, count
        link.answered_in(5.0)
    assert link.round_trip == 5.0  # it is slow by now
