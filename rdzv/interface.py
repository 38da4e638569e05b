"""What any rendezvous can do, whoever wrote it: the abstract handlers, async and blocking.

Whoever brings a backend subclasses `RendezvousHandler` and writes four methods; `rdzv.node.handler` writes them
all. What a backend leaves out says so when it is called, rather than doing nothing: only `aclose` may be
silent, because a backend that holds nothing open has nothing to close.

This room holds no behaviour. It names the types of `rdzv.core` and `rdzv.membership` for type checkers only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn, Self

from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from rdzv.core.history import Chapter
    from rdzv.core.report import RunStatus
    from rdzv.core.state import Change
    from rdzv.core.stopping import Resized
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

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """Return what happens to the round, as it happens, beginning with what already holds."""
        self._does_not_offer("changes")

    async def status(self) -> RunStatus:
        """Return how the run stands, with the reason in words."""
        self._does_not_offer("status")

    async def history(self) -> list[Chapter]:
        """Return what happened in the run, round by round, as far as is remembered."""
        self._does_not_offer("history")

    async def leave(self) -> None:
        """Leave this round; the node may come again."""
        self._does_not_offer("leave")

    async def ban(self, node_id: str, reason: str = "", *, now: bool = False, lasts: float | None = None) -> None:
        """Keep a node out of the next rounds, and with `now` put it out of this one; for good, or for some seconds."""
        self._does_not_offer("ban")

    async def ban_where(
        self, attribute: str, value: str, reason: str = "", *, now: bool = False, lasts: float | None = None
    ) -> tuple[str, ...]:
        """Keep all nodes out that have this attribute, also those that come later; return which of them are here."""
        self._does_not_offer("ban_where")

    async def unban_where(self, attribute: str, value: str) -> None:
        """Let the nodes with this attribute come again."""
        self._does_not_offer("unban_where")

    async def unban(self, node_id: str) -> None:
        """Let a banned node come again."""
        self._does_not_offer("unban")

    async def drain(self, within: float = 120.0, reason: str = "") -> None:
        """Announce that this node leaves within so many seconds: the members stop together before it does."""
        self._does_not_offer("drain")

    async def drain_node(self, node_id: str, *, within: float = 120.0, reason: str = "") -> None:
        """Announce that some node is to leave."""
        self._does_not_offer("drain_node")

    async def resize(self, min_nodes: int | None = None, max_nodes: int | None = None, *, reason: str = "") -> Resized:
        """Give the run another minimum or maximum of nodes while it lives."""
        self._does_not_offer("resize")

    async def keep(self, key: str, data: bytes) -> None:
        """Keep a little state of the run from round to round."""
        self._does_not_offer("keep")

    async def restore(self, key: str) -> bytes | None:
        """Return what any member has kept last under a name; None if nobody has."""
        self._does_not_offer("restore")

    async def aclose(self) -> None:  # noqa: B027  a backend that holds nothing open has nothing to close
        """Leave for good and let go of everything that is held open; may be called twice."""

    @property
    def run_id(self) -> str:
        """Which run this is."""
        self._does_not_offer("run_id")

    @property
    def node_id(self) -> str:
        """What this node is called in the run."""
        self._does_not_offer("node_id")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _does_not_offer(self, name: str) -> NoReturn:
        raise RendezvousStateError(
            f"this backend does not offer {name}: {type(self).__qualname__} would have to override it"
        )


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
