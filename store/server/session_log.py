"""Pure: what an operator is told of clients' sessions: one line each when they come, are silent, resume and go.

A session is named by its number, which it keeps from connection to connection, and by the address that it comes from;
one that keeps leases is also known by the keys on them, which name the node. Lines come out of a purse, as those about
strangers do: ten thousand nodes that come back at once are told of in numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

from store.engine.processes import Closing
from store.printable import in_words, printable
from store.server.log_limiter import Complaints

if TYPE_CHECKING:
    from collections.abc import Iterable

    from store.engine.leases import LeaseRecord

__all__ = ["SILENT_AFTER", "SessionLog"]

KEYS_NAMED: Final = 2  # of those on the leases that a session keeps
REMEMBERED_MOST: Final = 10_000  # sessions without a connection whose going is remembered

SILENT_AFTER: Final = 0.5
"""Of a lease's TTL: a client that works renews each third of it, so that this is one renewal that has not come."""

HOW: Final = {
    Closing.GOODBYE: "has ended with a goodbye",
    Closing.DROPPED: "is gone: its connection was closed without a goodbye",
    Closing.CUT: "is gone: its connection was cut",
}


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
