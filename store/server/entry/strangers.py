"""Pure: what those may take who have connected and proved nothing yet (promises S7, S8).

Before it has said hello, and proven the token if one is wanted, a connection costs memory (with TLS a third of a
megabyte) and belongs to anybody. So such connections are bounded apart from the others: what is left of
`connections_max` is for those who do. When there is no room for another, those who have been silent for a second make
way, first of the address that has most of them; newcomers wait in the system's queue until then. Where those who do
prove themselves take longer than that, since their machines or this server are busy, all are given longer: whoever is
turned away there comes again, which keeps everybody busier still.

One address may have only so many connections, and wrong guesses at the token are answered only so often. Loopback is
exempt from the former: whoever is on this machine has other means.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from typing import Protocol

__all__ = ["Stranger", "Strangers", "is_loopback"]

YIELD_AFTER = 1.0  # seconds in which an honest client on a busy network has said hello
YIELD_FACTOR = 3.0  # times what the slowest honest client has taken lately, if that is more ...
YIELD_MOST = 8.0  # ... but at most so many seconds
LATELY = 30.0  # seconds
HELLO_FACTOR = 6  # times the handshake_timeout that a hello may take at most, where all take long
GUESSES_AT_ONCE = 100.0  # wrong tokens of one address; a job of so many nodes on one host is told of each
GUESSES_PER_SECOND = 1.0  # after that
ADDRESSES_MOST = 10_000  # of wrong guesses, that are remembered


class Stranger(Protocol):
    """A connection that can be ended."""

    def abort(self) -> None:
        """Close it at once."""
        ...


class Strangers:
    """The connections that have proved nothing yet, and how each address behaves.

    Args:
        most: How many there may be.
        per_address_max: How many connections, proven or not, one address may have.
    """

    def __init__(self, *, most: int, per_address_max: int) -> None:
        self.most = most
        self._per_address_max = per_address_max
        self._unproven: OrderedDict[Stranger, tuple[str, float]] = OrderedDict()  # address and time, in order of coming
        self._connections: Counter[str] = Counter()
        self._guesses: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and as of when
        self._slowest = 0.0  # seconds that an honest client has taken ...
        self._slowest_at = 0.0  # ... and when that was

    def __len__(self) -> int:
        return len(self._unproven)

    @property
    def full(self) -> bool:
        """Whether there is no room for another."""
        return len(self._unproven) >= self.most

    def came(self, who: Stranger, address: str, now: float) -> None:
        """Somebody has connected."""
        self._unproven[who] = address, now

    def proved(self, who: Stranger, now: float) -> None:
        """It has proven what is wanted."""
        if who in self._unproven:
            took = now - self._unproven[who][1]
            if took >= self._slowest or now - self._slowest_at > LATELY:
                self._slowest, self._slowest_at = took, now
            self.went(who)

    def patience(self, now: float) -> float:
        """Seconds that an honest client may take, as far as those tell who have come lately."""
        return YIELD_FACTOR * self._slowest if now - self._slowest_at <= LATELY else 0.0

    def time_left(self, who: Stranger, now: float, *, within: float) -> float:
        """Seconds that one of them still has, who has had those that all are given; more where all take long."""
        if who not in self._unproven:
            return 0.0
        return min(self.patience(now), HELLO_FACTOR * within) - (now - self._unproven[who][1])

    def went(self, who: Stranger) -> None:
        """It has gone."""
        self._unproven.pop(who, None)

    def to_make_way(self, now: float) -> Stranger | None:
        """Who must go so that another may come; None while nobody has been silent for long."""
        if not self.full:
            return None
        yield_after = max(YIELD_AFTER, min(self.patience(now), YIELD_MOST))
        if now - next(iter(self._unproven.values()))[1] < yield_after:  # who came first has been silent for longest
            return None
        silent = [(who, address) for who, (address, since) in self._unproven.items() if now - since >= yield_after]
        if not silent:
            return None
        ((most, _),) = Counter(address for _, address in silent).most_common(1)
        return next(who for who, address in silent if address == most)

    def connected(self, address: str) -> None:
        """One connection more from this address."""
        self._connections[address] += 1

    def disconnected(self, address: str) -> None:
        """One fewer."""
        self._connections[address] -= 1
        if self._connections[address] <= 0:
            del self._connections[address]

    def refusal(self, address: str, now: float) -> str | None:
        """Why this address may not connect once more, if so."""
        if self._connections[address] >= self._per_address_max and not is_loopback(address):
            return (
                f"{address} has {self._connections[address]} connections, the most that one address may have "
                f"(address_connections_max)"
            )
        if self._guesses_left(address, now) < 1.0:
            return f"too many wrong tokens have come from {address}: try again in a second, with the right one"
        return None

    def guessed_wrong(self, address: str, now: float) -> None:
        """A wrong token came from this address."""
        self._guesses[address] = max(self._guesses_left(address, now) - 1.0, 0.0), now
        self._guesses.move_to_end(address)
        if len(self._guesses) > ADDRESSES_MOST:
            self._guesses.popitem(last=False)

    def _guesses_left(self, address: str, now: float) -> float:
        left, as_of = self._guesses.get(address, (GUESSES_AT_ONCE, now))
        return min(left + (now - as_of) * GUESSES_PER_SECOND, GUESSES_AT_ONCE)


def is_loopback(address: str) -> bool:
    """Whether this is an address of the machine itself; a name is none."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
