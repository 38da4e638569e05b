"""Pure: members of a round that accuse another one: it does not answer them, though its lease stands.

The store sees that a node reaches the store; it does not see whether the nodes reach one another. A collective that
fails does, and names its peer. One accusation proves nothing: the accuser may be the one that is cut off. Two members
that accuse the same one are believed, and it is taken out of the round; its own accusations count no more then. In a
round of two nobody is the second. One is believed where the store doubts the accused, too: see
`rdzv.node.coordinator.accusations`. Who sees only that a connection has closed, and not whose, accuses `SOMEBODY`: then
the store is asked about all.

An accusation lies beside the nodes' records, so that whoever coordinates hears it in order with what befalls the nodes,
and nobody else is sent it. It stands on the accuser's lease, and counts in the round that it was made in.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from rdzv.core.stored import Prose, Stored
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Collection

    from store.messages import Event

__all__ = ["ACCUSERS", "SOMEBODY", "WHY_MOST", "Accusation", "Accusations"]

ACCUSERS: Final = 2  # who are believed
SOMEBODY: Final = ""  # who is accused where the accuser does not know whom to name; no node is called so
WHY_MOST: Final = 120  # characters of why: they travel with the reason for a loss


class Accusation(Stored, kw_only=True):
    """What one member says of another."""

    called = "an accusation"

    round: int  # in which round
    accused: str  # whom
    by: str  # who says it
    why: Prose  # in words


class Accusations(dict[str, Accusation]):
    """All that stand, by their keys."""

    def heed(self, event: Event) -> None:
        """Take in what has become of a key of one."""
        self.pop(event.key, None)
        if event.kind == "put":
            with contextlib.suppress(RendezvousStateError):  # of a later release, perhaps
                self[event.key] = Accusation.unpack(event.value)

    def said(self, key: str) -> str:
        """Why one was made; empty if it stands no more."""
        return self[key].why if key in self else ""

    def of_somebody(self, *, round: int, live: Collection[str]) -> list[Accusation]:
        """Those that live members of a round have made without a name."""
        every = self.values()
        return [one for one in every if one.round == round and one.accused == SOMEBODY and one.by in live]

    def standing(self, *, round: int, live: Collection[str]) -> list[Accusation]:
        """Those that live members of a round have made of other ones."""
        return [
            one
            for one in self.values()
            if one.round == round and one.accused in live and one.by in live and one.by != one.accused
        ]

    def believed(self, *, round: int, live: Collection[str]) -> tuple[str, str] | None:
        """Return a live member whom enough live members of a round accuse, and why, in words; None if there is none.

        One at a time, the one that most accuse: without it, its own accusations count no more.
        """
        against: dict[str, dict[str, str]] = {}
        for one in self.standing(round=round, live=live):
            against.setdefault(one.accused, {})[one.by] = one.why
        if not against:
            return None
        accused = max(sorted(against), key=lambda node_id: len(against[node_id]))
        if len(against[accused]) < ACCUSERS:
            return None
        said = "; ".join(f"{by}: {why}" for by, why in sorted(against[accused].items())[:ACCUSERS])
        return accused, f"accused by {said}"
