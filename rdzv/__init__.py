"""Elastic rendezvous: nodes find each other, agree on members and ranks, and meet again when these change.

    async with rdzv.connect("tcp://head:29400/job-7?min_nodes=2&max_nodes=4") as handler:
        store, rank, world_size = await handler.next_rendezvous()

`rdzv.sync` has the same interface for blocking callers. The key-value store is the package `store`.
"""

from typing import TYPE_CHECKING

from rdzv import _import_guard as _import_guard  # isort: skip  # first, as another `store` may shadow this project's
from rdzv._version import __version__ as __version__

if TYPE_CHECKING:
    from rdzv import sync as sync
    from rdzv import testing as testing
    from rdzv.backends.builtin import connect as connect
    from rdzv.backends.registry import RendezvousHandlerCreator as RendezvousHandlerCreator
    from rdzv.backends.registry import RendezvousHandlerFactory as RendezvousHandlerFactory
    from rdzv.backends.registry import RendezvousHandlerRegistry as RendezvousHandlerRegistry
    from rdzv.backends.registry import RendezvousParameters as RendezvousParameters
    from rdzv.backends.registry import register as register
    from rdzv.backends.registry import rendezvous_handler_registry as rendezvous_handler_registry
    from rdzv.config.overrides import Overrides as Overrides
    from rdzv.config.settings import Settings as Settings
    from rdzv.core.absent import Missing as Missing
    from rdzv.core.history import Chapter as Chapter
    from rdzv.core.history import History as History
    from rdzv.core.report import RunStatus as RunStatus
    from rdzv.core.round import Participant as Participant
    from rdzv.core.round_life import Ending as Ending
    from rdzv.core.state import Ban as Ban
    from rdzv.core.state import Change as Change
    from rdzv.core.state import Closed as Closed
    from rdzv.core.state import Draining as Draining
    from rdzv.core.state import Dropped as Dropped
    from rdzv.core.state import NodesLeft as NodesLeft
    from rdzv.core.state import NodesLost as NodesLost
    from rdzv.core.state import NodesWaiting as NodesWaiting
    from rdzv.core.state import Phase as Phase
    from rdzv.core.state import StoreEnding as StoreEnding
    from rdzv.core.stopping import Resized as Resized
    from rdzv.core.stuck.pace import StepOf as StepOf
    from rdzv.errors import GiveUp as GiveUp
    from rdzv.errors import MembersLostError as MembersLostError
    from rdzv.errors import QueueEmptyError as QueueEmptyError
    from rdzv.errors import RendezvousClosedError as RendezvousClosedError
    from rdzv.errors import RendezvousClosedException as RendezvousClosedException
    from rdzv.errors import RendezvousConnectionError as RendezvousConnectionError
    from rdzv.errors import RendezvousError as RendezvousError
    from rdzv.errors import RendezvousException as RendezvousException
    from rdzv.errors import RendezvousGracefulExitError as RendezvousGracefulExitError
    from rdzv.errors import RendezvousNonRetryableError as RendezvousNonRetryableError
    from rdzv.errors import RendezvousRefusedError as RendezvousRefusedError
    from rdzv.errors import RendezvousSettingsError as RendezvousSettingsError
    from rdzv.errors import RendezvousStateError as RendezvousStateError
    from rdzv.errors import RendezvousTimeoutError as RendezvousTimeoutError
    from rdzv.errors import RendezvousTimeoutException as RendezvousTimeoutException
    from rdzv.errors import RoundChanged as RoundChanged
    from rdzv.errors import RoundSupersededError as RoundSupersededError
    from rdzv.errors import RunGivenUpError as RunGivenUpError
    from rdzv.errors import SharedStoreTimeoutError as SharedStoreTimeoutError
    from rdzv.interface import RendezvousHandler as RendezvousHandler
    from rdzv.loop.member import Busy as Busy
    from rdzv.loop.member import OnWaiting as OnWaiting
    from rdzv.loop.rounds import Round as Round
    from rdzv.loop.rounds import rounds as rounds
    from rdzv.membership import Previous as Previous
    from rdzv.membership import RendezvousInfo as RendezvousInfo
    from rdzv.node.front.queries import Changes as Changes
    from rdzv.node.handler import Handler as Handler
    from rdzv.shared_store.store import SharedStore as SharedStore
else:
    __getattr__, __dir__, __all__ = _import_guard.lazy_names(
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
