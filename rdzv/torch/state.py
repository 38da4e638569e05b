"""Brings all members of a process group to the state of one member: model, optimizer and more.

First the source sends the structure of its state, as one object pickled by PyTorch (`broadcast_object_list`), with a
placeholder for each tensor of model and optimizer. Every member compares the model's part with its own. If all agree,
the tensors follow, each as a broadcast of its bytes: gloo does not know all dtypes. Tensors of `get_extra_state` and of
an optimizer go into new tensors, as a newcomer may lack them, or have other shapes.

A lagging member replaces its tensors only when it has received all: if the source dies before, it keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rdzv import RoundChanged
from rdzv.torch.pytorch import dist, torch

REMEDY: Final = "build the same model on all members"
SHARDED: Final = "is sharded (a DTensor): the part of a member that is lost is gone with it; read it from a checkpoint"


@dataclass(frozen=True, slots=True)
class _TensorSlot:
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    sharded: bool = False

    def __str__(self) -> str:
        return f"{tuple(self.shape)} of {self.dtype}"


def broadcast_state(source: int, *, rank: int, lags: bool, model: Any, optimizer: Any, extra: Any) -> Any:
    """Bring all members to the state of `source`; return its `extra`."""
    tensors: list[torch.Tensor] = []
    own, own_rest = _tensors_and_rest(model)
    told: list[Any] = [None]
    if rank == source:
        rest = (own_rest, optimizer.state_dict() if optimizer is not None else None)
        told = [(_without_tensors(own, tensors), _without_tensors(rest, tensors), extra)]
    dist.broadcast_object_list(told, src=source)
    places, rest, extra = told[0]
    _raise_if_any_differs(_find_tensor_mismatch(places, _without_tensors(own, [])))
    with torch.no_grad():
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, place in places.items():
            target = own[name].detach()
            into = tensors[place.index] if rank == source else torch.empty_like(target) if lags else target
            sent = _broadcast_tensor(into, source)
            if rank != source and sent.data_ptr() != target.data_ptr():
                later.append((target, sent))
        more, optimizer_state = _fill_in(rest, source, rank, tensors, {})
        for target, sent in later:
            target.copy_(sent)
    if rank != source and more:
        model.load_state_dict(more, strict=False)  # gives each module its `get_extra_state` value
    if rank != source and optimizer is not None:
        optimizer.load_state_dict(optimizer_state)
    return extra


def _tensors_and_rest(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    state = model.state_dict(keep_vars=True) if model is not None else {}
    rest = {
        name: value
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state"
    }
    tensors = {name: value for name, value in state.items() if name not in rest}
    if model is not None:
        tensors.update((name, value) for name, value in model.named_buffers() if name not in state)
    return tensors, rest


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the structure with a `_TensorSlot` for each tensor; append the tensors to the list."""
    if isinstance(value, torch.Tensor):
        sharded = hasattr(value, "device_mesh")
        tensors.append(value.detach())
        return _TensorSlot(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type, sharded)
    if isinstance(value, dict):
        return {key: _without_tensors(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(inner, tensors) for inner in value)
    return value


def _fill_in(value: Any, source: int, rank: int, tensors: list[torch.Tensor], received: dict[int, torch.Tensor]) -> Any:
    """Return the structure with a tensor for each `_TensorSlot`."""
    if isinstance(value, _TensorSlot):
        if value.sharded:
            raise ValueError(f"the optimizer's state {SHARDED}")
        if value.index not in received:
            whole = tensors[value.index] if rank == source else torch.empty(value.shape, dtype=value.dtype)
            received[value.index] = _broadcast_tensor(whole, source)
        return received[value.index]
    if isinstance(value, dict):
        return {key: _fill_in(inner, source, rank, tensors, received) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fill_in(inner, source, rank, tensors, received) for inner in value)
    return value


def _broadcast_tensor(tensor: torch.Tensor, source: int) -> torch.Tensor:
    sent = tensor.contiguous()
    if dist.get_backend() == "nccl" and sent.device.type != "cuda":
        sent = sent.cuda()
    dist.broadcast(sent.reshape(-1).view(torch.uint8), src=source)
    return sent


def _find_tensor_mismatch(there: dict[str, _TensorSlot], here: dict[str, _TensorSlot]) -> str | None:
    for name in dict.fromkeys([*there, *here]):
        if name not in here or name not in there:
            return f"{name} is missing {'here' if name not in here else 'at the newest'}; {REMEDY}"
        if there[name].sharded or here[name].sharded:
            return f"{name} {SHARDED}"
        if (there[name].shape, there[name].dtype) != (here[name].shape, here[name].dtype):
            return f"{name} is {here[name]} here, and {there[name]} at the newest; {REMEDY}"
    return None


def _raise_if_any_differs(difference: str | None) -> None:
    """Raise at every member if any model differs: a member that raised alone would leave the others in a broadcast."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, difference)
    if difference is not None:
        raise ValueError(f"this member cannot take over the newest state: {difference}")
    first = next(((rank, what) for rank, what in enumerate(found) if what is not None), None)
    if first is not None:
        raise RoundChanged(f"rank {first[0]} leaves, since it cannot take over the newest state: {first[1]}")
