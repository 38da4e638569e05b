"""Values of a node that both handlers return in any thread, without a request to the store."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from rdzv.errors import RendezvousStateError
from rdzv.node.front import verbs
from rdzv.node.front.sharing import describe_gone_node
from store.errors import NotPicklable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rdzv.config.settings import Settings
    from rdzv.core.state import AnnouncedDrain, Closed
    from rdzv.interface import RendezvousHandler
    from rdzv.membership import Membership
    from rdzv.node.link.node_loop import NodeLoop
    from rdzv.node.node import Node
    from store import StoreError
    from store.net.threads import Call

P = ParamSpec("P")
T = TypeVar("T")


def immediate_method(verb: Callable[Concatenate[Node, P], T]) -> Callable[Concatenate[NodeView, P], T]:
    """Make a handler's method of a verb (a call of a node) that returns at once, in any thread."""

    @functools.wraps(verb)
    def method(self: NodeView, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return verb(self.usable_node(verb.__name__), *args, **kwargs)

    return method


class NodeView(NotPicklable):
    """The part of both handlers that reads the node without a call into the node's loop."""

    node: Node | None  # None for a third-party backend
    _named: Node | RendezvousHandler  # the node, or the handler of a third-party backend
    _loop: NodeLoop
    _pid: int

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._named.run_id

    @property
    def node_id(self) -> str:
        """The node's id in the run."""
        return self._named.node_id

    @property
    def own_node(self) -> Node:
        """The node, also after it was closed; raise RendezvousStateError if a third-party backend has none."""
        if self.node is None:
            raise RendezvousStateError(f"the backend of run {self.run_id} is a third party's, and has no node here")
        return self.node

    def usable_node(self, _: str) -> Node:
        """Return the node, also after closing; the blocking handler raises then."""
        return self.own_node

    @property
    def settings(self) -> Settings:
        """The node's settings."""
        return self.own_node.settings

    @property
    def store_settings(self) -> Settings:
        """The settings for clients of a round's shared store, with the present store as the only host."""
        return self.own_node.store_settings()

    def check_usable(self) -> None:
        """Raise in a forked child, or after closing."""
        if self._pid != os.getpid():
            raise RendezvousStateError(
                f"this handler of run {self.run_id} was made before fork(); make a new one in the child"
            )
        if self.node is not None:
            self.node.check_usable()

    def spawn(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Begin a coroutine in the node's loop; raise RendezvousStateError after closing, or in a forked child."""
        try:
            self.check_usable()
        except BaseException:
            work.close()
            raise
        return self._loop.spawn(work)  # if a signal handler raises here, the work runs without a caller

    @property
    def reason(self) -> str:
        """The reason for this node's wait, in words."""
        return self.own_node.part.wait_reason

    @property
    def membership(self) -> Membership | None:
        """This node's membership in its last round."""
        return self.own_node.membership

    @property
    def is_draining(self) -> bool:
        """True if a drain of this node was announced."""
        return self.own_node.is_draining

    @property
    def run_closing(self) -> Closed | None:
        """The closing of the run, if the node knows of it."""
        return self.own_node.head.closed

    @property
    def hosts_store(self) -> bool:
        """True if this process serves the run's store."""
        return self.own_node.hosts_store()

    @property
    def store_loss(self) -> StoreError | None:
        """The error with which the store was given up, until another store replaces it."""
        return self.own_node.store_loss

    def describe_gone_node(self, node_id: str) -> str:
        """Describe what this node knows of a lost or departed node; empty if nothing."""
        return describe_gone_node(self.own_node, node_id)

    def draining_members(self) -> dict[str, AnnouncedDrain]:
        """Return the members of this round whose drains were announced since it completed."""
        membership, head = self.own_node.membership, self.own_node.head  # read the head once, as the node replaces it
        progress = head.progress
        if membership is None or progress is None or head.closed is not None:
            return {}
        if progress.round != membership.round.number:
            return {}
        since, leaving = membership.round.revision, head.drains
        return {one: leaving[one] for one in progress.draining if one in leaving and leaving[one].revision > since}

    num_nodes_changed = immediate_method(verbs.num_nodes_changed)
    leaves_because = immediate_method(verbs.leaves_because)
