"""Shell: bring the state of all members of a process group to that of one: model, optimizer, and whatever else.

First the source tells, as one pickled object, how its state looks: a skeleton with a place for each tensor. Every
member compares the model's part with its own. Only when all agree, the tensors follow, each by a broadcast into the
place where it is to be; a model's in place, an optimizer's into new ones, since a newcomer's optimizer has none yet.

A member that lags has a state of its own, which is worth something if the source dies meanwhile: half of one state and
half of another is none. So it receives the model's tensors into new ones, too, and takes them over when all are there.

The pickle is PyTorch's (`broadcast_object_list`), among the members of one group; it never enters a store of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rdzv.errors import RoundChanged
from rdzv.torch.pytorch import dist, torch

__all__ = ["synchronize"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor goes."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        return f"{tuple(self.shape)} of {self.dtype}"


def synchronize(source: int, *, rank: int, lags: bool, model: Any, optimizer: Any, extra: Any) -> Any:
    """Bring all members to the state of `source`, and return its `extra`; see `TorchRound.sync_state`."""
    tensors: list[torch.Tensor] = []
    own = dict(model.state_dict(keep_vars=True)) if model is not None else {}
    told: list[Any] = [None]
    if rank == source:
        places = {name: _take(value, tensors) for name, value in own.items()}
        told = [(places, _take(optimizer.state_dict() if optimizer is not None else None, tensors), extra)]
    dist.broadcast_object_list(told, src=source)
    places, optimizer_state, extra = told[0]
    _agree(_difference(places, own))
    with torch.no_grad():
        received: dict[int, torch.Tensor] = {}
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, place in places.items():
            if isinstance(place, _Place):
                target = own[name].detach()
                into = tensors[place.index] if rank == source else torch.empty_like(target) if lags else target
                sent = _broadcast(into, source)
                if rank != source and sent.data_ptr() != target.data_ptr():
                    later.append((target, sent))
        optimizer_state = _fill(optimizer_state, source, rank, tensors, received)
        for target, sent in later:
            target.copy_(sent)
    if optimizer is not None and rank != source:
        optimizer.load_state_dict(optimizer_state)
    return extra


def _take(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The same structure, with a place for each tensor, which is put into the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return _Place(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _take(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take(inner, tensors) for inner in value)
    return value


def _fill(value: Any, source: int, rank: int, tensors: list[torch.Tensor], received: dict[int, torch.Tensor]) -> Any:
    """The structure with its tensors; every member walks it in the same order."""
    if isinstance(value, _Place):
        if value.index not in received:
            whole = tensors[value.index] if rank == source else torch.empty(value.shape, dtype=value.dtype)
            received[value.index] = _broadcast(whole, source)
        return received[value.index]
    if isinstance(value, dict):
        return {key: _fill(inner, source, rank, tensors, received) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fill(inner, source, rank, tensors, received) for inner in value)
    return value


def _broadcast(tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Broadcast one tensor, on the device that the group's backend works on."""
    sent = tensor.contiguous()
    if dist.get_backend() == "nccl" and sent.device.type != "cuda":
        sent = sent.cuda()
    dist.broadcast(sent, src=source)
    return sent


def _difference(places: dict[str, Any], own: dict[str, Any]) -> str | None:
    """The first thing in which a model differs from the source's, in words."""
    for name in dict.fromkeys([*places, *own]):
        if name not in own or name not in places:
            return f"{name} is missing {'here' if name not in own else 'at the newest'}"
        there, here = places[name], own[name]
        if isinstance(there, _Place):
            shape = tuple(here.shape) if isinstance(here, torch.Tensor) else None
            if shape != there.shape or here.dtype != there.dtype:
                return f"{name} is {shape} of {getattr(here, 'dtype', type(here))} here, and {there} at the newest"
    return None


def _agree(difference: str | None) -> None:
    """Raise at every member if the model of any differs: who raised alone would leave the others in a broadcast.

    Raises:
        ValueError: This member's model does.
        RoundChanged: Another member's does, which leaves: the others meet again without it.
    """
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, difference)
    if difference is not None:
        raise ValueError(f"this member's model is not the others': {difference}; build the same model on all")
    first = next(((rank, what) for rank, what in enumerate(found) if what is not None), None)
    if first is not None:
        raise RoundChanged(f"rank {first[0]} leaves, since its model is not the others': {first[1]}")
