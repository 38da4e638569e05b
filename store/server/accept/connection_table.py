"""The table of all accepted connections, over TCP, TLS and HTTP (promises S7, S8).

A connection is a *stranger* until the server has received its hello, with the token if one is required. If there is no
room for another stranger, the server closes those that sent no valid hello for a second, first at the address with
most of them. New connections wait in the system's queue until there is room. If honest clients on busy machines
need longer for their hello, all strangers get more time: closed clients would reconnect and add load.
Each address but loopback has a limit on connections. Wrong tokens do not block an address: a whole office may share it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from store.limits import is_loopback
from store.server.log_lines import RateLimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.limits import Limits

log: logging.Logger = logging.getLogger(__name__)

YIELD_AFTER = 1.0  # seconds of silence, at least, before a stranger may be closed
YIELD_FACTOR = 3.0  # a stranger may be silent this many times as long as the slowest recent hello took
YIELD_MOST = 8.0  # seconds of silence, at most, before one may be closed
LATELY = 30.0  # seconds for which a slow hello counts as recent
HELLO_FACTOR = 6  # while honest clients are slow, a hello may take up to `handshake_timeout` times this
STRANGERS_LEAST = 16  # the least limit on strangers, unless `handshakes_max` is lower
CONNECTIONS_LEAST = 2  # the least limit on connections, unless `connections_max` is lower; a node has two
BESIDE_SHARE = 4  # the limit on HTTP strangers: the limit on all divided by this, at least 1
SOON = 0.001  # seconds; shorter times may be below the clock's resolution
RAW_BYTES = 64 * 1024


class Closeable(Protocol):
    """A connection that the table can close."""

    def abort(self) -> None:
        """Close the connection at once."""


@dataclass(slots=True)
class _ConnectionRow:
    address: str
    since: float  # when the connection was made, or its last request answered
    cost: int  # bytes of memory
    beside: bool
    due: float = math.inf  # when `give_up` is called; infinity: never
    patiently: bool = False
    give_up: Callable[[], None] | None = None


class ConnectionTable:
    """All connections, their number per address, and the time limits of strangers."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.clock = clock
        self._rows: dict[Closeable, _ConnectionRow] = {}
        self._strangers: OrderedDict[Closeable, _ConnectionRow] = OrderedDict()
        self.bytes: int = 0
        self.refused: int = 0
        self.lines: RateLimitedLog = RateLimitedLog(clock)
        # Buffers that all connections share: `raw` for encrypted bytes, `plain` for decrypted ones.
        self.raw: memoryview[int] = memoryview(bytearray(RAW_BYTES))
        self.plain: memoryview[int] = memoryview(bytearray(RAW_BYTES))
        self._connections: Counter[str] = Counter()
        self._slowest = 0.0  # seconds that the slowest recent hello of an honest client took
        self._slowest_at = -math.inf  # when that hello arrived
        self._timer: asyncio.TimerHandle | None = None
        self.set_max_connections(limits.connections_max)

    def set_max_connections(self, most: int) -> None:
        """Limit connections to `most`, and strangers to half: at least `STRANGERS_LEAST`, at most `handshakes_max`."""
        self.connections_max: int = min(self.limits.connections_max, max(most, CONNECTIONS_LEAST))
        self._strangers_max = min(self.limits.handshakes_max, max(self.connections_max // 2, STRANGERS_LEAST))

    @property
    def unauthenticated_count(self) -> int:
        """The number of strangers."""
        return len(self._strangers)

    @property
    def has_room(self) -> bool:
        """True if one more connection fits."""
        return len(self._rows) < self.connections_max

    @property
    def all(self) -> tuple[Closeable, ...]:
        """All connections."""
        return tuple(self._rows)

    def register(self, who: Closeable, address: str, *, cost: int = 0, beside: bool = False) -> None:
        """Register a connection of `cost` bytes; `beside`: an HTTP connection, for pages or metrics."""
        row = self._rows[who] = self._strangers[who] = _ConnectionRow(address, self.clock(), cost, beside)
        self._connections[address] += 1
        self.bytes += row.cost

    def mark_authenticated(self, who: Closeable) -> None:
        """Note that a connection has authenticated."""
        row, now = self._strangers.get(who), self.clock()
        if row is not None:
            row.give_up = None  # an authenticated connection has no deadline
            if now - row.since >= self._slowest or now - self._slowest_at > LATELY:
                self._slowest, self._slowest_at = now - row.since, now
        self.begin_request(who)

    def begin_request(self, who: Closeable) -> None:
        """Stop counting a connection as a stranger, at least while its valid request is answered."""
        self._strangers.pop(who, None)

    def mark_unauthenticated(self, who: Closeable) -> None:
        """Count a connection as a stranger again, after the answer to its request."""
        row = self._rows.get(who)
        if row is not None:
            row.since = self.clock()
            self._strangers[who] = row

    def unregister(self, who: Closeable) -> None:
        """Unregister a connection."""
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

    def log_refusal(self, why: str, *args: Any) -> None:
        """Count and log a refused or closed connection."""
        self.refused += 1
        self.lines.write(log, logging.WARNING, why, *args)

    def refusal_reason(self, address: str) -> str | None:
        """Return why this address may not open another connection, or None."""
        if not self.has_room:
            return f"it has {len(self._rows)} connections, the most it takes (connections_max, or the file limit)"
        if self._connections[address] < self.limits.address_connections_max or is_loopback(address):
            return None
        return (
            f"{address} has {self._connections[address]} connections, the most that one address may have "
            f"(address_connections_max)"
        )

    def make_room(self, *, coming: int = 0, beside: bool = False) -> bool:
        """Close silent strangers if there is no room for one more; return whether there is room then.

        `coming`: the number of accepted connections that are not registered yet.
        """
        while (silent := self._choose_victim(beside=beside)) is not None:
            self.unregister(silent)
            self.log_refusal(
                "a connection is closed: it has sent no valid hello, and %d such connections wait (handshakes_max)",
                self._strangers_max,
            )
            silent.abort()
        return not self._are_handshakes_full(coming, beside=beside)

    def _are_handshakes_full(self, coming: int, *, beside: bool) -> bool:
        if len(self._strangers) + coming >= self._strangers_max:
            return True
        share = max(self._strangers_max // BESIDE_SHARE, 1)
        return beside and sum(row.beside for row in self._strangers.values()) + coming >= share

    def _choose_victim(self, *, beside: bool) -> Closeable | None:
        if not self._are_handshakes_full(0, beside=beside):
            return None
        among = len(self._strangers) < self._strangers_max  # True if only the HTTP share is full
        silent_since = self.clock() - max(YIELD_AFTER, min(self._slow_handshake_seconds(), YIELD_MOST))
        if next(iter(self._strangers.values())).since > silent_since:  # even the longest silence is too short
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

    def _slow_handshake_seconds(self) -> float:
        return YIELD_FACTOR * self._slowest if self.clock() - self._slowest_at <= LATELY else 0.0

    def limit_handshake(
        self, who: Closeable, seconds: float, give_up: Callable[[], None], *, patiently: bool = False
    ) -> None:
        """Call `give_up` if `who` is a stranger after `seconds`; `patiently`: later if honest clients are slow."""
        row = self._rows.get(who)
        if row is not None:
            row.due, row.give_up, row.patiently = self.clock() + seconds, give_up, patiently
            if self._timer is None or self._timer.when() > asyncio.get_running_loop().time() + seconds + SOON:
                self._schedule_closing(seconds)

    def _schedule_closing(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(seconds, SOON), self._close_overdue)

    def _close_overdue(self) -> None:
        self._timer = None
        now = self.clock()
        longest = min(self._slow_handshake_seconds(), HELLO_FACTOR * self.limits.handshake_timeout)
        for row in list(self._strangers.values()):
            if row.due > now + SOON or row.give_up is None:
                continue
            more_until = row.since + longest if row.patiently else now
            row.due = more_until if more_until > now + SOON else math.inf
            if row.due == math.inf:
                row.give_up()
        first = min((row.due for row in self._strangers.values()), default=math.inf)
        if first < math.inf and self._timer is None:
            self._schedule_closing(first - now)
