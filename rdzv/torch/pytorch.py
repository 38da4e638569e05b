"""The names of PyTorch that these rooms use, all in one place.

Importing this room imports PyTorch, and says what to install where there is none.
"""

from __future__ import annotations

from typing import Any, Final

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

__all__ = [
    "QueueEmptyError",
    "RendezvousBackend",
    "SignalException",
    "abort_process_group",
    "dist",
    "set_group_timeout",
    "torch_api",
]

QueueEmptyError: Final = getattr(dist, "QueueEmptyError", dist.DistStoreError)
"""PyTorch's class for an empty queue; its releases before 2.8 have neither queues nor this."""

abort_process_group: Final[Any] = getattr(dist.distributed_c10d, "_abort_process_group", None)
"""Aborts all groups of a backend that can be aborted (nccl); PyTorch has it since 2.6."""

set_group_timeout: Final[Any] = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
"""Changes the timeout of a group's collectives, once it has been made; PyTorch has it since 2.1."""
