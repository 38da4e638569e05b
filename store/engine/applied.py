"""Pure: what a step of the engine leads to, as nouns: a response, and what others must now be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from store.engine.snapshots import Snapshot
    from store.engine.watches import Watcher
    from store.messages import Event, Response

__all__ = ["Answer", "Applied", "Delivery", "Overtaken", "Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Events of one revision, or a piece of a snapshot, for each of these watches."""

    watchers: tuple[Watcher, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request that had been parked."""

    peer: int
    request_id: int
    response: Response


@dataclass(frozen=True, slots=True, kw_only=True)
class Overtaken:
    """A watch that was being opened has ended: what follows `revision` is no longer kept. Its client resumes there."""

    watcher: Watcher
    revision: int


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """A request that takes more than one turn, and how far it has come.

    Attributes:
        watcher: Whose request it is, and its id.
        snapshot: What is being read; None if that is over, or was not asked for.
        keys_only: Whether values are left out.
        prefix: What is watched; None if nothing is.
        next_revision: From which revision on a watch must still be told what has happened.
    """

    watcher: Watcher
    snapshot: Snapshot | None
    keys_only: bool = False
    prefix: str | None = None
    next_revision: int = 0


class Applied(NamedTuple):
    """What a request led to; a tuple, since every request makes one, and no other noun is made as quickly.

    Attributes:
        response: What to answer; None while it is parked. While there is `work`, it is a part of the answer.
        deliveries: What others must now be told.
        work: What is left to do, in turns to come.
    """

    response: Response | None
    deliveries: tuple[Delivery | Answer | Overtaken, ...] = ()
    work: Work | None = None
