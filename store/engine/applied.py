"""The results of one step of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from store.engine.snapshots import Snapshot
    from store.engine.watches import Watcher
    from store.messages import Event, Response


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """Events of one revision, or of a part of a snapshot. `watches`: by peer, the ids of the watches that get them."""

    watches: Mapping[int, Sequence[int]]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEnd:
    """The delayed answer to a `Wait` request."""

    peer: int
    request_id: int
    response: Response


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLost:
    """The end of a watch: the history no longer has the changes after `revision`, which the watch needs next."""

    watcher: Watcher
    revision: int


@dataclass(slots=True, kw_only=True, eq=False)
class LongRead:
    """The unfinished part of a long request: the unread rest of a snapshot and, for a watch, of the history."""

    watcher: Watcher
    snapshot: Snapshot | None
    keys_only: bool = False
    prefix: str | None = None
    next_revision: int = 0


class ApplyResult(NamedTuple):
    """The result of one step."""

    response: Response | None
    deliveries: tuple[EventBatch | WaitEnd | WatchLost, ...] = ()
    work: LongRead | None = None
