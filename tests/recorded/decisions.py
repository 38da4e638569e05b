"""Recorded decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RECORDINGS: Final[dict[str, Callable[[], Iterable[str]]]] = {}
