"""Bugs are planted, one at a time, to see that the simulation finds each: a check that nothing fails checks nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rdzv.core.view import View
from tests.sim.checker import Violation
from tests.sim.node import Seams
from tests.sim.simulation import simulate

if TYPE_CHECKING:
    from rdzv.core.state import NodeRecord

SEEDS = 1000


class RestartingView(View):
    """Begins the last call anew at each arrival, as DLRover did (#903)."""

    def _arrived(self, record: NodeRecord) -> None:
        self.enough_since = None
        super()._arrived(record)


class StaleView(View):
    """Keeps the records of nodes that have gone."""

    def _gone(self, node_id: str, *, left: bool = False) -> None:
        if node_id in self.members:
            self._note(node_id, left=left)


class ForgetfulView(View):
    """Takes over without the members of the last round, and so sees none of them alive."""

    def took_over(self, *_: object, **__: object) -> None:
        return


class CredulousView(View):
    """Takes a live member for one that waits."""

    def _place(self, record: NodeRecord) -> None:
        self._records[record.node_id] = record
        self.waiting[record.node_id] = record


@pytest.mark.parametrize(
    ("seams", "said"),
    [
        pytest.param(Seams(left_out=frozenset({"term"})), "in term", id="a commit that is not conditional on its term"),
        pytest.param(
            Seams(left_out=frozenset({"arrivals"})),
            "took in arrival",
            id="a commit that is not conditional on arrivals",
        ),
        pytest.param(
            Seams(left_out=frozenset({"closed"})), "after the run was closed", id="a commit that ignores a closing"
        ),
        pytest.param(Seams(view=RestartingView), "no round yet", id="a last call that each join begins anew"),
        pytest.param(Seams(view=StaleView), "", id="a stale record that is kept as alive"),
        pytest.param(Seams(view=CredulousView), "remained in round", id="a live member taken for a waiting node"),
        pytest.param(Seams(view=ForgetfulView), "", id="a coordinator that forgets the last round"),
        pytest.param(Seams(fenced=False), "wrote", id="a zombie's write that is not fenced"),
    ],
)
def test_a_planted_bug_is_found_within_a_thousand_seeds(seams: Seams, said: str) -> None:
    with pytest.raises(Violation) as caught:
        for seed in range(SEEDS):
            simulate(seed, seams=seams)
    assert said in str(caught.value)  # what else goes wrong first differs with the seed
    assert "python -m tests.sim --seed " in str(caught.value)
