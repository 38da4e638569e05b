"""What `torchrun --rdzv-backend=rdzv` finds: the entry point of the group `torchrun.handlers`.

torchrun loads every entry point of the group at start, whichever backend it was asked for, so this room imports neither
PyTorch nor anything that might fail. What it does is in `rdzv.torch`, which is imported when the backend is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["create_handler", "get_handler_creator"]


def get_handler_creator() -> Callable[[Any], Any]:
    """What torchrun calls to learn how our handlers are made: it asks for a function that returns a function."""
    return create_handler


def create_handler(parameters: Any) -> Any:
    """A `TorchRendezvousHandler` for what `torchrun` was told, as PyTorch's `RendezvousParameters`."""
    from rdzv.torch import TorchRendezvousHandler

    return TorchRendezvousHandler(parameters)
