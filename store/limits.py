"""How much a client may ask of a server: every bound in one table, each with its reason (promise S6)."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Limits"]

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server refuses to go beyond. Bytes, counts, and seconds where the name says neither.

    Attributes:
        frame_bytes_max: One message on the wire. It bounds what a transaction, an answer and a value can be.
        value_bytes_max: One value. Pickled objects that a job broadcasts pass through here, so it is generous.
        key_bytes_max: One key or watched prefix, in UTF-8.
        keys_max: Keys in the store.
        stored_bytes_max: All keys and values together, each counted with its bookkeeping.
        history_bytes_max: Past changes kept so that watches can resume; the oldest go first.
        operations_max: Conditions, and operations, in one transaction.
        watches_max: Open watches and parked waits of one connection.
        waits_bytes_max: Keys and conditions of the parked waits of one connection, each counted with its bookkeeping.
        outbox_bytes_max: What waits for one slow reader. Past it, its watches end and may resume later.
        connections_max: Connections, those that have not said hello yet included.
        sessions_max: Sessions, connected or not.
        session_replies_max: Replies kept for one session until acknowledged; more may not be in flight.
        session_replies_bytes_max: The same in bytes.
        session_ttl: How long a session without a connection is kept for its client to come back.
        leases_max: Leases.
        lease_ttl_max: The longest lease; long enough for a closed run's day.
        handshake_timeout: How long a connection may take to say hello and prove the token.
        frame_timeout: How long a peer may leave a frame half sent.
    """

    frame_bytes_max: int = 64 * MIB
    value_bytes_max: int = 32 * MIB
    key_bytes_max: int = 2 * KIB
    keys_max: int = 1_000_000
    stored_bytes_max: int = 1024 * MIB
    history_bytes_max: int = 64 * MIB
    operations_max: int = 16_384
    watches_max: int = 4_096
    waits_bytes_max: int = 8 * MIB
    outbox_bytes_max: int = 64 * MIB
    connections_max: int = 32_768
    sessions_max: int = 65_536
    session_replies_max: int = 4_096
    session_replies_bytes_max: int = 8 * MIB
    session_ttl: float = 300.0
    leases_max: int = 200_000
    lease_ttl_max: float = 10 * 86_400.0
    handshake_timeout: float = 10.0
    frame_timeout: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"the limit {field.name} is {value!r}; it must be above 0")
        if self.value_bytes_max > self.frame_bytes_max - 4 * KIB:
            raise ValueError(
                f"value_bytes_max ({self.value_bytes_max}) leaves no room in a frame of frame_bytes_max "
                f"({self.frame_bytes_max}): keep it at least 4096 below"
            )
