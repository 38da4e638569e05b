"""Limits the log lines about clients, which could fill the disk, and words warnings of nearly reached limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from store.limits import Limits

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping

    from store.engine.keyspace import KeyGroupTable

AT_ONCE = 1000  # lines in a burst: one per node of a large job with a wrong token
PER_SECOND = 10.0  # lines after the first `AT_ONCE`: about 100 MB a day
NEARLY = 0.8  # the share of a limit above which it is logged
BELOW = 0.7  # the share below which the limit may be logged again


class RateLimitedLog:
    """Writes a limited number of lines about clients."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = float(AT_ONCE)
        self._filled_at = clock()
        self._unsaid = 0

    def write(self, log: logging.Logger, level: int, line: str, *args: Any) -> None:
        """Write a line, unless too many were written."""
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
    """The limits that were logged as nearly reached."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def lines_to_log(self, figures: Mapping[str, Any], groups: KeyGroupTable) -> list[str]:
        """Return the lines to log now; `figures` are those of `stats`."""
        shares = {limit: figures[used] / figures[limit] for limit, used in Limits.figure_by_limit().items()}
        near = {limit for limit, share in shares.items() if share > NEARLY}
        lines = [
            f"{used} is {figures[used]}, {int(100 * shares[limit])} % of {limit} ({figures[limit]})"
            f"{_top_key_group_text(limit, groups)}"
            for limit, used in Limits.figure_by_limit().items()
            if limit in near - self._told
        ]
        self._told = {limit for limit in self._told if shares[limit] >= BELOW} | near
        return lines


def _top_key_group_text(limit: str, groups: KeyGroupTable) -> str:
    most = groups.largest_group(by_keys=limit == "keys_max") if limit in ("keys_max", "stored_bytes_max") else None
    if most is None:
        return ""
    return f"; of all groups of keys, {most.name[:200]!r} holds {most.keys} keys and {most.bytes} bytes, which is most"
