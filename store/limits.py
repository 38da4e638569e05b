"""How much a client may ask of a server: every bound in one table, each with its reason (promise S6)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["Limits"]

KIB = 1024
MIB = 1024 * KIB


def _limit(default: float, help: str) -> Any:
    """A limit, and what it bounds in words."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server refuses to go beyond. Bytes, counts, and seconds where the name says neither.

    Each says in its metadata what it bounds, for this reader and for `rdzv serve --help`.
    """

    frame_bytes_max: int = _limit(
        64 * MIB, "One message on the wire. It bounds what a transaction, an answer and a value can be."
    )
    value_bytes_max: int = _limit(
        32 * MIB, "One value. Pickled objects that a job broadcasts pass through here, so it is generous."
    )
    key_bytes_max: int = _limit(2 * KIB, "One key or watched prefix, in UTF-8.")
    keys_max: int = _limit(1_000_000, "Keys in the store.")
    stored_bytes_max: int = _limit(1024 * MIB, "All keys and values together, each counted with its bookkeeping.")
    history_bytes_max: int = _limit(64 * MIB, "Past changes kept so that watches can resume; the oldest go first.")
    operations_max: int = _limit(16_384, "Conditions, and operations, in one transaction.")
    watches_max: int = _limit(4_096, "Open watches and parked waits of one connection.")
    waits_bytes_max: int = _limit(
        8 * MIB, "Keys and conditions of the parked waits of one connection, each counted with its bookkeeping."
    )
    outbox_bytes_max: int = _limit(
        64 * MIB, "What waits for one slow reader. Past it, its watches end and may resume later."
    )
    connections_max: int = _limit(32_768, "Connections, those that have not said hello yet included.")
    sessions_max: int = _limit(65_536, "Sessions, connected or not.")
    session_replies_max: int = _limit(
        4_096, "Replies kept for one session until acknowledged; more may not be in flight."
    )
    session_replies_bytes_max: int = _limit(8 * MIB, "The same in bytes.")
    session_ttl: float = _limit(300.0, "How long a session without a connection is kept for its client to come back.")
    leases_max: int = _limit(200_000, "Leases.")
    lease_ttl_max: float = _limit(10 * 86_400.0, "The longest lease; long enough for a closed run's day.")
    handshake_timeout: float = _limit(10.0, "How long a connection may take to say hello and prove the token.")
    frame_timeout: float = _limit(30.0, "How long a peer may leave a frame half sent.")

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not value > 0:
                raise ValueError(f"the limit {limit.name} is {value!r}; it must be above 0")
        if self.value_bytes_max > self.frame_bytes_max - 4 * KIB:
            raise ValueError(
                f"value_bytes_max ({self.value_bytes_max}) leaves no room in a frame of frame_bytes_max "
                f"({self.frame_bytes_max}): keep it at least 4096 below"
            )
