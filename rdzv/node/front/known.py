"""Shell: what both handlers tell of their node, at once and from any thread, to the drivers of its rounds."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

from rdzv.node.front.sharing import absence_of

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rdzv.config.settings import Settings
    from rdzv.core.state import Closed, Leaving
    from rdzv.membership import Membership
    from rdzv.node.link.loops import NodeLoop
    from rdzv.node.node import Node
    from store import StoreError
    from store.net.threads import Call

__all__ = ["Known"]

T = TypeVar("T")


class Known:
    """A handler's node, as far as nothing has to be asked."""

    _loop: NodeLoop  # where the node lives

    @property
    @abstractmethod
    def own_node(self) -> Node:
        """The node, if the backend is one of ours."""

    @property
    def settings(self) -> Settings:
        """What was chosen."""
        return self.own_node.settings

    @abstractmethod
    def check_usable(self) -> None:
        """Refuse to go on in a forked child, where the node is not, or once it is closed."""

    def start(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Begin a coroutine in the node's loop.

        Raises:
            RendezvousStateError: The handler is closed, or this is a forked child.
        """
        try:
            self.check_usable()
        except BaseException:
            work.close()
            raise
        return self._loop.start(work)  # which may run it from now on, whatever is raised here

    @property
    def membership(self) -> Membership | None:
        """The last round that this node was in."""
        return self.own_node.membership

    @property
    def is_draining(self) -> bool:
        """True if this node is to leave."""
        return self.own_node.is_draining

    @property
    def closed(self) -> Closed | None:
        """How the run was closed, if the node knows that it was."""
        return self.own_node.head.closed

    @property
    def hosts_store(self) -> bool:
        """True if this process serves the store of the run."""
        return self.own_node.hosts_store()

    @property
    def store_gone(self) -> StoreError | None:
        """Why the store was given up, if it was and there is no other one."""
        return self.own_node.store_gone

    def absence_of(self, node_id: str) -> str:
        """Return what is known of a node that is gone, in words; empty if nothing is."""
        return absence_of(self.own_node, node_id)

    def draining(self) -> dict[str, Leaving]:
        """Return the members of this round whose leaving was announced since it came about."""
        membership, head = self.own_node.membership, self.own_node.head  # one look: the node replaces its head
        progress = head.progress
        if (
            membership is None
            or head.closed is not None
            or progress is None
            or progress.round != membership.round.number
        ):
            return {}
        since, leaving = membership.round.revision, head.drains
        return {one: leaving[one] for one in progress.draining if one in leaving and leaving[one].revision > since}
