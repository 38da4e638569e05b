"""Limits are above zero, and agree with each other. That each one holds is shown in `guarantees/test_s6_bounded.py`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from store.limits import Limits

NAMES = [field.name for field in fields(Limits)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_is_above_zero(name: str, value: float) -> None:
    limit: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"the limit {name} is .*; it must be above 0"):
        Limits(**limit)


def test_a_value_leaves_room_in_its_frame_for_what_goes_with_it() -> None:
    assert Limits(frame_bytes_max=100_000, value_bytes_max=100_000 - 4096).value_bytes_max == 95_904
    with pytest.raises(ValueError, match="leaves no room in a frame"):
        Limits(frame_bytes_max=100_000, value_bytes_max=100_000 - 4095)


def test_every_limit_is_explained() -> None:
    assert [one.name for one in fields(Limits) if not one.metadata["help"].endswith(".")] == []
