"""Accusations: a member of a round says that another one does not respond, although its lease is live.

The store does not see whether nodes reach each other. A collective that fails may name an unreachable peer. One
accusation proves nothing: the accuser may be cut off itself. If two members accuse the same member, it is expelled, and
its own accusations do not count. One accuser is enough to expel a member with which the store has lost contact: see
`AccusationCheck`. If a connection closes and its peer is unknown, the accused is `UNKNOWN`: the coordinator asks the
store about all members, unless there are too many.

Accusations are keys below the nodes' prefix: only the coordinator's watch delivers them, in order with records.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from rdzv.core.stored import Prose, Stored
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Collection

    from store.messages import Event

ACCUSERS: Final = 2  # a member with this many accusers is expelled
UNKNOWN: Final = ""  # `Accusation.accused` if the member's name is unknown
WHY_MOST: Final = 120  # characters of `Accusation.why`


class Accusation(Stored, kw_only=True):
    """One member's accusation of another."""

    called = "an accusation"

    round: int
    accused: str
    by: str
    why: Prose


class Accusations(dict[str, Accusation]):
    """All current accusations, by key."""

    def apply_event(self, event: Event) -> None:
        """Apply an event of the watch on an accusation's key."""
        self.pop(event.key, None)
        if event.kind == "put":
            with contextlib.suppress(RendezvousStateError):  # an accusation of a later release may be unreadable
                self[event.key] = Accusation.unpack(event.value)

    def against_unnamed_member(self, *, round: int, live: Collection[str]) -> list[Accusation]:
        """Return the accusations of `UNKNOWN` by live members of a round."""
        every = self.values()
        return [one for one in every if one.round == round and one.accused == UNKNOWN and one.by in live]

    def by_live_members(self, *, round: int, live: Collection[str]) -> list[Accusation]:
        """Return the accusations of live members of a round by other live members."""
        return [
            one
            for one in self.values()
            if one.round == round and one.accused in live and one.by in live and one.by != one.accused
        ]

    def member_to_expel(self, *, round: int, live: Collection[str]) -> tuple[str, str] | None:
        """Return the live member with the most accusers, and their reasons; None if there are too few.

        Expel this member before the next call: its own accusations must not count.
        """
        against: dict[str, dict[str, str]] = {}
        for one in self.by_live_members(round=round, live=live):
            against.setdefault(one.accused, {})[one.by] = one.why
        if not against:
            return None
        accused = max(sorted(against), key=lambda node_id: len(against[node_id]))
        if len(against[accused]) < ACCUSERS:
            return None
        said = "; ".join(f"{by}: {why}" for by, why in sorted(against[accused].items())[:ACCUSERS])
        return accused, f"accused by {said}"
