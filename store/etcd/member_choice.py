"""Chooses the member that a client tries next, and checks that the cluster is still the same one (S10)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from store.errors import StoreReplaced
from store.etcd.codec import Failure, FailureKind

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from store.etcd.rpc import etcd_pb2 as pb

PAUSE_FIRST = 0.02  # seconds; the longest first pause between attempts
PAUSE_GROWTH = 1.6  # the factor by which the longest pause grows per attempt
PAUSE_MOST = 5.0  # seconds; the longest pause, unless the last attempt could not connect
PAUSE_MOST_UNREACHED = 1.0  # seconds; the longest pause after a failure to connect


def max_retry_pause(failures: int, most: float = PAUSE_MOST) -> float:
    """Return the longest pause, in seconds, after this many failed attempts."""
    return min(PAUSE_FIRST * PAUSE_GROWTH ** min(failures, 16), most)


class MemberSelector:
    """The members of one cluster, as one client knows them."""

    def __init__(self, members: int, rng: random.Random) -> None:
        self._members = range(members)
        self._rng = rng
        self._failing: set[int] = set()  # members that have not answered since they last failed
        self.place: int = 0  # the last chosen member
        self.misses: int = 0  # consecutive failures
        self.try_at: float = -math.inf  # the time of the next attempt
        self.problem: str = "it has never answered"
        self.on_reach: Callable[[bool], object] = bool  # called with False when all members fail, True when one answers

    @property
    def is_single(self) -> bool:
        """True if the cluster has only one member."""
        return len(self._members) == 1

    @property
    def all_fail(self) -> bool:
        """True if every member has failed, and none has answered since."""
        return len(self._failing) == len(self._members)

    def choose_member(self) -> int:
        """Choose a random member that is not failing; if all are, any but the previous choice."""
        healthy = [place for place in self._members if place not in self._failing]
        others = [place for place in self._members if place != self.place]
        candidates = healthy or others or [self.place]
        self.place = candidates[self._rng.randrange(len(candidates))]
        return self.place

    def forget_failures(self) -> None:
        """Count failed members as healthy again; if all have failed, change nothing."""
        if not self.all_fail:
            self._failing.clear()

    def note_problem(self, place: int, failure: Failure) -> None:
        """Note a member's problem."""
        if not (failure.silent and place in self._failing):  # silence does not replace a failing member's reason
            self.problem = str(failure)

    def note_failure(self, place: int, failure: Failure, now: float) -> None:
        """Note a member's failure, and set `try_at`. The pause grows only after as many failures as members."""
        self.note_problem(place, failure)
        was_in_reach = not self.all_fail
        self._failing.add(place)
        if was_in_reach and self.all_fail:
            self.on_reach(False)
        self.misses += 1
        burden = failure.silent or failure.trouble is not FailureKind.UNDONE or "no leader" in str(failure)
        most = PAUSE_MOST if burden else PAUSE_MOST_UNREACHED
        longest = max_retry_pause(max(self.misses - len(self._members), 0), most)
        self.try_at = now + self._rng.uniform(longest / 2, longest)

    def note_answer(self, place: int) -> None:
        """Note that a member has answered."""
        before = self.all_fail
        self._failing.discard(place)
        if not self._failing:
            self.problem = ""
        if before:
            self.on_reach(True)

    def jitter(self, seconds: float) -> float:
        """Return a random time, from half to one and a half times `seconds`."""
        return self._rng.uniform(0.5, 1.5) * seconds

    def random_retry_pause(self, failures: int) -> float:
        """Return a random pause before another attempt at a request; 0 if `failures` is 0."""
        return self._rng.uniform(0, max_retry_pause(failures)) if failures > 0 else 0.0


class ClusterIdentity:
    """A cluster's id, the id of the member that answered last, and the highest revision seen."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.cluster_id: str | None = None
        self.member_id: str = ""
        self.revision: int = 0

    def check_header(self, header: pb.ResponseHeader, *, floor: int = 0) -> None:
        """Note a member's answer; raise `StoreReplaced` if it is from another cluster.

        A cluster whose data was deleted keeps its id, which is made from its addresses, but its revisions restart.
        `floor` is a revision known before the request: only a cluster without its data answers with a lower one.
        """
        cluster_id, revision = f"{header.cluster_id:x}", header.revision
        reason = ""
        if self.cluster_id not in (None, cluster_id):
            reason = f"{self.cluster_id} has been replaced by {cluster_id}"
        elif revision < floor:
            reason = f"it is at revision {revision}, and was at {floor} before"
        if reason:
            raise StoreReplaced(
                f"the cluster at {self._name} is not the one this client knew: {reason}, so its data is gone"
            )
        self.cluster_id, self.member_id = cluster_id, f"{header.member_id:x}"
        self.revision = max(self.revision, revision)
