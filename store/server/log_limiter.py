"""Pure: how many lines about strangers a log takes.

Whoever can reach a port can make a server write a line as often as it can connect, thousands of times a second, and a
full disk is what a durable server wants least. So lines come out of a purse that fills again slowly; what it does not
pay for is counted, and told with the next line.
"""

from __future__ import annotations

__all__ = ["Complaints"]

AT_ONCE = 1000  # lines; a job of so many nodes that all have the wrong token is told of in full
PER_SECOND = 10.0  # lines after that: about 100 MB a day


class Complaints:
    """The lines that may still be written, and those that could not be."""

    def __init__(self) -> None:
        self._left = float(AT_ONCE)
        self._filled_at: float | None = None
        self._unsaid = 0

    def say(self, now: float) -> bool:
        """Whether there is a line for one more complaint at this time."""
        if self._filled_at is not None:
            self._left = min(self._left + max(now - self._filled_at, 0.0) * PER_SECOND, float(AT_ONCE))
        self._filled_at = now
        if self._left < 1.0:
            self._unsaid += 1
            return False
        self._left -= 1.0
        return True

    def take_unsaid(self) -> int:
        """How many there was no line for since this was last asked."""
        unsaid, self._unsaid = self._unsaid, 0
        return unsaid
