"""Shell: what one node is in its run, as far as it knows; all rooms of its part read and write it.

It outlives the link to a store. It is written in the node's loop alone, and may be read from any thread. The rooms
beside it act: `joining` comes to be a member, with `record` to write the arrival; `leaving` takes it back; `noticing`
hears what others do to it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rdzv.config.settings import describe_difference
from rdzv.core.addresses import in_zone_of
from rdzv.core.decision import GIVEN_UP_MOST
from rdzv.core.stuck.beats import Beats
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousRefusedError,
    RendezvousSettingsError,
    RendezvousTimeoutError,
)
from rdzv.membership import Membership
from rdzv.node.link.ports import HeldPort
from rdzv.node.member.arrival import Arrival, State
from rdzv.node.member.own_beats import OwnBeats
from rdzv.node.run.agreed import Agreed
from store.printable import escaping, without_durations

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from rdzv.config.settings import Settings
    from rdzv.core.decision import Me
    from rdzv.core.keys import Keys
    from rdzv.core.round import Round
    from rdzv.core.state import Ban, Closed, Head, Leaving
    from rdzv.listeners import Listeners
    from rdzv.node.link.link import Link
    from rdzv.node.link.loops import NodeLoop
    from store.keeping import HeldLease

__all__ = ["NOT_WAITING", "Part"]

log: logging.Logger = escaping(logging.getLogger(__name__))

NOT_WAITING = "not waiting for anything"


class Part:
    """What one node is in one run.

    Attributes:
        settings: What was chosen.
        keys: The run's keys.
        node_id: The node's name.
        incarnation: Random; another process of the same name is somebody else.
        listeners: Who is woken when any of this changes.
        loop: Where the node lives.
        rng: Spreads over time what many nodes do at once.
        port: Where the others would meet, were this node rank 0.
        arrival: Where the node's record stands.
        membership: The last round it was in; it says itself whether the node still is.
        known_round: The last round that it knows of; -1 for none.
        leaves_because: Why this node leaves, in words, if it has said so; the others are told.
        lapses: How many leases it has lost while it waited for this round.
        lapsed_in: The round that this node was dropped from; -1 for none.
        unreached: It was rank 0 of the last round, which was given up since not all members reached it.
        cut_off: Where it did not reach rank 0, while others did, since the last round that held.
        given_up: Which round was given up, and why, in words; empty if none was since the last that held.
        refusal: What the run holds against this node since it has arrived.
        progress: What its next arrival says of the steps it has finished; see `NodeRecord`.
        own_beats: What goes with its keep-alives of the steps that it begins.
    """

    def __init__(
        self,
        settings: Settings,
        keys: Keys,
        *,
        node_id: str,
        listeners: Listeners,
        loop: NodeLoop,
        rng: random.Random,
        port: HeldPort | None = None,
    ) -> None:
        self.settings = settings
        self.keys = keys
        self.node_id = node_id
        self.incarnation: str = f"{rng.getrandbits(64):016x}"
        self._agreed = Agreed(settings) if settings.can_join else None
        self.port: HeldPort = port or HeldPort(settings.master_port)
        self.listeners = listeners
        self.loop = loop
        self.rng = rng
        self.arrival: Arrival[HeldLease] = Arrival()
        self.membership: Membership | None = None
        self.known_round: int = -1
        self.unreached: bool = False
        self.cut_off: tuple[str, ...] = ()
        self.given_up: str = ""
        self.leaves_because: str = ""
        self.lapses: int = 0
        self.lapsed_in: int = -1
        self._reason = NOT_WAITING
        self._reason_now: Callable[[], str | None] | None = None  # where its durations run on
        self.refusal: RendezvousError | None = None
        self.progress: int | None = None
        self.own_beats: OwnBeats = OwnBeats(settings)

    @property
    def agreed(self) -> Agreed:
        """The run's settings, as this node expects them in the store and goes by them."""
        assert self._agreed is not None, "an observer does not join"
        return self._agreed

    @property
    def is_member(self) -> bool:
        """Whether it is in a round, as far as it knows."""
        return self.membership is not None and self.membership.over is None

    @property
    def reason(self) -> str:
        """What it waits for, in words, as of now; from any thread."""
        reason_now = self._reason_now
        return (reason_now() if reason_now is not None else None) or self._reason

    @reason.setter
    def reason(self, reason: str) -> None:
        self._reason, self._reason_now = reason, None

    def wait_for(self, reason: str, reason_now: Callable[[], str | None] | None = None) -> None:
        """Note what it waits for; into the log, too, if that is another thing than before.

        `reason_now` says it as of the moment when somebody asks, since its durations run on.
        """
        # In this order: it is asked at each push, and the last question costs most.
        is_shown = reason != self._reason and log.isEnabledFor(logging.INFO)
        if is_shown and without_durations(reason) != without_durations(self._reason):
            log.info("run %s, node %s: %s", self.keys.run_id, self.node_id, reason)
        self._reason, self._reason_now = reason, reason_now

    def timeout(self, link: Link | None) -> RendezvousTimeoutError:
        """The error for a call whose time is over."""
        away = link is None or not link.in_reach
        problem = f"; the store is out of reach{link.if_hosted if link is not None else ''}" if away else ""
        reason = self.reason  # which has it already if that is what the coordinator says of all
        if self.given_up and self.given_up[:GIVEN_UP_MOST] not in reason:
            problem += f"; {self.given_up}"
        return RendezvousTimeoutError(
            f"run {self.keys.run_id}, node {self.node_id}: no round within "
            f"join_timeout={self.settings.join_timeout:g} s at {self.settings.endpoint.url}: "
            f"{reason}{problem}"
        )

    def refuse_if_closed(self, head: Head, me: Me) -> None:
        """Go no further if the run is closed, unless a round came first that may hold this arrival."""
        if head.closed is not None and not (head.round and head.round.revision > me.arrival > 0):
            raise self.closed_error(head.closed, spare=False)

    def drained(self, head: Head) -> Leaving | None:
        """What was announced of this node's leaving, if it is to leave.

        What was announced of an earlier process of its name stands for as long as that one's lease, and is not meant.
        """
        leaving = head.drains.get(self.node_id)
        return leaving if leaving is not None and leaving.revision >= self.arrival.began > 0 else None

    def drained_error(self, leaving: Leaving) -> RendezvousGracefulExitError:
        """The error for a node that is to leave, and wants to come into a round, or waits for one."""
        reason = f": {leaving.reason}" if leaving.reason else ""
        return RendezvousGracefulExitError(
            f"run {self.keys.run_id}: node {self.node_id} is to leave{reason}, and comes into no round any more"
        )

    def banned_error(self, ban: Ban) -> RendezvousRefusedError:
        """The error for a node that is banned."""
        return RendezvousRefusedError(f"run {self.keys.run_id}: node {self.node_id} is {ban}")

    def closed_error(self, closed: Closed, *, spare: bool) -> RendezvousError:
        """The error for a call that finds the run closed."""
        reason = f": {closed.reason}" if closed.reason else ""
        by = f" by {closed.by}" if closed.by else ""
        message = f"run {self.keys.run_id} is closed{by}{reason}"
        if spare and not closed.given_up:  # then no node of it ends with success
            return RendezvousGracefulExitError(f"{message}; node {self.node_id} was a spare and is not needed any more")
        return RendezvousClosedError(message, reason=closed.reason, given_up=closed.given_up, status=closed.status)

    def overruled(self, theirs: Mapping[str, object]) -> None:
        """Somebody has rewritten the run's settings: this node is in it by mistake."""
        difference = describe_difference(self.settings.shared(), theirs)
        self.refusal = RendezvousSettingsError(f"run {self.keys.run_id} has got other settings: {difference}")
        self.listeners.changed()

    def lease_lost(self, lease: HeldLease, reason: str) -> None:
        """The keeper takes a lease for lost, and if it is this node's, its record and its membership are lost, too."""
        if self.arrival.lease is lease:
            self.arrival.lapsed()
            self.end_membership(reason, dropped=True)
            self.listeners.changed()

    def note(self, away: bool) -> bytes:
        """What goes with the next keep-alive; `away`: the store was out of reach until a moment ago."""
        return self.own_beats.note(self.membership, away=away)

    def become_member(self, round: Round, rank: int, me: Me, link: Link, *, time: Callable[[], float]) -> Membership:
        """Be a member of the round that holds us; `time` is this node's clock, from any thread."""
        self.arrival.taken_in()
        self.lapses = 0
        self.lapsed_in = -1
        ((host, _), *_) = self.settings.endpoint.hosts
        self.membership = membership = Membership(
            round=round.replace(host=in_zone_of(host, round.host)),
            rank=rank,
            arrival=me.arrival,
            node_id=self.node_id,
            beats=Beats(round.number, time, expected=self.progress is not None),
        )
        self.known_round = max(self.known_round, round.number)
        who = f"run {self.keys.run_id}, round {round.number}: node {self.node_id}"
        log.info("%s has rank %d of %d", who, rank, round.size)
        self.take(link)  # the head may have said something of this round before it was known to be ours
        self.listeners.changed()
        return membership

    def take(self, link: Link) -> None:
        """Have the membership take in the head; called whenever that has changed, before anybody looks at it."""
        membership = self.membership
        if membership is None or membership.over is not None:
            return
        if link.follower.error is not None:
            self.end_membership(f"the store is lost: {link.follower.error}", dropped=True)
            return
        # The later round may hold what it has sent: on etcd an answer and a push come by two ways.
        membership.take(link.follower.head, rejoins=self.arrival.state is State.SENT)
        if not self.is_member:
            self._note_end(membership)
        if membership.record_gone:
            self._forget_record(link, by_decision=membership.expelled)

    def put_out(self, link: Link, why: str) -> None:
        """By a decision, this node's record has gone."""
        self.end_membership(why, dropped=True)
        self._forget_record(link, by_decision=True)

    def _forget_record(self, link: Link, *, by_decision: bool) -> None:
        """This node is in no round, and decides nothing for the others."""
        self.arrival.gone()
        if by_decision:  # else it was an outage, in which others have lapsed, too
            self.lapsed_in = -1
        link.start(link.step_down(), f"decide nothing more of {self.keys.run_id}")

    def end_membership(self, reason: str, *, dropped: bool = False) -> None:
        """This node is no longer in its round: it went on, it left, or it was dropped without being asked."""
        membership = self.membership
        if membership is None or membership.over is not None:
            return
        membership.end(reason, dropped=dropped)
        self._note_end(membership)

    def _note_end(self, membership: Membership) -> None:
        if membership.dropped:
            self.lapsed_in = membership.round.number
            who = f"run {self.keys.run_id}, round {membership.round.number}: node {self.node_id}"
            log.warning("%s was dropped: %s", who, membership.over)
        self.listeners.changed()

    def note_lapse(self) -> None:
        """Remember that this node does not leave its round by itself: coming back, it says that others may, too."""
        if self.membership is not None and self.membership.over is None:
            self.lapsed_in = self.membership.round.number
