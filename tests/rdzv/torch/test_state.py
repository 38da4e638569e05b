"""State is transferred whole or not at all, and a model unlike the others' is named. Collectives are faked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.processes import require

require("torch")

import pytest  # noqa: E402
import torch  # noqa: E402

from rdzv.errors import RoundChanged  # noqa: E402
from rdzv.torch import state  # noqa: E402
from rdzv.torch.interrupted_step import StepUndo  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable


class Played:
    """The collectives of one member of two, in which the other member's data is scripted."""

    def __init__(self, *, told: Any = None, sent: list[torch.Tensor] | None = None, differs: str | None = None) -> None:
        self.told, self.sent, self.differs = told, sent or [], differs

    def get_world_size(self) -> int:
        return 2

    def get_backend(self) -> str:
        return "gloo"

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        del src
        if self.told is None:
            self.told = objects[0]
        objects[0] = self.told

    def all_gather_object(self, found: list[Any], own: Any) -> None:
        found[:] = [self.differs, own]

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        if not self.sent:
            raise RuntimeError("connection closed by peer")
        tensor.copy_(self.sent.pop(0).reshape(-1).view(torch.uint8))
        del src


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Played], None]:
    return lambda played: monkeypatch.setattr(state, "dist", played)


def told_by(model: torch.nn.Module, play: Callable[[Played], None]) -> Any:
    """Return the description of this model that its source broadcasts."""
    played = Played(sent=[value.clone() for value in model.state_dict().values()])
    play(played)
    state.broadcast_state(0, rank=0, lags=False, model=model, optimizer=None, extra=7)
    return played.told


def test_a_model_that_differs_is_an_error_at_its_member_only(play: Callable[[Played], None]) -> None:
    told = told_by(torch.nn.Linear(4, 2), play)
    play(Played(told=told))
    with pytest.raises(ValueError, match=r"weight is \(2, 5\) of torch.float32 here, and \(2, 4\) of"):
        state.broadcast_state(0, rank=1, lags=False, model=torch.nn.Linear(5, 2), optimizer=None, extra=None)
    play(Played(told=told, differs="bias is missing here"))
    with pytest.raises(RoundChanged, match=r"rank 0 leaves, .*: bias is missing here"):
        state.broadcast_state(0, rank=1, lags=False, model=torch.nn.Linear(4, 2), optimizer=None, extra=None)


def test_a_lagging_member_keeps_its_state_until_the_newest_is_complete(play: Callable[[Played], None]) -> None:
    newest, lagging = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    told, before = told_by(newest, play), {name: value.clone() for name, value in lagging.state_dict().items()}
    play(Played(told=told, sent=[newest.weight.detach()]))  # then the source dies
    with pytest.raises(RuntimeError, match="closed by peer"):
        state.broadcast_state(0, rank=1, lags=True, model=lagging, optimizer=None, extra=None)
    assert all(torch.equal(value, before[name]) for name, value in lagging.state_dict().items())
    play(Played(told=told, sent=[newest.weight.detach(), newest.bias.detach()]))
    assert state.broadcast_state(0, rank=1, lags=True, model=lagging, optimizer=None, extra=None) == 7
    assert all(torch.equal(value, newest.state_dict()[name]) for name, value in lagging.state_dict().items())


def test_a_sharded_model_is_refused(play: Callable[[Played], None]) -> None:
    model = torch.nn.Linear(4, 2)
    play(Played())
    model.weight.device_mesh = "that of fully_shard"
    with pytest.raises(ValueError, match=r"weight is sharded \(a DTensor\).*checkpoint"):
        state.broadcast_state(0, rank=0, lags=False, model=model, optimizer=None, extra=None)


def test_buffers_are_restored_only_before_the_optimizers_step() -> None:
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    interrupted = StepUndo()
    interrupted.track(model, optimizer)

    def batch() -> None:
        model(torch.randn(4, 2)).pow(2).mean().backward()

    batch()
    interrupted.undo_step(model, optimizer, announced=False)
    assert int(model.num_batches_tracked) == 0
    assert torch.equal(model.running_var, torch.ones(2))
    assert model.weight.grad is None
    batch()
    optimizer.step()
    interrupted.undo_step(model, optimizer, announced=False)
    assert int(model.num_batches_tracked) == 1


@pytest.mark.parametrize("stepped", [False, True])
def test_each_of_several_models_is_restored_by_its_own_call_of_sync_state(stepped: bool) -> None:
    """A generator and a discriminator, with two calls: the first one must not count as a `check` of the second."""
    models = [torch.nn.BatchNorm1d(2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    interrupted = StepUndo()
    for batches in (0, int(stepped)):
        for model, optimizer in zip(models, optimizers, strict=True):
            interrupted.undo_step(model, optimizer, announced=False)
            interrupted.track(model, optimizer)
        assert [int(model.num_batches_tracked) for model in models] == [batches] * 2
        interrupted.remember_buffers()  # stands for `check`
        for model in models:
            model(torch.randn(4, 2))
        if stepped:
            optimizers[1].step()


@pytest.mark.parametrize("passes_model", [True, False])
def test_gradients_are_dropped_of_the_model_and_of_all_parameters_of_the_optimizer(passes_model: bool) -> None:
    """None and not zero: with a gradient of zero an optimizer steps, with none it skips the parameter."""
    model, scale = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.ones(()))
    frozen = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": frozen.parameters()}, {"params": [scale]}], lr=0.1)
    ((model(torch.ones(1, 2)) + frozen(torch.ones(1, 2))) * scale).sum().backward()
    StepUndo().undo_step(model if passes_model else None, optimizer, announced=False)
    assert [one.grad for one in (*frozen.parameters(), scale)] == [None] * 3
    assert all((one.grad is None) is passes_model for one in model.parameters())


@pytest.mark.parametrize(("steps_of_the_optimizer", "warnings"), [(True, 0), (False, 1)])
def test_gradients_lost_by_an_announced_change_are_warned_of_once(
    steps_of_the_optimizer: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    interrupted = StepUndo()
    for _ in range(2):
        interrupted.track(model, optimizer)
        for _ in range(2):
            interrupted.remember_buffers()  # stands for `check`
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if steps_of_the_optimizer:
                optimizer.step()
        interrupted.remember_buffers()
        interrupted.undo_step(model, optimizer, announced=True)
    assert len([one for one in caplog.records if "give `check` the optimizer's steps" in one.message]) == warnings


def test_a_step_of_lbfgs_interrupted_between_two_evaluations_is_undone() -> None:
    """Parameters and history, in the first step and in a later one. A step that has ended is kept."""
    inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3)
    interrupted = StepUndo()
    interrupted.track(model, optimizer)

    def step(raises_at: int) -> None:
        evaluations = iter(range(100))

        def closure() -> torch.Tensor:
            if next(evaluations) == raises_at:
                raise RuntimeError("the group was aborted")
            optimizer.zero_grad()
            loss = model(inputs).sub(1).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    def state() -> str:
        return repr((list(model.parameters()), optimizer.state_dict()))

    for _ in range(3):
        interrupted.remember_buffers()
        before = state()
        with pytest.raises(RuntimeError, match="aborted"):
            step(raises_at=2)
        assert state() != before
        interrupted.undo_step(model, optimizer, announced=False)
        assert state() == before
        interrupted.track(model, optimizer)
        step(raises_at=99)
        after = state()
        interrupted.undo_step(model, optimizer, announced=False)
        assert state() == after != before


class Distributed(torch.optim.SGD):  # type: ignore[misc]  # PyTorch is read without its types
    """An optimizer of another library. Each member updates a part of the parameters and sends it to the others."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            closure()
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        raise RuntimeError("the group was aborted")


@pytest.mark.parametrize("closure", [None, float])
def test_a_step_that_communicates_is_undone_with_a_closure_and_warned_of_without(
    closure: Callable[[], float] | None, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Distributed([weight], lr=0.1)
    interrupted = StepUndo()
    interrupted.track(None, optimizer)
    with pytest.raises(RuntimeError, match="aborted"):
        optimizer.step(closure)
    interrupted.undo_step(None, optimizer, announced=False)
    assert bool(weight.sum()) is (closure is None)
    assert len([one for one in caplog.records if "interrupted a step of Distributed" in one.message]) == (
        closure is None
    )
