"""Pure: what to tell the operator before a limit is reached, and which group of keys holds most.

A limit is told of once, when 80 % of it are used up, and again only after it has been below 70 %.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.engine.keyspace import NEARLY
from store.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from store.engine.keyspace import Group, Groups

__all__ = ["LimitWarnings"]

BELOW = 0.7  # of a limit: there it is no longer near
GROUPS_NAMED_MOST = 8  # in one look; the others are counted


class LimitWarnings:
    """The limits that have been told of."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._groups_told: set[str] = set()

    def look(self, figures: Mapping[str, object], groups: Groups) -> list[str]:
        """The lines to log now.

        Args:
            figures: What `stats` shows, the limits included.
            groups: What each group of keys takes.
        """
        lines = []
        for limit, used in Limits.used_by().items():
            now, most = figures[used], figures[limit]
            assert isinstance(now, int)
            assert isinstance(most, int)
            if now > NEARLY * most and limit not in self._told:
                self._told.add(limit)
                lines.append(f"{used} is {now}, {100 * now // most} % of {limit} ({most}){_who(limit, groups)}")
            elif now < BELOW * most:
                self._told.discard(limit)
        return lines + self._near_in_groups(figures, groups)

    def _near_in_groups(self, figures: Mapping[str, object], groups: Groups) -> list[str]:
        self._groups_told.intersection_update(groups.nearly_full)
        untold = [name for name in groups.nearly_full if name not in self._groups_told]
        self._groups_told.update(untold)
        lines = [
            f"{_holds(group)}: near group_keys_max ({figures['group_keys_max']}) or "
            f"group_bytes_max ({figures['group_bytes_max']})"
            for name in untold[:GROUPS_NAMED_MOST]
            if (group := groups.get(name)) is not None
        ]
        if len(untold) > GROUPS_NAMED_MOST:
            lines.append(f"so do {len(untold) - GROUPS_NAMED_MOST} more groups of keys")
        return lines


def _who(limit: str, groups: Groups) -> str:
    """Name the group that holds most, where a limit is one on keys."""
    if limit not in ("keys_max", "stored_bytes_max"):
        return ""
    largest = groups.largest(by_keys=limit == "keys_max")
    return "" if largest is None else f"; of all groups of keys, {_holds(largest)}, which is most"


def _holds(group: Group) -> str:
    return f"{group.name[:200]!r} holds {group.keys} keys and {group.bytes} bytes"
