"""Pure: among whom a member uses the round's store, so that who has not come to a barrier can be named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Company"]

NAMED_MAX: Final = 8
"""How many members an error spells out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """Who uses the store, and among whom: so that a barrier can name who has not come.

    Attributes:
        rank: Of this member.
        roster_key: Where it stands what the member of a rank is called.
        read_roster: Reads ranks and names from what is there.
        absence: What is known here of a member that is gone: "lost 41 s ago"; else empty.
    """

    rank: int
    roster_key: Callable[[int], str]
    read_roster: Callable[[bytes], Mapping[int, str]]
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
