"""What both twins of the loop say in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

import rdzv
import rdzv.sync
from rdzv.errors import RendezvousGracefulExitError, RendezvousSettingsError
from rdzv.loop.member import Options, SoFar

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.node.node import Node

NOWHERE = "tcp://127.0.0.1:1/job?min_nodes=1"


@pytest.mark.parametrize("rounds", [rdzv.rounds, rdzv.sync.rounds])
@pytest.mark.parametrize("wrong", [{"on_waiting": "later"}, {"no_progress": -1}])
def test_both_twins_refuse_what_no_loop_can_do_when_they_are_called(
    rounds: Callable[..., object], wrong: dict[str, object]
) -> None:
    with pytest.raises(RendezvousSettingsError, match=f"{next(iter(wrong))}=.* must be"):
        rounds(NOWHERE, **wrong)


class Quiet:
    """As much of a node as asks nothing of a store."""

    def __init__(self) -> None:
        self.is_draining = False
        self.part = self
        self.progress = 5


def so_far(*, node: Quiet | None = None) -> SoFar:
    return SoFar(cast("Node", node or Quiet()), Options(), was_open=True)


def test_a_node_that_drains_meets_nobody_again_and_one_that_knows_of_no_steps_says_so() -> None:
    node = Quiet()
    assert so_far(node=node).goes_on()
    assert node.progress == -1
    node.is_draining = True
    assert not so_far(node=node).goes_on()


def test_a_spare_that_is_not_needed_ends_its_loop_without_an_error() -> None:
    so_far().end(RendezvousGracefulExitError("not needed"))
