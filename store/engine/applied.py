"""Pure: what a step of the engine leads to, as nouns: a response, and what others must now be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from store.engine.watches import Watcher
    from store.messages import Event, Response

__all__ = ["Answer", "Applied", "Delivery"]


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
class Applied:
    """What a request led to: the response (None while it is parked), and what others must now be told."""

    response: Response | None
    deliveries: tuple[Delivery | Answer, ...] = ()
