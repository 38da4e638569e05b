"""Adapters to PyTorch: its rendezvous handler, store and rendezvous backend, each over rdzv's own.

    torchrun --rdzv-backend=rdzv ...    >  rdzv.torchrun  >  TorchRendezvousHandler  >  rdzv.sync  >  the async handler
    init_process_group("rdzv://...")    >  register_init_method()  >  ..........................>  rdzv.sync
    PrefixStore, gloo, the agent        >  TorchStore     >  the blocking shared store  >  one socket per thread
    DynamicRendezvousHandler            >  TorchRendezvousBackend  >  a blocking client

These adapters store no pickle, except the state that PyTorch's own `DynamicRendezvousHandler` gives its backend.
"""

from rdzv.torch.backend import TorchRendezvousBackend
from rdzv.torch.handler import TorchRendezvousHandler
from rdzv.torch.init_method import register, register_init_method
from rdzv.torch.rounds import AsyncTorchRound, TorchRound, rendezvous_reconfigure, rounds
from rdzv.torch.store import TorchStore

__all__ = [
    "AsyncTorchRound",
    "TorchRendezvousBackend",
    "TorchRendezvousHandler",
    "TorchRound",
    "TorchStore",
    "register",
    "register_init_method",
    "rendezvous_reconfigure",
    "rounds",
]
