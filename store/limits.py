"""How much a client may ask of a server: every bound in one table, each with its reason (promise S6)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["Limits"]

KIB = 1024
MIB = 1024 * KIB


def _limit(default: float, help: str, *, past: str, used: str | None = None) -> Any:
    """Return a limit: its default, what it bounds, what happens past it, and the figure of `stats` that it bounds."""
    return field(default=default, metadata={"help": help, "past": past, "used": used})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server, in bytes, counts or seconds.

    Each limit's metadata says what it bounds and what happens past it; docs/limits.md shows both.
    `LimitExceeded` names the value, the limit and the remedy; the request has changed nothing, and no other client is
    disturbed.
    """

    frame_bytes_max: int = _limit(
        64 * MIB,
        "One message on the wire. It bounds what a transaction, an answer and a value can be.",
        past="`LimitExceeded` from the client; a connection that sends one all the same is closed",
    )
    value_bytes_max: int = _limit(
        32 * MIB,
        "One value. Pickled objects that a job broadcasts pass through here, so it is generous.",
        past="`LimitExceeded`",
    )
    key_bytes_max: int = _limit(2 * KIB, "One key or watched prefix, in UTF-8.", past="`LimitExceeded`")
    keys_max: int = _limit(1_000_000, "Keys in the store.", past="`LimitExceeded` for new keys", used="keys")
    stored_bytes_max: int = _limit(
        1024 * MIB,
        "All keys and values together, each counted with its bookkeeping.",
        past="`LimitExceeded` for requests that would add to it",
        used="stored_bytes",
    )
    group_parts: int = _limit(
        2,
        "How many parts of a key, between slashes, name the group that it belongs to: those of one run.",
        past="keys with no more parts belong to no group",
    )
    group_keys_max: int = _limit(
        500_000, "Keys of one group, so that one run cannot take the room of all.", past="`LimitExceeded` for new keys"
    )
    group_bytes_max: int = _limit(
        512 * MIB,
        "Keys and values of one group, each counted with its bookkeeping.",
        past="`LimitExceeded` for requests that would add to it",
    )
    history_bytes_max: int = _limit(
        64 * MIB,
        "Past changes kept so that watches can resume; the oldest go first.",
        past="watches that come back too late are reset, or end with `WatchCompacted`",
    )
    revision_bytes_max: int = _limit(
        128 * MIB,
        "The values that one transaction writes, each as large as it then is: an append of one byte counts as its "
        "whole value.",
        past="`LimitExceeded`",
    )
    operations_max: int = _limit(
        16_384,
        "Conditions of one transaction, or keys that one request reads or waits for.",
        past="`LimitExceeded`",
    )
    writes_max: int = _limit(
        2_048,
        "Operations of one transaction, or keys that one request deletes.",
        past="`LimitExceeded`; a client's `delete_prefix` deletes more in several steps",
    )
    lease_keys_max: int = _limit(
        1_048_576,
        "Keys on one lease. When it lapses or is revoked, `writes_max` of them go at one revision, more in several.",
        past="`LimitExceeded` for new keys on that lease",
    )
    watches_max: int = _limit(4_096, "Open watches and parked waits of one connection.", past="`LimitExceeded`")
    waits_bytes_max: int = _limit(
        8 * MIB,
        "Keys and conditions of the parked waits of one connection, each counted with its bookkeeping.",
        past="`LimitExceeded`",
    )
    parked_bytes_max: int = _limit(
        1024 * MIB,
        "Watches and parked waits of all connections together, each counted with its bookkeeping.",
        past="`LimitExceeded`",
        used="parked_bytes",
    )
    outbox_bytes_max: int = _limit(
        64 * MIB,
        "What waits for one slow reader, each message counted with its bookkeeping.",
        past="its watches end, and resume later; its parked waits get `LimitExceeded`; its requests wait",
    )
    outboxes_bytes_max: int = _limit(
        1024 * MIB,
        "What waits for all slow readers together; and what is kept of earlier revisions for unread listings.",
        past="the connection with most waiting is closed; its client reconnects and resumes",
        used="outbox_bytes",
    )
    inboxes_bytes_max: int = _limit(
        1024 * MIB,
        "What has come of messages that are not whole yet, or cannot be carried out yet, of all connections together.",
        past="the connection that takes up most, and for longest, is closed; its client reconnects and sends it again",
        used="inbox_bytes",
    )
    journal_bytes_max: int = _limit(
        64 * MIB,
        "Changes that the disk of a durable store has not taken yet.",
        past="the requests of clients that write are not read until it has",
        used="journal_bytes",
    )
    memory_bytes_max: int = _limit(
        2048 * MIB,
        "All of it together: keys and values, history, replies, watches and waits, outboxes, inboxes, what awaits the "
        "disk, and 8 KiB for each connection, 32 with TLS. Each of these limits can be reached, but not all at once: "
        "they add up to 4,480 MiB.",
        past="`LimitExceeded` for requests that would add to it; the connections that hold most are closed",
        used="memory_bytes",
    )
    connections_max: int = _limit(
        32_768,
        "Connections, those that have not said hello yet included.",
        past="refused; the client says so, and tries again until its time is up",
        used="connections",
    )
    handshakes_max: int = _limit(
        1_024,
        "Connections that are still at TLS, the hello or the proof of the token, and those over HTTP that ask nothing "
        "just now; at most half of the connections.",
        past="further newcomers wait to be accepted; connections that have been silent for a second are closed to "
        "make room",
    )
    address_connections_max: int = _limit(
        8_192,
        "Connections of one address, loopback excepted.",
        past="refused; clients say so, and try again until their time is up",
    )
    sessions_max: int = _limit(
        65_536,
        "Sessions, connected or not.",
        past="those make way whose clients are away and have had every reply; else refused, and the client tries again "
        "until its time is up",
        used="sessions",
    )
    session_replies_max: int = _limit(
        4_096,
        "Replies kept for one session until acknowledged; more may not be in flight.",
        past="`LimitExceeded` for its writes; our clients never ask for so many at once",
    )
    session_replies_bytes_max: int = _limit(
        8 * MIB, "The same in bytes.", past="`LimitExceeded` for its writes until it has read what waits"
    )
    replies_bytes_max: int = _limit(
        256 * MIB,
        "The same of all sessions together.",
        past="the sessions of clients that are away end, the longest first; then `LimitExceeded` for the writes of "
        "those that have replies waiting",
        used="replies_bytes",
    )
    session_ttl: float = _limit(
        300.0,
        "How long a session without a connection is kept for its client to come back.",
        past="a write that was under way gets `ConnectionLost` with `maybe_applied=True`",
    )
    leases_max: int = _limit(200_000, "Leases.", past="`LimitExceeded`", used="leases")
    lease_ttl_max: float = _limit(
        10 * 86_400.0, "The longest lease; long enough for a closed run's day.", past="`LimitExceeded`"
    )
    handshake_timeout: float = _limit(
        10.0,
        "How long a connection may take for TLS, and then to say hello and prove the token.",
        past="the connection is closed; its client says so, and tries again until its time is up",
    )
    frame_timeout: float = _limit(
        30.0,
        "How long a peer may leave a frame half sent.",
        past="the connection is closed; its client reconnects and sends it again",
    )

    @classmethod
    def used_by(cls) -> dict[str, str]:
        """Name the figure of `stats` that counts towards each limit that the whole store shares."""
        return {each.name: each.metadata["used"] for each in fields(cls) if each.metadata["used"]}

    @property
    def memory_kept_back(self) -> int:
        """What of `memory_bytes_max` is kept for one slow reader and one large request, whatever else fills it."""
        return min(self.outbox_bytes_max, self.outboxes_bytes_max) + self.frame_bytes_max

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not value > 0:
                raise ValueError(f"the limit {limit.name} is {value!r}; it must be above 0")
        held_back = self.memory_kept_back + self.history_bytes_max
        for name, least, for_what in (
            ("frame_bytes_max", self.value_bytes_max + 4 * KIB, "one value of value_bytes_max and what goes with it"),
            ("revision_bytes_max", self.value_bytes_max, "one value of value_bytes_max"),
            ("inboxes_bytes_max", self.frame_bytes_max, "one frame of frame_bytes_max"),
            ("memory_bytes_max", held_back, "one outbox_bytes_max, one frame_bytes_max and history_bytes_max"),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} ({getattr(self, name)}) has no room for {for_what}: make it at least {least}")
