"""The names of PyTorch that these rooms use, all in one place.

Importing this room imports PyTorch, and says what to install where there is none.
"""

from __future__ import annotations

from typing import Final

try:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import api as torch_api
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
except ImportError as error:
    raise ImportError(
        f"rdzv.torch needs PyTorch 2.4 or later with torch.distributed ({error}); pip install 'rdzv[torch]', "
        f"or without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu"
    ) from error

__all__ = ["QueueEmptyError", "RendezvousBackend", "SignalException", "dist", "torch_api"]

QueueEmptyError: Final = getattr(dist, "QueueEmptyError", dist.DistStoreError)
"""PyTorch's class for an empty queue; its releases before 2.8 have neither queues nor this."""
