"""Elastic rendezvous: nodes find each other, agree on members and ranks, and meet again when these change.

    async with rdzv.connect("tcp://head:29400/job-7?min_nodes=2&max_nodes=4") as handler:
        store, rank, world_size = await handler.next_rendezvous()

`rdzv.sync` has the same interface for blocking callers. The key-value store is the package `store`.
"""

from typing import TYPE_CHECKING

from rdzv import _import_guard as _import_guard  # isort: skip  # first, as another `store` may shadow ours
from rdzv._version import __version__ as __version__

if TYPE_CHECKING:
    from rdzv import sync, testing
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
    from rdzv.core.absent import Missing
    from rdzv.core.history import Chapter, History
    from rdzv.core.report import RunStatus
    from rdzv.core.round import Participant
    from rdzv.core.round_life import Ending
    from rdzv.core.state import (
        Ban,
        Change,
        Closed,
        Draining,
        Dropped,
        NodesLeft,
        NodesLost,
        NodesWaiting,
        Phase,
        StoreEnding,
    )
    from rdzv.core.stopping import Resized
    from rdzv.core.stuck.pace import StepOf
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
    from rdzv.loop.member import Busy, OnWaiting
    from rdzv.loop.rounds import Round, rounds
    from rdzv.membership import Previous, RendezvousInfo
    from rdzv.node.front.queries import Changes
    from rdzv.node.handler import Handler
    from rdzv.shared_store.store import SharedStore
else:
    __getattr__, __dir__ = _import_guard.lazy_names(
        __name__,
        {
            "rdzv.sync": "",
            "rdzv.testing": "",
            "rdzv.backends.builtin": "connect",
            "rdzv.backends.registry": (
                "RendezvousHandlerCreator RendezvousHandlerFactory RendezvousHandlerRegistry "
                "RendezvousParameters register rendezvous_handler_registry"
            ),
            "rdzv.config.overrides": "Overrides",
            "rdzv.config.settings": "Settings",
            "rdzv.core.absent": "Missing",
            "rdzv.core.history": "Chapter History",
            "rdzv.core.stuck.pace": "StepOf",
            "rdzv.core.report": "RunStatus",
            "rdzv.core.round": "Participant",
            "rdzv.core.round_life": "Ending",
            "rdzv.core.state": "Ban Change Closed Draining Dropped NodesLeft NodesLost NodesWaiting Phase StoreEnding",
            "rdzv.core.stopping": "Resized",
            "rdzv.errors": (
                "GiveUp MembersLostError QueueEmptyError RendezvousClosedError RendezvousClosedException "
                "RendezvousConnectionError RendezvousError RendezvousException "
                "RendezvousGracefulExitError RendezvousNonRetryableError RendezvousRefusedError "
                "RendezvousSettingsError RendezvousStateError RendezvousTimeoutError "
                "RendezvousTimeoutException RoundChanged RoundSupersededError RunGivenUpError "
                "SharedStoreTimeoutError"
            ),
            "rdzv.interface": "RendezvousHandler",
            "rdzv.loop.member": "Busy OnWaiting",
            "rdzv.loop.rounds": "Round rounds",
            "rdzv.membership": "Previous RendezvousInfo",
            "rdzv.node.front.queries": "Changes",
            "rdzv.node.handler": "Handler",
            "rdzv.shared_store.store": "SharedStore",
        },
    )

__all__ = [
    "Ban",
    "Busy",
    "Change",
    "Changes",
    "Chapter",
    "Closed",
    "Draining",
    "Dropped",
    "Ending",
    "GiveUp",
    "Handler",
    "History",
    "MembersLostError",
    "Missing",
    "NodesLeft",
    "NodesLost",
    "NodesWaiting",
    "OnWaiting",
    "Overrides",
    "Participant",
    "Phase",
    "Previous",
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
    "Resized",
    "Round",
    "RoundChanged",
    "RoundSupersededError",
    "RunGivenUpError",
    "RunStatus",
    "Settings",
    "SharedStore",
    "SharedStoreTimeoutError",
    "StepOf",
    "StoreEnding",
    "connect",
    "register",
    "rendezvous_handler_registry",
    "rounds",
    "sync",
    "testing",
]
