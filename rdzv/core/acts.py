"""Pure: the picture that a coordinator decides on, and the acts of which `decision.decide` returns one."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.state import Head, NodeRecord, Progress, Unban
    from rdzv.core.stopping import Stop
    from rdzv.core.view import View

__all__ = ["Act", "Ask", "Complete", "Expel", "Obstacle", "Picture", "Report", "Resize", "Wait"]


class Obstacle(NamedTuple):
    """The store has refused a round for lack of room: no round is completed before `until`."""

    until: float
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All that a decision rests on. Nothing of it changes while `decide` looks at it, in whichever thread."""

    view: View
    head: Head
    told: Progress | None = None  # the last report of this coordinator, or of the one before
    told_at: float = 0.0
    resized_at: int = 0  # the revision of the last resize that was heeded
    unbanned_at: int = 0  # the revision of the last lifting of a ban that was noted
    obstacle: Obstacle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Take the run's new numbers of nodes."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expel:
    """Take a member out of the round, and say so in the same transaction: so it is told itself as well."""

    node_id: str
    arrival: int
    why: str
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Commit this round, with these members in order of rank."""

    number: int
    members: tuple[NodeRecord, ...]
    progress: Progress

    def is_of_the_same(self, other: Complete) -> bool:
        """Return whether both are of one round, of the same arrivals, whatever their ranks."""
        arrivals = [sorted(record.arrival for record in one.members) for one in (self, other)]
        return self.number == other.number and arrivals[0] == arrivals[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Write the progress; and note in the history that these bans were lifted, by the names of their keys."""

    progress: Progress
    unbans: Mapping[str, Unban] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask the members where to stop, or tell them, over this revision of the key."""

    stop: Stop
    over: int
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to do before `until` (on the coordinator's clock; None: before the next event)."""

    until: float | None
    progress: Progress
    error: BaseException | None = None  # what the order, which may be the user's own, has raised, if that is why


Act = Resize | Expel | Complete | Report | Ask | Wait
