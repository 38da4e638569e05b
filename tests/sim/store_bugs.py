"""Bugs for the store's stories, each of which once existed in some store. The simulation must find each of them."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from store.engine.changeset import ChangeSet, SavedStore
from store.engine.sessions import Session, Sessions
from store.engine.watches import History
from store.messages import Event, Request
from store.server.deliverer import Deliverer
from store.server.journal import Journal
from store.server.peer import Peer
from store.server.pending_commits import PendingCommits
from store.server.round_robin import RoundRobin
from tests.sim.machines import Seams
from tests.support.faults import FaultyJournal

__all__ = ["STORE_BUGS", "say_at_once"]


# A journal of these calls the `_commit` of its last base to write, and reports the whole group as committed.


class WithoutEndsOfLeases(Journal):
    """Writes all but the ends of leases."""

    def _commit(self, group: list[ChangeSet]) -> None:
        super()._commit(
            [
                replace(facts, leases={id: lease for id, lease in facts.leases.items() if lease is not None})
                for facts in group
            ]
        )


class ForgetfulJournal(FaultyJournal, WithoutEndsOfLeases):
    """Does not write the end of a lease, so it exists again after a restart."""


class WithoutReplies(Journal):
    """Writes all but the replies."""

    def _commit(self, group: list[ChangeSet]) -> None:
        super()._commit([replace(facts, replies=[]) for facts in group])


class ReplylessJournal(FaultyJournal, WithoutReplies):
    """Does not write replies, so a request that is sent again after a restart is applied again."""


_close = Sessions.keep_for_reconnect
_page = History.page


def _close_and_forget(self: Sessions, session: Session, *, peer: int, now: float) -> None:
    """Drop the kept replies when their connection closes."""
    if session.peer == peer:
        session.replies.clear()
        session.highest = 0
    _close(self, session, peer=peer, now=now)


def _from_the_next(
    self: History, revision: int, prefix: str, **options: Any
) -> tuple[list[tuple[Event, ...]], int] | None:
    """Resume a watch one revision too late."""
    return _page(self, revision + 1, prefix, **options)


def say_at_once(self: Deliverer, peer: Peer, frame: bytes, number: int) -> None:  # noqa: ARG001
    """Send replies before their changes are on disk."""
    peer.outbox.queue(frame)
    self.dirty[peer] = None


def _waits_for_nothing(self: PendingCommits, request: Request[Any]) -> int:  # noqa: ARG001
    """Let every read return at once, also if it shows changes that are not on disk."""
    return 0


class DamagedJournal(FaultyJournal):
    """Skips a row that it cannot read, and serves the others."""

    def load(self) -> SavedStore:
        saved = super().load()
        return replace(saved, entries=saved.entries[:-1])


def _stand_in_no_ring(self: RoundRobin[Any], who: Any, *, used: bool) -> None:
    """Forget a peer that has used up its turn, with its requests."""
    if not used:
        self._fresh[who] = 0


def _planted(owner: type, name: str, bug: Any) -> Seams:
    return Seams(plant=partial(patch.object, owner, name, bug))


STORE_BUGS = {
    "a read that does not wait for the disk": _planted(PendingCommits, "_last_step_in_reply", _waits_for_nothing),
    "a reply that is kept too short": _planted(Sessions, "keep_for_reconnect", _close_and_forget),
    "a reply that does not survive the store": Seams(journal=ReplylessJournal),
    "a row of the journal that is passed over": Seams(journal=DamagedJournal),
    "a turn that is forgotten": _planted(RoundRobin, "enqueue", _stand_in_no_ring),
    "an acknowledgement before the commit": _planted(Deliverer, "_queue_frame", say_at_once),
    "an event lost on reconnecting": _planted(History, "page", _from_the_next),
    "a lease that is resurrected": Seams(journal=ForgetfulJournal),
}
"""Each bug by name, as it is planted."""
