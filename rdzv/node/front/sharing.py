"""Makes a round's shared store for one member."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from rdzv.core.round import BUCKET_SIZE, Participant
from rdzv.shared_store.fencing import AbsenteeNames, MembershipQueries
from rdzv.shared_store.store import SharedStore

if TYPE_CHECKING:
    from rdzv.membership import Membership
    from rdzv.node.node import Node
    from rdzv.shared_store.store import LazyClient
    from store import Store


def shared_store(node: Node, membership: Membership, client: LazyClient | Store) -> SharedStore:
    """Return the round's shared store for one member. The store rejects calls once the member is out of the round."""
    round, keys = membership.round, node.keys
    return SharedStore(
        client,
        prefix=keys.shared(round.number, round.term),
        fence=membership.fence(keys),
        lease=round.lease,
        company=MembershipQueries(
            run_id=node.run_id,
            superseded=lambda: membership.over,
            lost=(lambda: membership.lost_ids) if node.settings.waits_end_on_loss else None,
            waiting=membership.beats.mark_wait,
            interrupted=membership.gate.note_interrupted,
            roster=AbsenteeNames(
                rank=membership.rank,
                key=lambda rank: keys.roster(round.number, round.term, rank // BUCKET_SIZE),
                read=lambda roster: {one.rank: one.node_id for one in Participant.unpack_all(roster)},
                absence=partial(describe_gone_node, node),
            ),
        ),
    )


def describe_gone_node(node: Node, node_id: str) -> str:
    """Describe what this node knows of a lost or departed node; empty if nothing. Thread-safe."""
    head = node.head
    try:
        now = asyncio.get_running_loop().time()
    except RuntimeError:
        now = time.monotonic()  # event loops use the same clock
    missing = head.progress.absent.missing if head.progress is not None else ()
    return next((one.describe(elapsed=now - head.progress_at) for one in missing if one.node_id == node_id), "")
