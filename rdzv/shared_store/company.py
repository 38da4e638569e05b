"""Pure: the facts about members that a round's store uses for its errors and waits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from store.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

NAMED_MAX: Final = 8
"""The number of members, or keys, that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """The facts about this member and the others."""

    superseded: Callable[[], str | None] = lambda: None  # returns why this node is no member any more, if it is not
    lost: Callable[[], tuple[str, ...]] | None = None  # returns the dead members; None: waits go on after a loss
    # Entered around each request that waits for others; its argument returns the awaited keys, in words.
    waiting: Callable[[Callable[[], str]], AbstractContextManager[object]] = nullcontext
    interrupted: Callable[[], object] = lambda: None  # called before a call fails as the round is over for this member
    roster: Roster | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Names the members missing at a barrier: `read` unpacks the value of `key`; `absence`: "lost 41 s ago", or ""."""

    rank: int
    key: Callable[[int], str]
    read: Callable[[bytes], Mapping[int, str]]
    absence: Callable[[str], str]

    def describe_missing(self, ranks: Sequence[int], names: Mapping[int, str]) -> str:
        """Return the missing members as the end of a sentence: "; missing rank 1, node c, lost 41 s ago"."""
        said = []
        for rank in ranks[:NAMED_MAX]:
            name = names.get(rank, "")
            parts = (f"rank {rank}", name and f"node {printable(name)}", name and self.absence(name))
            said.append(", ".join(filter(None, parts)))
        more = f"; and {len(ranks) - NAMED_MAX} more" if len(ranks) > NAMED_MAX else ""
        return f"; missing {'; '.join(said)}{more}" if said else ""
