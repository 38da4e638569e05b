"""Shell: the one table of connections that were accepted, over TCP, TLS and HTTP (promises S7, S8).

Before it has said hello, and proven the token if one is wanted, a connection costs memory and belongs to anybody. So
such connections, the strangers, are bounded apart from the others: what is left of `connections_max` is for those who
do. When there is no room for another, those who have been silent for a second make way, first of the address that has
most of them; newcomers wait in the system's queue until then. Where those who do prove themselves take longer than
that, since their machines or this server are busy, all are given longer: whoever is turned away there comes again,
which keeps everybody busier still.

One address may have only so many connections. Loopback is exempt: whoever is on this machine has other means. Nobody is
refused for a wrong token that others of its address have given: behind one address there may be a whole office.

What each connection takes is counted here, too, proven or not: thousands that do nothing take memory. One timer serves
all of them: a timer of its own for each was one of the dearer parts of taking a thousand in at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from store.server.log_lines import RationedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.limits import Limits

__all__ = ["BESIDE_SHARE", "Stranger", "Table", "is_loopback"]

log: logging.Logger = logging.getLogger(__name__)

YIELD_AFTER = 1.0  # seconds in which an honest client on a busy network has said hello
YIELD_FACTOR = 3.0  # times what the slowest honest client has taken lately, if that is more ...
YIELD_MOST = 8.0  # ... but at most so many seconds
LATELY = 30.0  # seconds
HELLO_FACTOR = 6  # times the handshake_timeout that a hello may take at most, where all take long
STRANGERS_LEAST = 16  # so many may stand there also where there is room for few
BESIDE_SHARE = 4  # a flood of those who want a page or metrics takes no more than one part in so many of the room
SOON = 0.001  # seconds; a timer for less than a clock can tell apart would go off for ever
RAW_BYTES = 64 * 1024


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


class Table:
    """All connections, how long strangers may stand, and how each address behaves.

    Args:
        limits: `connections_max`, `handshakes_max`, `address_connections_max` and `handshake_timeout` count.
        clock: The server's.

    Attributes:
        clock: As given.
        limits: As given.
        connections_max: How many there may be, strangers included: the limit, or what the system allows.
        bytes: What all of them take.
        refused: How many were refused or hung up on.
        lines: Writes down why.
        raw: Where bytes arrive that are still to be decrypted, whoever sends them.
        plain: Where they are decrypted to, for those who have no buffer for that.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.clock = clock
        self._rows: dict[Stranger, _Row] = {}
        self._strangers: OrderedDict[Stranger, _Row] = OrderedDict()  # in order of coming
        self.bytes: int = 0
        self.refused: int = 0
        self.lines: RationedLog = RationedLog(clock)
        self.raw: memoryview[int] = memoryview(bytearray(RAW_BYTES))
        self.plain: memoryview[int] = memoryview(bytearray(RAW_BYTES))
        self._connections: Counter[str] = Counter()
        self._slowest = 0.0  # seconds that an honest client has taken ...
        self._slowest_at = -math.inf  # ... and when that was
        self._timer: asyncio.TimerHandle | None = None
        self.allow(limits.connections_max)

    def allow(self, most: int) -> None:
        """Take no more connections than the system allows; half of them may be strangers, unless there are few."""
        self.connections_max: int = min(self.limits.connections_max, max(most, 1))
        self._strangers_max = min(self.limits.handshakes_max, max(self.connections_max // 2, STRANGERS_LEAST))

    @property
    def connections(self) -> int:
        """How many there are, strangers included."""
        return len(self._rows)

    @property
    def strangers(self) -> int:
        """How many have proved nothing."""
        return len(self._strangers)

    @property
    def has_room(self) -> bool:
        """Whether there may be one more."""
        return len(self._rows) < self.connections_max

    @property
    def all(self) -> tuple[Stranger, ...]:
        """Everybody."""
        return tuple(self._rows)

    # ------------------------------------------------------------------------------------------ coming and going

    def came(self, who: Stranger, address: str, *, cost: int = 0, beside: bool = False) -> None:
        """Somebody has connected; `beside`: to a page or to metrics, and not to the store itself."""
        row = self._rows[who] = self._strangers[who] = _Row(address, self.clock(), cost, beside)
        self._connections[address] += 1
        self.bytes += row.cost

    def proved(self, who: Stranger) -> None:
        """It has said hello, and proven what is wanted."""
        row, now = self._strangers.get(who), self.clock()
        if row is not None:
            row.give_up = None  # nothing is expected of it any more
            if now - row.since >= self._slowest or now - self._slowest_at > LATELY:
                self._slowest, self._slowest_at = now - row.since, now
        self.is_served(who)

    def is_served(self, who: Stranger) -> None:
        """It has asked something that it may ask, and is no stranger until that is answered."""
        self._strangers.pop(who, None)

    def stands_again(self, who: Stranger) -> None:
        """It has been answered."""
        row = self._rows.get(who)
        if row is not None:
            row.since = self.clock()
            self._strangers[who] = row

    def went(self, who: Stranger) -> None:
        """It has gone."""
        row = self._rows.pop(who, None)
        if row is None:
            return
        self._strangers.pop(who, None)
        self.bytes -= row.cost
        self._connections[row.address] -= 1
        if self._connections[row.address] <= 0:
            del self._connections[row.address]
        if not self._strangers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def turned_away(self, why: str, *args: Any) -> None:
        """Somebody is refused or hung up on, for this reason."""
        self.refused += 1
        self.lines.write(log, logging.WARNING, why, *args)

    def refusal(self, address: str) -> str | None:
        """Why this address may not connect once more, if so."""
        if not self.has_room:
            return f"it has {len(self._rows)} connections, the most it takes (connections_max, or the file limit)"
        if self._connections[address] < self.limits.address_connections_max or is_loopback(address):
            return None
        return (
            f"{address} has {self._connections[address]} connections, the most that one address may have "
            f"(address_connections_max)"
        )

    # ------------------------------------------------------------------------------------------ making room

    def make_room(self, *, coming: int = 0, beside: bool = False) -> bool:
        """Whether one more may come, if need be in the place of one who has been silent for long.

        Args:
            coming: How many have been accepted that are not here yet.
            beside: Whether they come to something beside the store, for which there is only a part of the room.
        """
        while (silent := self._to_make_way(beside=beside)) is not None:
            self.went(silent)
            self.turned_away(
                "a connection is hung up on: it has proved nothing, and %d such connections wait (handshakes_max)",
                self._strangers_max,
            )
            silent.abort()
        return not self._is_full(coming, beside=beside)

    def _is_full(self, coming: int, *, beside: bool) -> bool:
        if len(self._strangers) + coming >= self._strangers_max:
            return True
        share = max(self._strangers_max // BESIDE_SHARE, 1)
        return beside and sum(row.beside for row in self._strangers.values()) + coming >= share

    def _to_make_way(self, *, beside: bool) -> Stranger | None:
        """Who must go so that another may come; None while nobody has been silent for long."""
        if not self._is_full(0, beside=beside):  # whoever is still coming has not been silent
            return None
        among = beside and len(self._strangers) < self._strangers_max  # they have used up their part
        silent_since = self.clock() - max(YIELD_AFTER, min(self._patience(), YIELD_MOST))
        if next(iter(self._strangers.values())).since > silent_since:  # the first has been silent for longest
            return None
        silent = [
            (who, row.address)
            for who, row in self._strangers.items()
            if row.since <= silent_since and row.beside >= among
        ]
        if not silent:
            return None
        ((most, _),) = Counter(address for _, address in silent).most_common(1)
        return next(who for who, address in silent if address == most)

    def _patience(self) -> float:
        """Seconds that an honest client may take, as far as those tell who have come lately."""
        return YIELD_FACTOR * self._slowest if self.clock() - self._slowest_at <= LATELY else 0.0

    # ------------------------------------------------------------------------------------------ time

    def expect(self, who: Stranger, seconds: float, give_up: Callable[[], None], *, patiently: bool = False) -> None:
        """Give it so many seconds to go on, or else up; `patiently`: more, where honest clients take long."""
        row = self._rows.get(who)
        if row is not None:
            row.due, row.give_up, row.patiently = self.clock() + seconds, give_up, patiently
            if self._timer is None or self._timer.when() > asyncio.get_running_loop().time() + seconds + SOON:
                self._look_in(seconds)

    def _look_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(seconds, SOON), self._look)

    def _look(self) -> None:
        """Give up those whose time is over, and wait for the next."""
        self._timer = None
        now = self.clock()
        longest = min(self._patience(), HELLO_FACTOR * self.limits.handshake_timeout)
        for row in list(self._strangers.values()):
            if row.due > now + SOON or row.give_up is None:
                continue
            more_until = row.since + longest if row.patiently else now
            row.due = more_until if more_until > now + SOON else math.inf
            if row.due == math.inf:
                row.give_up()
        first = min((row.due for row in self._strangers.values()), default=math.inf)
        if first < math.inf and self._timer is None:
            self._look_in(first - now)


def is_loopback(address: str) -> bool:
    """Whether this is an address of the machine itself; a name is none."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
