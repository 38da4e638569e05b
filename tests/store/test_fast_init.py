"""What a constructor makes is the frozen noun, and nothing else."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass

import pytest

from store.fast_init import constructor


@dataclass(frozen=True, slots=True)
class Noun:
    key: str
    value: bytes
    ttl: float | None = None


def test_what_is_made_is_the_frozen_noun() -> None:
    made = constructor(Noun)("k", b"v")
    assert made == Noun("k", b"v")
    assert type(made) is Noun
    with pytest.raises(FrozenInstanceError):
        made.key = "other"  # type: ignore[misc]  # which is the point
    with pytest.raises(TypeError):
        constructor(Noun)("k")
