"""Pure: which lines about clients a log takes: complaints, and limits that are nearly reached.

Whoever can reach a port can make a server write a line as often as it can connect, thousands of times a second, and a
full disk is what a durable server wants least. So lines about clients come out of a token bucket that fills again
slowly; what it does not pay for is counted, and told with the next line.

A limit is told of once, when 80 % of it are used up, and again only after it has been below 70 %.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from store.limits import Limits

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping

    from store.engine.keyspace import Groups

__all__ = ["LimitWarnings", "RationedLog"]

AT_ONCE = 1000  # lines; a job of so many nodes that all have the wrong token is told of in full
PER_SECOND = 10.0  # lines after that: about 100 MB a day
NEARLY = 0.8  # of a limit: from there on it is told of
BELOW = 0.7  # of a limit: there it is no longer near


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
    """The limits that have been told of."""

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
        self._told = {limit for limit in self._told if shares[limit] >= BELOW} | near
        return lines


def _number(figure: object) -> float:
    assert isinstance(figure, int | float), "figures and limits that belong together are numbers"
    return figure


def _who(limit: str, groups: Groups) -> str:
    """Name the group that holds most, where a limit is one on keys."""
    if limit not in ("keys_max", "stored_bytes_max"):
        return ""
    most = groups.largest(by_keys=limit == "keys_max")
    if most is None:
        return ""
    return f"; of all groups of keys, {most.name[:200]!r} holds {most.keys} keys and {most.bytes} bytes, which is most"
