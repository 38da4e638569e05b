"""A node's knowledge of its own state in its run, which the files of this folder share.

The state outlives the link to a store. Only the node's loop writes the state; any thread may read it.
"""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from rdzv.config.settings import describe_difference
from rdzv.core.addresses import with_ipv6_zone
from rdzv.core.decision import GIVEN_UP_MOST
from rdzv.core.stuck.step_log import StepLog
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousRefusedError,
    RendezvousSettingsError,
    RendezvousTimeoutError,
)
from rdzv.membership import Membership
from rdzv.node.member.arrival import Arrival, ArrivalState
from rdzv.node.member.step_reporter import StepReporter
from rdzv.node.run.run_settings import RunSettings
from store.printable import make_logger, without_durations

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from rdzv.config.settings import Settings
    from rdzv.core.decision import Joiner
    from rdzv.core.hosts.lost_store import LastKnownRun
    from rdzv.core.keys import Keys
    from rdzv.core.round import Round
    from rdzv.core.state import AnnouncedDrain, Ban, Closed, Head
    from rdzv.listeners import Listeners
    from rdzv.node.link.node_loop import NodeLoop
    from rdzv.node.link.ports import HeldPort
    from rdzv.node.link.store_session import StoreSession
    from store.keeping import HeldLease

log: Final = make_logger(__name__)

NOT_WAITING = "not waiting for anything"


@dataclass(eq=False)
class NodeState:
    """One node's state in one run."""

    settings: Settings
    keys: Keys
    _: KW_ONLY
    node_id: str
    listeners: Listeners
    loop: NodeLoop
    rng: random.Random  # for `incarnation` and for jitter: not all nodes act at once
    port: HeldPort  # the port where this node listens if it becomes rank 0
    agreed: RunSettings = field(init=False)  # the run's settings; unset if this node cannot join
    incarnation: str = field(init=False)  # see `NodeRecord`
    arrival: Arrival[HeldLease] = field(default_factory=Arrival)
    membership: Membership | None = None  # this node's last membership in a round, which may be over
    known_round: int = -1  # the number of the last round that the node knows of; -1 for none
    unreached: bool = False  # see `NodeRecord`
    cut_off: tuple[str, ...] = ()  # hosts where others, but not this node, reached rank 0; cleared when all do
    times_left_out: int = 0  # how often this node was left out of a round; reset when all members reach rank 0
    given_up: str = ""  # the round that this node gave up, and why, for its record and timeout errors; else ""
    drain: AnnouncedDrain | None = None  # the drain of this node, once announced
    leaves_because: str = ""  # the reason that this node gives when it leaves; "" if none
    lapses: int = 0  # how many leases the node lost while waiting for its next round
    lapsed_in: int = -1  # see `NodeRecord`
    refusal: RendezvousError | None = None  # the error that ends a wait if the run's settings change
    finished_step: int | None = None  # the last step that the node finished; None if it counts none
    known: LastKnownRun | None = None  # the node's knowledge of the last lost store; None if none was lost
    own_beats: StepReporter = field(init=False)
    on_keep_alive: Callable[[], object] = int
    # Called when the node's lease has ended by the node's own clock, as a silent store cannot report that.
    on_lease_lost: Callable[[], object] = int
    _reason: str = NOT_WAITING
    _reason_now: Callable[[], str | None] | None = None  # returns `_reason` with current durations

    def __post_init__(self) -> None:
        self.incarnation = f"{self.rng.getrandbits(64):016x}"
        self.own_beats = StepReporter(self.settings)
        if self.settings.can_join:
            self.agreed = RunSettings(self.settings)

    @property
    def is_member(self) -> bool:
        """True if the node is in a round, as far as it knows."""
        return self.membership is not None and self.membership.over is None

    @property
    def wait_reason(self) -> str:
        """The reason for the node's present wait, in words; thread-safe."""
        reason_now = self._reason_now
        return (reason_now() if reason_now is not None else None) or self._reason

    @wait_reason.setter
    def wait_reason(self, reason: str) -> None:
        self._reason, self._reason_now = reason, None

    def set_wait_reason(self, reason: str, reason_now: Callable[[], str | None] | None = None) -> None:
        """Set the reason for waiting, and log it if it is new; `reason_now` returns it with current durations."""
        # The cheap conditions come first, because this runs at each event of the store.
        is_shown = reason != self._reason and log.isEnabledFor(logging.INFO)
        if is_shown and without_durations(reason) != without_durations(self._reason):
            log.info("run %s, node %s: %s", self.keys.run_id, self.node_id, reason)
        self._reason, self._reason_now = reason, reason_now

    def timeout_error(self, link: StoreSession | None) -> RendezvousTimeoutError:
        """Return the error for a timed-out `next_rendezvous`."""
        away = link is None or not link.store.connected
        why = f": {link.store.last_problem}" if link is not None and self.settings.endpoint.has_successors else ""
        problem = f"; the store is out of reach{why}{link.no_listener_hint if link is not None else ''}" if away else ""
        reason = self.wait_reason  # it may already contain `given_up`, from the coordinator's report
        if self.given_up and self.given_up[:GIVEN_UP_MOST] not in reason:
            problem += f"; {self.given_up}"
        return RendezvousTimeoutError(
            f"run {self.keys.run_id}, node {self.node_id}: no round within "
            f"join_timeout={self.settings.join_timeout:g} s at {self.settings.endpoint.url}: "
            f"{reason}{problem}"
        )

    def raise_if_closed(self, head: Head, me: Joiner) -> None:
        """Raise if the run is closed, unless a round completed after this node's arrival."""
        if head.closed is not None and not (head.round and head.round.revision > me.arrival > 0):
            raise self.closed_error(head.closed, spare=False)

    def announced_drain(self, head: Head) -> AnnouncedDrain | None:
        """Return this node's announced drain. Ignore a drain of an earlier process with its name."""
        leaving = head.drains.get(self.node_id)
        if leaving is not None and leaving.revision >= self.arrival.began > 0:
            self.drain = leaving  # kept: the drain's key lapses
        return self.drain

    def drained_error(self, leaving: AnnouncedDrain) -> RendezvousGracefulExitError:
        """Return the error for a drained node that joins a round."""
        reason = f": {leaving.reason}" if leaving.reason else ""
        return RendezvousGracefulExitError(
            f"run {self.keys.run_id}: node {self.node_id} is to leave{reason}, and joins no round any more"
        )

    def banned_error(self, ban: Ban) -> RendezvousRefusedError:
        """Return the error for a banned node."""
        return RendezvousRefusedError(f"run {self.keys.run_id}: node {self.node_id} is {ban}; rdzv unban lets it in")

    def closed_error(self, closed: Closed, *, spare: bool) -> RendezvousError:
        """Return the error for a call that finds the run closed."""
        reason = f": {closed.reason}" if closed.reason else ""
        by = f" by {closed.by}" if closed.by else ""
        message = f"run {self.keys.run_id} is closed{by}{reason}"
        if spare and not closed.given_up:  # a spare node exits with success, unless the run was given up
            return RendezvousGracefulExitError(f"{message}; node {self.node_id} was a spare and is not needed any more")
        return RendezvousClosedError(message, reason=closed.reason, given_up=closed.given_up, status=closed.status)

    def fail_on_new_settings(self, theirs: Mapping[str, object]) -> None:
        """End this node's wait with an error: the run now has settings `theirs`, which differ from this node's."""
        difference = describe_difference(self.settings.shared(), theirs)
        self.refusal = RendezvousSettingsError(f"run {self.keys.run_id} now has other settings: {difference}")
        self.listeners.notify()

    def handle_lease_loss(self, lease: HeldLease, reason: str) -> None:
        """Handle the loss of a lease. If this node's record was on it, the record and the membership are lost."""
        if self.arrival.lease is lease:
            self.arrival.on_lease_lost()
            self.end_membership(reason, dropped=True)
            self.on_lease_lost()
            self.listeners.notify()

    def keep_alive_note(self, away: bool) -> bytes:
        """Return the note for the next keep-alive; `away`: the node has just reconnected."""
        self.on_keep_alive()
        return self.own_beats.keep_alive_note(self.membership, away=away)

    def become_member(
        self, round: Round, rank: int, me: Joiner, link: StoreSession, *, time: Callable[[], float]
    ) -> Membership:
        """Become a member of a round that contains this node; `time` is the node's clock, which is thread-safe."""
        self.arrival.on_accepted()
        self.lapses = 0
        self.lapsed_in = -1
        ((host, _), *_) = self.settings.endpoint.hosts
        self.membership = membership = Membership(
            round=round.replace(host=with_ipv6_zone(host, round.host)),
            rank=rank,
            arrival=me.arrival,
            node_id=self.node_id,
            store_id=link.store.store_id,
            beats=StepLog(round.number, time, expected=self.finished_step is not None),
        )
        membership.beats.on_wait = partial(self.loop.call_soon, self.listeners.notify)
        self.known_round = max(self.known_round, round.number)
        who = f"run {self.keys.run_id}, round {round.number}: node {self.node_id}"
        log.info("%s has rank %d of %d", who, rank, round.size)
        self.update_membership(link)  # the head may have changed while this node read its rank
        self.listeners.notify()
        return membership

    def update_membership(self, link: StoreSession) -> None:
        """Update the membership from the run's head."""
        membership = self.membership
        if membership is None or membership.over is not None:
            return
        if link.follower.error is not None:
            self.end_membership(f"the store is lost: {link.follower.error}", dropped=True)
            return
        # A later round may contain a record that is being sent: on etcd, the round's event may precede the answer.
        membership.update(link.follower.head, rejoins=self.arrival.state is ArrivalState.SENT)
        if not self.is_member:
            self._handle_membership_end(membership)
        if membership.record_gone:
            self._forget_record(link, by_decision=membership.expelled)

    def note_removal(self, link: StoreSession, why: str) -> None:
        """Handle the removal of this node's record by a ban or a drain."""
        self.end_membership(why, dropped=True)
        self._forget_record(link, by_decision=True)

    def _forget_record(self, link: StoreSession, *, by_decision: bool) -> None:
        self.arrival.on_removed()
        if by_decision:  # no outage has ended the lease: the next record names no lapsed round
            self.lapsed_in = -1
        link.spawn(link.step_down(), f"decide nothing more of {self.keys.run_id}")

    def end_membership(self, reason: str, *, dropped: bool = False) -> None:
        """End the membership, if any, because the node joined a later round, left, or was dropped."""
        membership = self.membership
        if membership is None or membership.over is not None:
            return
        membership.end(reason, dropped=dropped)
        self._handle_membership_end(membership)

    def _handle_membership_end(self, membership: Membership) -> None:
        if membership.dropped:
            self.lapsed_in = membership.round.number
            who = f"run {self.keys.run_id}, round {membership.round.number}: node {self.node_id}"
            log.warning("%s was dropped: %s", who, membership.over)
        self.listeners.notify()

    def note_lapse_in_round(self) -> None:
        """Remember the round in which this node's lease expired, for its next record."""
        if self.membership is not None and self.membership.over is None:
            self.lapsed_in = self.membership.round.number
