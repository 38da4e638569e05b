"""Shell: the random identity of this process, by which a server knows which connections are of one process (R20)."""

from __future__ import annotations

import os

__all__ = ["process_id"]

_id = os.urandom(16)


def process_id() -> bytes:
    """16 random bytes, the same for as long as this process lives; a child that it forks has others."""
    return _id


def _draw_again() -> None:
    global _id
    _id = os.urandom(16)


os.register_at_fork(after_in_child=_draw_again)
