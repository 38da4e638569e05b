"""What `torchrun --rdzv-backend=rdzv` finds: the entry point of the group `torchrun.handlers`.

torchrun loads every entry point of the group at start, whichever backend it was asked for, so this room imports neither
PyTorch nor anything that might fail. What it does is in `rdzv.torch`, which is imported when the backend is used.

    python -m rdzv.torchrun --rdzv-backend=rdzv ...

is torchrun itself, with the backend registered by hand: for PyTorch 2.4, whose torchrun asks for no entry points.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["create_handler", "get_handler_creator", "main"]


def get_handler_creator() -> Callable[[Any], Any]:
    """What torchrun calls to learn how our handlers are made: it asks for a function that returns a function."""
    return create_handler


def create_handler(parameters: Any) -> Any:
    """A `TorchRendezvousHandler` for what `torchrun` was told, as PyTorch's `RendezvousParameters`."""
    from rdzv.torch import TorchRendezvousHandler

    return TorchRendezvousHandler(parameters)


def main() -> None:
    """Be torchrun, with our backend known to it."""
    from store.net.standard_streams import open_standard_streams

    open_standard_streams(for_command=True)
    try:
        from torch.distributed import run
    except ImportError as error:
        sys.exit(
            f"rdzv.torchrun: this is PyTorch's torchrun, and there is no PyTorch ({error}); pip install 'rdzv[torch]'"
        )
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from rdzv.torchrun import create_handler  # not that of this module, if it was started as a script

    rendezvous_handler_registry.register("rdzv", create_handler)
    run.main()


if __name__ == "__main__":
    main()
