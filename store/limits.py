"""The limits on requests: every bound in one table, each with its reason (promise S6)."""

from __future__ import annotations

import functools
import ipaddress
import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

KIB = 1024
MIB = 1024 * KIB


def _limit_field(default: float, help: str, *, past: str, used: str | None = None) -> Any:
    """Return a field for a limit; `past` is the effect beyond it, `used` the figure of `stats` that it bounds."""
    return field(default=default, metadata={"help": help, "past": past, "used": used})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server, in bytes, counts or seconds; docs/limits.md explains them."""

    frame_bytes_max: int = _limit_field(
        64 * MIB,
        "One message on the wire. It bounds the size of a transaction, an answer and a value.",
        past="`LimitExceeded` from the client; a connection that sends one all the same is closed",
    )
    value_bytes_max: int = _limit_field(
        32 * MIB,
        "One value. Pickled objects that a job broadcasts pass through here, so it is generous.",
        past="`LimitExceeded`",
    )
    keys_max: int = _limit_field(1_000_000, "Keys in the store.", past="`LimitExceeded` for new keys", used="keys")
    stored_bytes_max: int = _limit_field(
        1024 * MIB,
        "All keys and values together, each counted with its bookkeeping.",
        past="`LimitExceeded` for requests that would add to it",
        used="stored_bytes",
    )
    group_keys_max: int = _limit_field(
        500_000,
        "Keys of one group, those of one run: all that have the same first two parts, between slashes.",
        past="`LimitExceeded` for new keys",
    )
    group_bytes_max: int = _limit_field(
        512 * MIB,
        "Keys and values of one group, so that one run cannot take the room of all.",
        past="`LimitExceeded` for requests that would add to it",
    )
    history_bytes_max: int = _limit_field(
        64 * MIB,
        "Past changes kept so that watches can resume; the oldest go first.",
        past="watches that come back too late are reset, or end with `WatchCompacted`",
    )
    outbox_bytes_max: int = _limit_field(
        64 * MIB,
        "The messages that wait for one slow reader, with their bookkeeping. A message to several readers counts for "
        "each of them here, and once in `memory_bytes_max`.",
        past="its watches end, and resume later; its parked waits get `LimitExceeded`; its requests wait",
    )
    memory_bytes_max: int = _limit_field(
        2048 * MIB,
        "All of it together: keys and values, leases, `history_bytes_max`, replies, watches and waits, what "
        "connections have sent and are to be sent, what awaits the disk, and 8 KiB for each connection, 32 with TLS.",
        past="`LimitExceeded` for requests that would add to it; the connections that hold most are closed, and their "
        "clients come back and resume",
        used="memory_bytes",
    )
    connections_max: int = _limit_field(
        32_768,
        "Connections, those that have not said hello yet included.",
        past="refused; the client says so, and tries again until its time is up",
        used="connections",
    )
    address_connections_max: int = _limit_field(
        8_192,
        "Connections of one address, loopback excepted.",
        past="refused; clients say so, and try again until their time is up",
    )
    leases_max: int = _limit_field(200_000, "Leases.", past="`LimitExceeded`", used="leases")
    lease_ttl_max: float = _limit_field(
        10 * 86_400.0, "The longest lease; long enough for a closed run's day.", past="`LimitExceeded`"
    )
    session_ttl: float = _limit_field(
        300.0,
        "How long a session without a connection is kept for its client to come back.",
        past="a write that was under way gets `ConnectionLost` with `maybe_applied=True`",
    )
    handshake_timeout: float = _limit_field(
        10.0,
        "How long a connection may take for TLS, and then to say hello and prove the token.",
        past="the connection is closed; its client says so, and tries again until its time is up",
    )

    # Per request or client:
    key_bytes_max: ClassVar[int] = 2 * KIB  # of a key or a watched prefix, in UTF-8
    operations_max: ClassVar[int] = 16_384  # conditions or leases of a request, or keys that it reads or awaits
    writes_max: ClassVar[int] = 2_048  # operations of a transaction, or keys deleted at one revision
    watches_max: ClassVar[int] = 4_096  # open watches and parked waits of a connection
    waits_bytes_max: ClassVar[int] = 8 * MIB  # keys and conditions of a connection's waits, with their bookkeeping
    session_replies_max: ClassVar[int] = 4_096  # replies that a client has not acknowledged
    session_replies_bytes_max: ClassVar[int] = 8 * MIB  # the bytes of these replies
    append_bytes_max: ClassVar[int] = MIB  # of the value after an append: a durable store writes all of it again
    frame_timeout: ClassVar[float] = 30.0  # seconds of silence in the middle of a frame
    # Of all clients together:
    replies_bytes_max: ClassVar[int] = 256 * MIB  # replies kept until acknowledged
    handshakes_max: ClassVar[int] = 1_024  # unauthenticated connections
    journal_bytes_max: ClassVar[int] = 64 * MIB  # bytes of changes that are not on the disk yet

    @classmethod
    def figure_by_limit(cls) -> dict[str, str]:
        """Map each limit of the whole store to the figure of `stats` that it bounds."""
        return {each.name: each.metadata["used"] for each in fields(cls) if each.metadata["used"]}

    @property
    def sessions_max(self) -> int:
        """The most sessions, connected or not: twice `connections_max`."""
        return 2 * self.connections_max

    @property
    def memory_reserve(self) -> int:
        """The part of `memory_bytes_max` that is reserved for one slow reader and one large request."""
        return self.outbox_bytes_max + self.frame_bytes_max

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 < value < math.inf:
                raise ValueError(f"the limit {limit.name} is {value!r}; it must be above 0, and finite")
        held_back, value = self.memory_reserve + self.history_bytes_max, self.value_bytes_max + 4 * KIB
        all_three = "one outbox_bytes_max, frame_bytes_max and history_bytes_max"
        for name, least, enough, for_what in (
            ("frame_bytes_max", value, value, "one value of value_bytes_max and what goes with it"),
            ("memory_bytes_max", held_back, held_back + value, all_three),  # `least` has room only for small values
        ):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) has no room for {for_what}: make it at least {enough}"
                )


# The names of /etc/hosts on Debian and Red Hat, and short forms such as 127.1.
LOOPBACK_NAMES = re.compile(r"localhost([46]|\.localdomain)?\.?|ip6-(localhost|loopback)|127(\.\d+){1,2}")


# Cached: called often, with few different addresses.
@functools.lru_cache(maxsize=1024)
def is_loopback(address: str) -> bool:
    """Return True if an address leads back to the host that uses it."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return bool(LOOPBACK_NAMES.fullmatch(address.lower()))
    mapped = getattr(ip, "ipv4_mapped", None)  # a socket on "::" sees an IPv4 client by a mapped address
    return (mapped or ip).is_loopback
