"""Elastic rendezvous: nodes find each other, agree who is in and with what rank, and meet again when that changes.

    async with rdzv.connect("tcp://head:29400/job-7?min_nodes=2&max_nodes=4") as handler:
        store, rank, world_size = await handler.next_rendezvous()

`rdzv.sync` is the same for blocking callers. What scripts need of the key-value store is here, too, so that they need
not import a package with so common a name as `store`.
"""

from typing import TYPE_CHECKING

from rdzv import _import_guard as _import_guard  # isort: skip  # comes first: another `store` may shadow ours
from rdzv import sync
from rdzv._version import __version__ as __version__
from rdzv.backends.builtin import connect
from rdzv.backends.registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerFactory,
    RendezvousHandlerRegistry,
    RendezvousParameters,
    register,
    rendezvous_handler_registry,
)
from rdzv.config.overrides import Overrides
from rdzv.config.settings import Settings
from rdzv.core.history import Chapter
from rdzv.core.state import (
    Change,
    Closed,
    Draining,
    Dropped,
    NodesLeft,
    NodesLost,
    NodesWaiting,
    Participant,
    Phase,
    RunStatus,
)
from rdzv.errors import (
    GiveUp,
    MembersLostError,
    QueueEmptyError,
    RendezvousClosedError,
    RendezvousClosedException,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousException,
    RendezvousGracefulExitError,
    RendezvousNonRetryableError,
    RendezvousRefusedError,
    RendezvousSettingsError,
    RendezvousStateError,
    RendezvousTimeoutError,
    RendezvousTimeoutException,
    RoundChanged,
    RoundSupersededError,
    RunGivenUpError,
    SharedStoreTimeoutError,
)
from rdzv.interface import RendezvousHandler
from rdzv.loop.rounds import Round, rounds
from rdzv.node.handler import RendezvousInfo
from rdzv.shared_store.store import SharedStore
from store import StoreError

if TYPE_CHECKING:
    from store import serve

__all__ = [
    "Change",
    "Chapter",
    "Closed",
    "Draining",
    "Dropped",
    "GiveUp",
    "MembersLostError",
    "NodesLeft",
    "NodesLost",
    "NodesWaiting",
    "Overrides",
    "Participant",
    "Phase",
    "QueueEmptyError",
    "RendezvousClosedError",
    "RendezvousClosedException",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousException",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerFactory",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousNonRetryableError",
    "RendezvousParameters",
    "RendezvousRefusedError",
    "RendezvousSettingsError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "RendezvousTimeoutException",
    "Round",
    "RoundChanged",
    "RoundSupersededError",
    "RunGivenUpError",
    "RunStatus",
    "Settings",
    "SharedStore",
    "SharedStoreTimeoutError",
    "StoreError",
    "connect",
    "register",
    "rendezvous_handler_registry",
    "rounds",
    "serve",
    "sync",
]


def __getattr__(name: str) -> object:
    """Load the server when it is first asked for: a node that hosts no store needs neither it nor sqlite3."""
    if name != "serve":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from store import serve

    return serve
