"""Pure: which lines about clients a log takes: complaints, and limits that are nearly reached.

Whoever can reach a port can make a server write a line as often as it can connect, thousands of times a second, and a
full disk is what a durable server wants least. So lines about clients come out of a token bucket that fills again
slowly; what it does not pay for is counted, and told with the next line.

A limit is told of once, when 80 % of it are used up, and again only after it has been below 70 %.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from store.engine.keyspace import NEARLY
from store.limits import Limits

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping

    from store.engine.keyspace import Group, Groups

__all__ = ["LimitWarnings", "RationedLog"]

AT_ONCE = 1000  # lines; a job of so many nodes that all have the wrong token is told of in full
PER_SECOND = 10.0  # lines after that: about 100 MB a day
BELOW = 0.7  # of a limit: there it is no longer near
GROUPS_NAMED_MOST = 8  # in one look; the others are counted


class RationedLog:
    """Writes lines about clients, as many as a log can bear.

    Args:
        clock: The server's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = float(AT_ONCE)
        self._filled_at = clock()
        self._unsaid = 0

    def write(self, log: logging.Logger, level: int, line: str, *args: Any) -> None:
        """Write a line to this log, if there is one left; with it, how many there was none for before."""
        if not log.isEnabledFor(level):
            return
        now = self._clock()
        self._left = min(self._left + max(now - self._filled_at, 0.0) * PER_SECOND, float(AT_ONCE))
        self._filled_at = now
        if self._left < 1.0:
            self._unsaid += 1
            return
        self._left -= 1.0
        if self._unsaid:
            line, args = line + " (%d lines like this were left out before it)", (*args, self._unsaid)
            self._unsaid = 0
        log.log(level, line, *args)


class LimitWarnings:
    """The limits that have been told of, and the groups of keys that are near their own."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, figures: Mapping[str, object], groups: Groups) -> list[str]:
        """The lines to log now.

        Args:
            figures: What `stats` shows, the limits included.
            groups: What each group of keys takes.
        """
        shares = {limit: _number(figures[used]) / _number(figures[limit]) for limit, used in Limits.used_by().items()}
        near = {limit for limit, share in shares.items() if share > NEARLY}
        lines = [
            f"{used} is {figures[used]}, {int(100 * shares[limit])} % of {limit} ({figures[limit]})"
            f"{_who(limit, groups)}"
            for limit, used in Limits.used_by().items()
            if limit in near - self._told
        ]
        full = [name for name in groups.nearly_full if name not in self._told]
        lines += [
            f"{_holds(group)}: near group_keys_max ({figures['group_keys_max']}) or "
            f"group_bytes_max ({figures['group_bytes_max']})"
            for name in full[:GROUPS_NAMED_MOST]
            if (group := groups.get(name)) is not None
        ]
        if len(full) > GROUPS_NAMED_MOST:
            lines.append(f"so do {len(full) - GROUPS_NAMED_MOST} more groups of keys")
        self._told = {limit for limit in self._told if shares.get(limit, 0.0) >= BELOW} | near | set(groups.nearly_full)
        return lines


def _number(figure: object) -> float:
    assert isinstance(figure, int | float), "figures and limits that belong together are numbers"
    return figure


def _who(limit: str, groups: Groups) -> str:
    """Name the group that holds most, where a limit is one on keys."""
    if limit not in ("keys_max", "stored_bytes_max"):
        return ""
    largest = groups.largest(by_keys=limit == "keys_max")
    return "" if largest is None else f"; of all groups of keys, {_holds(largest)}, which is most"


def _holds(group: Group) -> str:
    return f"{group.name[:200]!r} holds {group.keys} keys and {group.bytes} bytes"
