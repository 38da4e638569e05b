"""The entry point of the group `torchrun.handlers`, for `torchrun --rdzv-backend=rdzv`.

torchrun loads all entry points of the group, whichever it uses, so this module imports nothing that might fail.
PyTorch 2.4 does not read entry points; for it, `python -m rdzv.torchrun --rdzv-backend=rdzv ...` registers the backend.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def get_handler_creator() -> Callable[[Any], Any]:
    """Return `create_handler`, as torchrun expects of an entry point."""
    return create_handler


def create_handler(parameters: Any) -> Any:
    """Make a `TorchRendezvousHandler` from PyTorch's `RendezvousParameters`."""
    from rdzv.torch import TorchRendezvousHandler

    return TorchRendezvousHandler(parameters)


def main() -> None:
    """Run torchrun with this backend registered."""
    from store.net.standard_streams import reserve_standard_streams

    reserve_standard_streams(for_command=True)
    try:
        from torch.distributed import run
    except ImportError as error:
        sys.exit(
            f"rdzv.torchrun: this is PyTorch's torchrun, and there is no PyTorch ({error}); pip install 'rdzv[torch]'"
        )
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from rdzv.torchrun import create_handler  # under `python -m`, the global one belongs to `__main__`

    rendezvous_handler_registry.register("rdzv", create_handler)
    run.main()


if __name__ == "__main__":
    main()
