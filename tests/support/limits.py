"""Limits for tests that need not fill a server first."""

from dataclasses import fields
from typing import Any

from store.limits import Limits

__all__ = ["limits_with"]


def limits_with(**given: Any) -> Limits:
    """Limits of which also those are chosen that are the same for every server."""
    chosen = {field.name for field in fields(Limits)}
    fixed = {name: most for name, most in given.items() if name not in chosen}
    assert all(hasattr(Limits, name) for name in fixed)
    kind = type("Limits", (Limits,), {"__slots__": (), **fixed})
    limits: Limits = kind(**{name: most for name, most in given.items() if name in chosen})
    return limits
