"""Pure: which lines about clients a log takes: complaints, limits that are nearly reached, and sessions.

Whoever can reach a port can make a server write a line as often as it can connect, thousands of times a second, and a
full disk is what a durable server wants least. So lines about clients come out of a token bucket that fills again
slowly; what it does not pay for is counted, and told with the next line.

A limit is told of once, when 80 % of it are used up, and again only after it has been below 70 %.

A session is named by its number, which it keeps from connection to connection, and by the address that it comes from;
one that keeps leases is also known by the keys on them, which name the node. Ten thousand nodes that come back at once
are told of in numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

from store.engine.keyspace import NEARLY
from store.engine.processes import Closing
from store.limits import Limits
from store.printable import in_words, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from store.engine.keyspace import Group, Groups
    from store.engine.leases import LeaseRecord

__all__ = ["SILENT_AFTER", "Complaints", "LimitWarnings", "SessionLog"]

AT_ONCE = 1000  # lines; a job of so many nodes that all have the wrong token is told of in full
PER_SECOND = 10.0  # lines after that: about 100 MB a day
BELOW = 0.7  # of a limit: there it is no longer near
GROUPS_NAMED_MOST = 8  # in one look; the others are counted
KEYS_NAMED: Final = 2  # of those on the leases that a session keeps
REMEMBERED_MOST: Final = 10_000  # sessions without a connection whose going is remembered

SILENT_AFTER: Final = 0.5
"""Of a lease's TTL: a client that works renews each third of it, so that this is one renewal that has not come."""

HOW: Final = {
    Closing.GOODBYE: "has ended with a goodbye",
    Closing.DROPPED: "is gone: its connection was closed without a goodbye",
    Closing.CUT: "is gone: its connection was cut",
}


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


class SessionLog:
    """What has been told of sessions, and the lines to log; each method gives a line, or None if there is none."""

    def __init__(self) -> None:
        self._lines = Complaints()
        self._gone: OrderedDict[int, float] = OrderedDict()  # when sessions lost their connections, by number
        self._silent: set[int] = set()  # leases that were told of
        self._newest = 0

    def opened(self, number: int, address: str, *, replaces: str | None, now: float) -> str | None:
        """A session has a connection; `replaces` is the one that it had until now."""
        since = self._gone.pop(number, None)
        is_new, self._newest = number > self._newest, max(number, self._newest)
        if replaces is not None:
            how = f"resumes: {replaces}, its connection until now, is given up"
        elif since is not None:
            how = f"resumes after {in_words(now - since)}"
        else:
            how = "begins" if is_new else "resumes"
        return self._line(f"session {number} from {address} {how}", now)

    def closed(
        self, number: int, address: str, how: Closing, leases: Iterable[LeaseRecord], *, now: float
    ) -> str | None:
        """A session has lost its connection, on which it kept these leases."""
        if how is not Closing.GOODBYE:
            self._gone[number] = now
            if len(self._gone) > REMEMBERED_MOST:
                self._gone.popitem(last=False)
        kept = _keys_of(leases)
        return self._line(f"session {number} from {address} {HOW[how]}{kept and f'; it keeps {kept}'}", now)

    def silent(self, number: int, address: str, lease: LeaseRecord, *, remaining: float, now: float) -> str | None:
        """A session that is connected does not renew a lease; told once, until it is `heard` again."""
        if lease.id in self._silent:
            return None
        self._silent.add(lease.id)
        kept = _keys_of([lease]) or f"lease {lease.id}"
        return self._line(
            f"session {number} from {address} is silent: {kept} lapses in {in_words(max(remaining, 0.0))}", now
        )

    def heard(self, silent: set[int]) -> None:
        """Of all leases only these are silent now."""
        self._silent &= silent

    def lapsed(self, lease: LeaseRecord, *, now: float) -> str | None:
        """A lease has lapsed; its keys are still on it."""
        kept = _keys_of([lease])
        left = "; its client's connection had ended" if lease.keeper is None else ""
        went = kept and f", and with it {kept}"
        return self._line(f"lease {lease.id} ({lease.ttl:g} s{left}) has lapsed{went}", now)

    def _line(self, line: str, now: float) -> str | None:
        if not self._lines.say(now):
            return None
        unsaid = self._lines.take_unsaid()
        return f"{line} ({unsaid} lines like this were left out before it)" if unsaid else line


def _keys_of(leases: Iterable[LeaseRecord]) -> str:
    """Name the first keys on leases, and count the others; empty if there are none."""
    keys = [key for lease in leases for key in islice(lease.keys, KEYS_NAMED)]
    named = " and ".join(printable(key, most=200) for key in keys[:KEYS_NAMED])
    more = len(keys) > KEYS_NAMED
    return f"{named} and more" if more else named
