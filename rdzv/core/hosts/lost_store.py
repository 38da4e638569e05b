"""The nodes' knowledge of a run whose store was lost, which they carry to the next store.

A node that connects to the next store writes a record of its knowledge (`LostStore`) there, unless that store has a
record that outranks the node's. The record's settings, bans and closing apply before the next store's first round.

Some members of the lost store's last round may still work while others meet in the next store. So the next store's
first round waits for all remaining members of that round, except those in the process that served the lost store, but
for at most `ttl`: by then, a cut-off member has stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rdzv.core.state import LostStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rdzv.core.round import Round
    from rdzv.core.state import Ban, Head, NodeRecord, Progress


class LastKnownRun(NamedTuple):
    """A node's knowledge of a store that it has lost."""

    store_id: str | None
    lost: LostStore


def known_lost_store(head: Head, *, revision: int, settings: bytes, host: str, now: float) -> LostStore:
    """Return a node's knowledge of a lost store, from the last head that the node saw in that store."""
    before, round = head.lost_store, head.round
    number, at, awaited = (-1, 0, 0) if before is None else (before.round, before.round_at, before.awaited)
    if round is not None:
        number, at = max(number, round.number), round.revision
        awaited = round.size - _count_gone_members(round, head)
    else:  # no round completed in the lost store: members of the last round in an earlier store are still awaited
        awaited -= sum(one.last_round == at > 0 for one in head.hosted.values())
    return LostStore(
        generation=1 if before is None else before.generation + 1,
        revision=revision,
        round=number,
        round_at=at,
        awaited=max(awaited, 0),
        settings=settings,
        closed=b"" if head.closed is None else head.closed.pack(),
        bans={name: _ban_with_time_left(ban, now).pack() for name, ban in head.bans.items()},
        tally=head.tally,
        host=host,
    )


def _progress_if_of_round(round: Round, progress: Progress | None) -> Progress | None:
    return progress if progress is not None and progress.round == round.number else None


def _count_gone_members(round: Round, head: Head) -> int:
    now = _progress_if_of_round(round, head.progress)
    told = now if head.moves_over is None else _progress_if_of_round(round, head.moves_over)
    named = {*told.lost_ids, *told.departed_ids} if told is not None else set()
    gone = told.lost + told.departed if told is not None else 0
    if gone != len(named):
        return gone  # unnamed members may be in `hosted`: do not count them twice
    if now is not None:
        # Members that left after `moves_over` went to the next store, unless drained.
        named |= {node_id for node_id in now.departed_ids if node_id in head.drains}
    # A large round's record lists no members (`rank_of` is None): only `last_round` shows who was one.
    others = [one for node_id, one in head.hosted.items() if node_id not in named]
    return len(named) + sum(
        one.last_round == round.revision or round.rank_of(one.arrival) is not None for one in others
    )


def _ban_with_time_left(ban: Ban, now: float) -> Ban:
    return ban if ban.lasts is None else ban.replace(lasts=max(ban.lasts - (now - ban.seen_at), 1.0))


def ranks_in_lost_store(records: Iterable[NodeRecord], lost: LostStore | None) -> dict[str, int]:
    """Return the ids of nodes that were members of the lost store's last round, with their ranks there."""
    if lost is None:
        return {}
    came = ((record.node_id, record.lost_rank_of) for record in records)
    return {node_id: it[1] for node_id, it in came if it is not None and it[0] == lost.round_at}
