"""Writes a node's knowledge of its run to the next store if the last store was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rdzv.config.resizing import with_resize
from rdzv.core.hosts.lost_store import LastKnownRun, known_lost_store
from rdzv.core.state import Ban, LostStore, pack_settings, unpack_settings
from store import Delete, Put, when
from store.printable import make_logger

if TYPE_CHECKING:
    from rdzv.node.link.store_session import StoreSession
    from rdzv.node.member.node_state import NodeState
    from store.messages import Operation

log: Final = make_logger(__name__)


def save_known_run(part: NodeState, link: StoreSession) -> None:
    """Set `part.known` from this link, whose store is lost, unless the node knows of a later lost store."""
    head = link.follower.head
    settings, resized = part.agreed.value if part.settings.can_join else b"", head.resized
    told = head.lost_store
    if settings and told is not None and (head.round is None or not link.has_arrived):
        # If this node may not know the run's settings, use those that another node wrote to the lost store.
        settings = told.settings or (settings if link.has_arrived else b"")
    if settings and resized is not None:  # apply a resize, which may be newer than `settings`
        new = with_resize(unpack_settings(settings), min_nodes=resized.min_nodes, max_nodes=resized.max_nodes)
        settings = pack_settings(new)
    lost = known_lost_store(head, revision=link.follower.seen, settings=settings, host=link.host, now=link.store.time())
    if not part.settings.endpoint.has_successors:
        lost = lost.replace(awaited=0)  # wait for no members: with one host, none can be at work in another store
    before = part.known
    if before is None or before.store_id == link.store.store_id or lost.generation > before.lost.generation:
        part.known = LastKnownRun(link.store.store_id, lost)


async def carry_over_run(part: NodeState, link: StoreSession) -> None:
    """Write this node's knowledge of a lost store to the new store, unless the new store has better knowledge."""
    known, keys, store = part.known, part.keys, link.store
    if known is None or known.store_id == store.store_id or link.has_knowledge:
        return
    lost = known.lost
    while True:
        entry, round = await store.get_many([keys.lost_store, keys.round])
        there = None if entry is None else LostStore.unpack_or_log(entry.key, entry.value)
        if not lost.outranks(there):
            break
        lease = (await link.run_lease()).id
        writes: list[Operation] = [Put(keys.lost_store, lost.pack(), lease=lease)]
        carried = {keys.settings: lost.settings, keys.closed: lost.closed}
        carried |= dict.fromkeys((keys.tally, keys.tally_copy), lost.tally)
        for key, value in carried.items():
            if value and round is None:  # once the new store has a round, its own values count
                writes.append(Put(key, value, lease=lease))
        if there is not None:  # this node's knowledge replaces another's: delete what only the other knew
            if there.closed and not lost.closed:
                writes.append(Delete(keys.closed))
            writes.extend(Delete(keys.bans + name) for name in there.bans if name not in lost.bans)
        for name, value in lost.bans.items():
            lasts = Ban.unpack(value).lasts
            of_ban = lease if lasts is None else (await store.grant(lasts)).id
            writes.append(Put(keys.bans + name, value, lease=of_ban))
        unchanged = [
            when.mod_revision(key) == (0 if one is None else one.mod_revision)
            for key, one in ((keys.lost_store, entry), (keys.round, round))
        ]
        if (await store.transact(when=unchanged, then=writes)).succeeded:
            # Read again before the return: when that answer arrives, the head has the events of this write.
            log.info(
                "run %s, node %s: told the new store about the last one, up to round %d",
                *(keys.run_id, part.node_id, lost.round),
            )
    link.has_knowledge = True
