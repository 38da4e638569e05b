"""Pure: accusations: a member of a round says that another one does not answer, although its lease is live.

The store sees that a node reaches the store, but not if nodes reach each other. A failed collective shows that, and
names the peer. One accusation proves nothing: the accuser may be cut off itself. Two members that accuse the same one
are believed, and it is removed from the round; its own accusations are then ignored. One accuser is believed if the
store doubts the accused, too: see `rdzv.node.coordinator.accusations`. A member that sees a closed connection without
its peer's name accuses `SOMEBODY`: then the store is asked about all members.

Accusations are keys beside the nodes' records, so that the coordinator sees both in order and no other node is sent
them. They are on the accuser's lease, and count for one round.
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

ACCUSERS: Final = 2  # accusers that are believed together
SOMEBODY: Final = ""  # the accused if the accuser does not know the name; no node has it
WHY_MOST: Final = 120  # characters of `why`, which is part of the reason for a loss


class Accusation(Stored, kw_only=True):
    """One member's accusation of another."""

    called = "an accusation"

    round: int
    accused: str
    by: str
    why: Prose


class Accusations(dict[str, Accusation]):
    """All current accusations, by key."""

    def heed(self, event: Event) -> None:
        """Apply an event of an accusation's key."""
        self.pop(event.key, None)
        if event.kind == "put":
            with contextlib.suppress(RendezvousStateError):  # perhaps from a later release
                self[event.key] = Accusation.unpack(event.value)

    def said(self, key: str) -> str:
        """Return an accusation's reason; empty if it no longer exists."""
        return self[key].why if key in self else ""

    def of_somebody(self, *, round: int, live: Collection[str]) -> list[Accusation]:
        """Return the accusations without a name that live members of a round have made."""
        every = self.values()
        return [one for one in every if one.round == round and one.accused == SOMEBODY and one.by in live]

    def standing(self, *, round: int, live: Collection[str]) -> list[Accusation]:
        """Return the accusations that live members of a round have made of others."""
        return [
            one
            for one in self.values()
            if one.round == round and one.accused in live and one.by in live and one.by != one.accused
        ]

    def believed(self, *, round: int, live: Collection[str]) -> tuple[str, str] | None:
        """Return the live member that most live members accuse, and why, in words; None if they are too few.

        One at a time: without it, its own accusations do not count.
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
