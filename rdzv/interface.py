"""What any rendezvous can do, whoever wrote it: the abstract handlers, async and blocking.

Whoever brings a backend subclasses `RendezvousHandler` and writes four methods; one that holds something open also
writes `aclose`. What `rdzv.node.front.verbs` offers beyond that, a backend may offer under the same names.

This room holds no behaviour. It names the types of `rdzv.membership` for type checkers only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from rdzv.membership import BlockingRendezvousInfo, RendezvousInfo

__all__ = ["BlockingRendezvousHandler", "RendezvousHandler"]


class RendezvousHandler(ABC):
    """One node's part in the rendezvous of one run; `async with` closes it.

    Only what is abstract must be written. Errors are those of `rdzv.errors`.
    """

    @abstractmethod
    async def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if in one, and return once this node is a member of the next.

        Raises:
            RendezvousClosedError: The run is closed.
            RendezvousTimeoutError: Too few nodes came in time.
            RendezvousConnectionError: The store cannot be reached.
            RendezvousStateError: The store holds something that is not a rendezvous.
            RendezvousGracefulExitError: This node was a spare, and is not needed any more; or it is to leave.
        """

    @abstractmethod
    async def num_nodes_waiting(self) -> int:
        """Return how many arrivals a regroup now would admit; above 0, members should regroup."""

    @abstractmethod
    async def is_closed(self) -> bool:
        """Return whether the run is closed.

        Raises:
            RendezvousConnectionError: Nobody knows; an unreachable store is neither open nor closed.
        """

    @abstractmethod
    async def set_closed(self, reason: str = "") -> None:
        """Close the run for every node, for good; the first reason given is the one that is shown."""

    @property
    def run_id(self) -> str:
        """Which run this is; empty if the backend does not say."""
        return ""

    @property
    def node_id(self) -> str:
        """What this node is called in the run; empty if the backend does not say."""
        return ""

    async def aclose(self) -> None:  # noqa: B027  a backend that holds nothing open has nothing to close
        """Leave for good and let go of everything that is held open; may be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class BlockingRendezvousHandler(ABC):
    """One node's part in the rendezvous of one run, for blocking callers; `with` closes it.

    The methods mean what they mean in `RendezvousHandler`.
    """

    @abstractmethod
    def next_rendezvous(self) -> BlockingRendezvousInfo:
        """Leave the current round, if in one, and return once this node is a member of the next."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many arrivals a regroup now would admit; above 0, members should regroup."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the run is closed."""

    @abstractmethod
    def set_closed(self, reason: str = "") -> None:
        """Close the run for every node, for good; the first reason given is the one that is shown."""

    def close(self) -> None:  # noqa: B027  a backend that holds nothing open has nothing to close
        """Leave for good and let go of everything that is held open; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
