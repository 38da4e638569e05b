"""A node's state, as rooms are given it."""

import random

from rdzv.config.settings import parse
from rdzv.core.keys import Keys
from rdzv.listeners import Listeners
from rdzv.node.link.node_loop import NodeLoop
from rdzv.node.link.ports import HeldPort
from rdzv.node.member.node_state import NodeState

KEYS = Keys("/rdzv", "job")


def part_of(url: str = "tcp://head/job?min_nodes=2") -> NodeState:
    """Return the state of node a in the run at this URL; it has not arrived."""
    return NodeState(
        parse(url, {}, {}),
        KEYS,
        node_id="a",
        listeners=Listeners(),
        loop=NodeLoop(),
        rng=random.Random(1),
        port=HeldPort(),
    )
