"""Pure: what a member that uses the round's store knows of itself and of the others."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

__all__ = ["NAMED_MAX", "Company", "Roster"]

NAMED_MAX: Final = 8
"""How many members, or keys, an error spells out."""


def _not_over() -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """What is known here of this member and of the others.

    Attributes:
        superseded: Why this node is known here to be no member any more; None as long as it may be one.
        lost: Which members are known here to have died, if waits end because of that; see `SharedStore.end_waits`.
        waiting: Entered around each request that waits for others: who waits for them is not the one who holds them up.
        roster: How a barrier names who has not come, if it is to.
    """

    superseded: Callable[[], str | None] = _not_over
    lost: Callable[[], tuple[str, ...]] | None = None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    roster: Roster | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """By which a barrier names who has not come.

    Attributes:
        rank: Of this member.
        key: Where it stands what the member of a rank is called.
        read: Reads ranks and names from what is there.
        absence: What is known here of a member that is gone: "lost 41 s ago"; else empty.
    """

    rank: int
    key: Callable[[int], str]
    read: Callable[[bytes], Mapping[int, str]]
    absence: Callable[[str], str]

    def describe_missing(self, ranks: Sequence[int], names: Mapping[int, str]) -> str:
        """Return who is missing, for the end of a sentence: "; missing rank 1, node c, lost 41 s ago"."""
        said = []
        for rank in ranks[:NAMED_MAX]:
            name = names.get(rank, "")
            parts = (f"rank {rank}", name and f"node {printable(name)}", name and self.absence(name))
            said.append(", ".join(filter(None, parts)))
        more = f"; and {len(ranks) - NAMED_MAX} more" if len(ranks) > NAMED_MAX else ""
        return f"; missing {'; '.join(said)}{more}" if said else ""
