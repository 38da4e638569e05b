"""Pure: what those may take who have connected and proved nothing yet (promises S7, S8).

Before it has said hello, and proven the token if one is wanted, a connection costs memory (with TLS a third of a
megabyte) and belongs to anybody. So such connections are bounded apart from the others: what is left of
`connections_max` is for those who do. When there is no room for another, those who have been silent for a second make
way, first of the address that has most of them; newcomers wait in the system's queue until then. Where those who do
prove themselves take longer than that, since their machines or this server are busy, all are given longer: whoever is
turned away there comes again, which keeps everybody busier still.

One address may have only so many connections. Loopback is exempt: whoever is on this machine has other means. Who gives
a wrong token is told so at once, but after a hundred of them the next ones from its address are told late, and stand
among those who have proved nothing meanwhile. Nobody is refused for what others of its address have given: behind one
address there may be a whole office.

What each connection takes is counted here, too, proven or not: thousands that do nothing take memory.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Stranger", "Strangers", "is_loopback"]

YIELD_AFTER = 1.0  # seconds in which an honest client on a busy network has said hello
YIELD_FACTOR = 3.0  # times what the slowest honest client has taken lately, if that is more ...
YIELD_MOST = 8.0  # ... but at most so many seconds
LATELY = 30.0  # seconds
HELLO_FACTOR = 6  # times the handshake_timeout that a hello may take at most, where all take long
GUESSES_AT_ONCE = 100.0  # wrong tokens of one address; a job of so many nodes on one host is told of each
GUESSES_PER_SECOND = 1.0  # after that
BESIDE_SHARE = 4  # a flood of those who want a page or metrics takes no more than one part in so many of the room
LATE_ANSWER = 1.0  # seconds after which who gives another one is told so
ADDRESSES_MOST = 10_000  # of wrong guesses, that are remembered


class Stranger(Protocol):
    """A connection that can be ended."""

    def abort(self) -> None:
        """Close it at once."""
        ...


@dataclass(slots=True)
class _Row:
    """What is known of one connection."""

    address: str
    since: float  # when it came, or was last of use
    cost: int  # bytes
    beside: bool
    due: float = math.inf  # when it is given up
    patiently: bool = False
    give_up: Callable[[], None] | None = None


class Strangers:
    """All connections, how long those may stand that have proved nothing yet, and how each address behaves.

    Args:
        most: How many may have proved nothing.
        per_address_max: How many connections, proven or not, one address may have.
        within: Seconds in which one is to say hello.

    Attributes:
        connections_max: How many there may be, proven or not.
        bytes: What all of them take.
    """

    def __init__(self, *, most: int, per_address_max: int, within: float) -> None:
        self.most = most
        self._per_address_max = per_address_max
        self._within = within
        self._rows: dict[Stranger, _Row] = {}
        self._unproven: OrderedDict[Stranger, _Row] = OrderedDict()  # in order of coming
        self.connections_max: float = math.inf
        self.bytes: int = 0
        self._connections: Counter[str] = Counter()
        self._guesses: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and as of when
        self._slowest = 0.0  # seconds that an honest client has taken ...
        self._slowest_at = 0.0  # ... and when that was

    def __len__(self) -> int:
        """How many have proved nothing."""
        return len(self._unproven)

    @property
    def has_room(self) -> bool:
        """Whether there may be one more, proven or not."""
        return len(self._rows) < self.connections_max

    @property
    def connections(self) -> int:
        """How many there are, proven or not."""
        return len(self._rows)

    @property
    def all(self) -> tuple[Stranger, ...]:
        """Everybody, proven or not."""
        return tuple(self._rows)

    def is_full(self, *, coming: int = 0, beside: bool = False) -> bool:
        """Whether there is no room for another.

        Args:
            coming: How many have been accepted that are not here yet.
            beside: Whether they come to something beside the store, for which there is only a part of the room.
        """
        if len(self._unproven) + coming >= self.most:
            return True
        share = max(self.most // BESIDE_SHARE, 1)
        return beside and sum(row.beside for row in self._unproven.values()) + coming >= share

    def came(self, who: Stranger, address: str, now: float, *, cost: int = 0, beside: bool = False) -> None:
        """Somebody has connected; `beside`: to a page or to metrics, and not to the store itself."""
        row = self._rows[who] = self._unproven[who] = _Row(address, now, cost, beside)
        self._connections[address] += 1
        self.bytes += row.cost

    def proved(self, who: Stranger, now: float) -> None:
        """It has said hello, and proven what is wanted."""
        if who in self._unproven:
            took = now - self._unproven[who].since
            if took >= self._slowest or now - self._slowest_at > LATELY:
                self._slowest, self._slowest_at = took, now
            self.is_served(who)

    def is_served(self, who: Stranger) -> None:
        """It has asked something that it may ask, and is no stranger until that is answered."""
        self._unproven.pop(who, None)

    def stands_again(self, who: Stranger, now: float) -> None:
        """It has been answered."""
        row = self._rows.get(who)
        if row is not None:
            row.since = now
            self._unproven[who] = row

    def went(self, who: Stranger) -> None:
        """It has gone."""
        row = self._rows.pop(who, None)
        if row is None:
            return
        self._unproven.pop(who, None)
        self.bytes -= row.cost
        self._connections[row.address] -= 1
        if self._connections[row.address] <= 0:
            del self._connections[row.address]

    def give_time(self, who: Stranger, due: float, give_up: Callable[[], None], *, patiently: bool = False) -> None:
        """Let it go on until then, or else up; `patiently`: longer, where honest clients take long."""
        row = self._rows.get(who)
        if row is not None:
            row.due, row.give_up, row.patiently = due, give_up, patiently

    def first_due(self) -> float | None:
        """When the first of them is to be given up."""
        first = min((row.due for row in self._unproven.values()), default=math.inf)
        return first if first < math.inf else None

    def overdue(self, now: float) -> list[Callable[[], None]]:
        """What gives up those whose time is over."""
        found = []
        for who, row in self._unproven.items():
            if row.due > now or row.give_up is None:
                continue
            left = self.time_left(who, now) if row.patiently else 0.0
            if left > 0.0:
                row.due = now + left
            else:
                row.due = math.inf
                found.append(row.give_up)
        return found

    def patience(self, now: float) -> float:
        """Seconds that an honest client may take, as far as those tell who have come lately."""
        return YIELD_FACTOR * self._slowest if now - self._slowest_at <= LATELY else 0.0

    def time_left(self, who: Stranger, now: float) -> float:
        """Seconds that one of them still has, who has had those that all are given; more where all take long."""
        if who not in self._unproven:
            return 0.0
        return min(self.patience(now), HELLO_FACTOR * self._within) - (now - self._unproven[who].since)

    def to_make_way(self, now: float, *, beside: bool = False) -> Stranger | None:
        """Who must go so that another may come; None while nobody has been silent for long."""
        if not self.is_full(beside=beside):  # whoever is still coming has not been silent
            return None
        among = beside and len(self._unproven) < self.most  # they have used up their part
        yield_after = max(YIELD_AFTER, min(self.patience(now), YIELD_MOST))
        if now - next(iter(self._unproven.values())).since < yield_after:  # the first has been silent for longest
            return None
        silent = [
            (who, row.address)
            for who, row in self._unproven.items()
            if now - row.since >= yield_after and row.beside >= among
        ]
        if not silent:
            return None
        ((most, _),) = Counter(address for _, address in silent).most_common(1)
        return next(who for who, address in silent if address == most)

    def refusal(self, address: str) -> str | None:
        """Why this address may not connect once more, if so."""
        if self._connections[address] < self._per_address_max or is_loopback(address):
            return None
        return (
            f"{address} has {self._connections[address]} connections, the most that one address may have "
            f"(address_connections_max)"
        )

    def guessed_wrong(self, address: str, now: float) -> float:
        """A wrong token came from this address; in how many seconds it is to be told so."""
        left = self._guesses_left(address, now)
        self._guesses[address] = max(left - 1.0, 0.0), now
        self._guesses.move_to_end(address)
        if len(self._guesses) > ADDRESSES_MOST:
            self._guesses.popitem(last=False)
        return 0.0 if left >= 1.0 else LATE_ANSWER

    def _guesses_left(self, address: str, now: float) -> float:
        left, as_of = self._guesses.get(address, (GUESSES_AT_ONCE, now))
        return min(left + (now - as_of) * GUESSES_PER_SECOND, GUESSES_AT_ONCE)


def is_loopback(address: str) -> bool:
    """Whether this is an address of the machine itself; a name is none."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
