"""Undoes in survivors, in `sync_state`, a step that a member's loss has interrupted.

A gradient that no step has used would be added to the next step's gradient, so `sync_state` drops all gradients.
Buffers (BatchNorm's running statistics) contain a part of the interrupted batch: `check` copies changed buffers, and
`sync_state` restores the copies, unless the optimizer has stepped since.

`optimizer.step(closure)` of LBFGS changes parameters and its own state between two calls of the closure, and a lost
member makes such a call raise. So a hook copies parameters and state before a step with a closure, and `sync_state`
restores them after a step that did not end.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from copy import deepcopy
from typing import Any, Final, NamedTuple

from rdzv.torch.pytorch import overwrite_tensors, torch

log: Final = logging.getLogger(__name__)

ALWAYS_COPIED: Final = 65_536
"""Buffers of up to this many elements are always copied: PyTorch counts no changes of BatchNorm's statistics."""


class _BufferCopy(NamedTuple):
    kept: torch.Tensor
    buffer: torch.Tensor
    version: int | None

    def may_differ(self, buffer: torch.Tensor) -> bool:
        if buffer is not self.buffer or buffer.numel() <= ALWAYS_COPIED:
            return True
        return self.version is None or _version(buffer) != self.version

    def is_like(self, buffer: torch.Tensor) -> bool:
        kept = self.kept
        same = (buffer.shape, buffer.dtype, buffer.device) == (kept.shape, kept.dtype, kept.device)
        return same and not buffer.is_inference()


class StepUndo:
    """The state of one process's models at the last `check`, over all rounds."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[Any, dict[str, _BufferCopy]] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # those with our hooks
        # Maps each optimizer whose step has begun to its parameters and state before the step; None if not copied.
        self._begun: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._steps = 0  # finished optimizer steps
        self._steps_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # `_steps` at a model's copy
        self._steps_at_checks = 0, 0  # `_steps` at the last two calls of `check`
        self._has_warned = False

    def remember_buffers(self) -> None:
        """Copy all models' buffers at a `check`; an earlier step that raised is no longer undone."""
        self._begun.clear()
        self._steps_at_checks = self._steps_at_checks[1], self._steps
        for model in self._models:
            self._copy_buffers(model)

    def _copy_buffers(self, model: Any) -> None:
        copies, self._steps_at[model] = self._models[model], self._steps
        into, of, now = list[torch.Tensor](), list[torch.Tensor](), dict[str, _BufferCopy]()
        for name, buffer in model.named_buffers():
            copy = copies.get(name)
            if copy is None or not copy.is_like(buffer):
                copy = _BufferCopy(buffer.detach().clone(), buffer, _version(buffer))
            elif copy.may_differ(buffer):
                into.append(copy.kept)
                of.append(buffer)
                copy = copy._replace(buffer=buffer, version=_version(buffer))
            now[name] = copy
        overwrite_tensors(into, of)
        self._models[model] = now

    def undo_step(self, model: Any, optimizer: Any, *, announced: bool) -> None:
        """Drop gradients, undo an unfinished optimizer step, and restore buffers if no step has ended since their copy.

        `announced`: the last round ended at an agreed step; warn once of unused gradients.
        """
        if model is not None and self._steps_at.get(model) == self._steps:
            self._restore_buffers(model)
        if optimizer in self._begun:
            self._undo_optimizer(optimizer)
        parameters = [] if model is None else list(model.parameters())
        parameters += _optimizer_parameters(optimizer)
        unused = optimizer in self._optimizers and self._steps == self._steps_at_checks[0]
        if announced and unused and not self._has_warned and any(one.grad is not None for one in parameters):
            self._has_warned = True
            log.warning(
                "a newcomer, a drain or a resize has ended a round between two steps of the optimizer, and the "
                "gradients collected until then are dropped; give `check` the optimizer's steps, not micro-steps"
            )
        for one in parameters:
            one.grad = None

    def _undo_optimizer(self, optimizer: Any) -> None:
        before = self._begun.pop(optimizer)
        if before is not None:
            values, state = before
            overwrite_tensors(_optimizer_parameters(optimizer), values)
            optimizer.state.clear()
            optimizer.state.update(state)
        elif not _calls_closure_first(optimizer):
            log.warning(
                f"a loss has interrupted a step of {type(optimizer).__name__}, and the parameters that it has changed "
                f"stay changed; read the last checkpoint, or give `step` a closure: then such a step is undone"
            )

    def _restore_buffers(self, model: Any) -> None:
        copies = self._models.get(model, {})
        for name, buffer in list(model.named_buffers()):
            copy = copies.get(name)
            if copy is None or not copy.may_differ(buffer):
                continue
            if copy.is_like(buffer):
                overwrite_tensors([buffer], [copy.kept])
            else:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, copy.kept.clone())

    def track(self, model: Any, optimizer: Any) -> None:
        """Track a model's buffers and an optimizer's steps from now on, and copy these buffers."""
        if model is not None:  # copy no other model, which may contain a part of the interrupted batch
            self._models.setdefault(model, {})
            self._copy_buffers(model)
        if optimizer is not None and optimizer not in self._optimizers:
            with contextlib.suppress(AttributeError):  # `optimizer` is no `torch.optim.Optimizer`
                optimizer.register_step_pre_hook(self._on_step_begin)
                optimizer.register_step_post_hook(self._on_step_end)
                self._optimizers.add(optimizer)

    def _on_step_begin(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        # Any callable argument is a closure; the optimizer may be an argument, too, but is not callable.
        has_closure = any(map(callable, (*arguments, *named.values())))
        before = None
        if has_closure and not _calls_closure_first(optimizer):
            values = [one.detach().clone() for one in _optimizer_parameters(optimizer)]
            before = values, {one: deepcopy(state) for one, state in optimizer.state.items()}
        self._begun[optimizer] = before

    def _on_step_end(self, optimizer: Any, *_: Any) -> None:
        self._begun.pop(optimizer, None)
        self._steps += 1


def _optimizer_parameters(optimizer: Any) -> list[torch.Tensor]:
    return [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]


def _calls_closure_first(optimizer: Any) -> bool:
    """Return True for PyTorch's optimizers except LBFGS: they call a closure first, and use no collectives."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def _version(buffer: torch.Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version
