"""The abstract handlers, async and blocking: the interface of every backend, also of third parties.

A backend subclasses `RendezvousHandler` and implements four methods, and `aclose` if it holds resources. A backend may
also offer the other calls in `rdzv.node.front.verbs`, under the same names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rdzv.membership import BlockingRendezvousInfo, RendezvousInfo


class _HasRunAndNodeId:
    @property
    def run_id(self) -> str:
        """The run's id; empty if the backend has none."""
        return ""

    @property
    def node_id(self) -> str:
        """The node's id in the run; empty if the backend has none."""
        return ""


class RendezvousHandler(_HasRunAndNodeId, ABC):
    """One node's part in one run's rendezvous; `async with` closes it."""

    @abstractmethod
    async def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if any, and return once this node is a member of the next.

        Raises:
            RendezvousClosedError: The run is closed.
            RendezvousTimeoutError: Too few nodes arrived within the time limit.
            RendezvousConnectionError: The store cannot be reached.
            RendezvousStateError: The store holds foreign data.
            RendezvousGracefulExitError: This node was a spare, and the run is closed; or the node is drained.
        """

    @abstractmethod
    async def num_nodes_waiting(self) -> int:
        """Return how many waiting nodes a regroup now would admit; above 0, members should regroup."""

    @abstractmethod
    async def is_closed(self) -> bool:
        """Return True if the run is closed; raise RendezvousConnectionError if the store cannot be reached."""

    @abstractmethod
    async def set_closed(self, reason: str = "") -> None:
        """Close the run for every node; the first reason is shown."""

    async def aclose(self) -> None:
        """Leave for good and release all resources; may be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class BlockingRendezvousHandler(_HasRunAndNodeId, ABC):
    """The blocking twin of `RendezvousHandler`; `with` closes it."""

    @abstractmethod
    def next_rendezvous(self) -> BlockingRendezvousInfo:
        """Join the next round, as the async twin does."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many waiting nodes a regroup now would admit."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Return True if the run is closed."""

    @abstractmethod
    def set_closed(self, reason: str = "") -> None:
        """Close the run for every node."""

    def close(self) -> None:
        """Leave for good and release all resources; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
