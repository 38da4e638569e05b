"""Shell: keeps Python's garbage collector from stopping a server for long (promise S11).

A full collection looks at every object there is: 110 ms with 300,000 keys. What a store keeps are no cycles, and is let
go of as soon as nothing refers to it, without the collector. So what has survived a collection of young objects is
taken out of its sight ("frozen"). A cycle that lives that long and is dropped later is found only once nobody is
connected, when a pause harms nobody.

Only the process of `rdzv serve` does this: in any other, the collector is not ours.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["short_collections", "tidy_up"]

GROWTH = 200_000  # frozen objects, after which it is worth looking for cycles among them

_looked_at = 0  # so many were frozen when that was last done


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Keep every collection short."""
    gc.callbacks.append(_freeze_what_survived)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_what_survived)
        gc.unfreeze()


def tidy_up() -> None:
    """Look at everything, if there is much more than last time; call this when a pause harms nobody."""
    global _looked_at
    if gc.get_freeze_count() > _looked_at + GROWTH:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _looked_at = gc.get_freeze_count()


def _freeze_what_survived(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"]:
        gc.freeze()
