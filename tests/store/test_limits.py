"""Limits are above zero, and agree with each other. That each holds is shown in `guarantees/test_s6_every_limit.py`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
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


def shown(value: Any, name: str) -> str:
    """A default as a person would write it."""
    if "bytes" in name:
        return f"{value // 2**20} MiB" if value >= 2**20 else f"{value // 2**10} KiB"
    if type(value) is float:
        return f"{value / 86_400:g} days" if value >= 86_400 else f"{value:g} s"
    return f"{value:,}"


def table() -> str:
    """The table of limits, as docs/limits.md has it."""
    rows = ["| limit | default | what it bounds | past it |", "| --- | --- | --- | --- |"]
    for one in fields(Limits):
        help, past = one.metadata["help"], one.metadata["past"]
        rows.append(f"| `{one.name}` | {shown(one.default, one.name)} | {help[0].lower()}{help[1:-1]} | {past} |")
    return "\n".join(rows)


def test_the_table_in_the_docs_is_that_of_the_limits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    assert table() in page, f"put this into docs/limits.md:\n\n{table()}\n"


def test_every_limit_is_explained() -> None:
    assert [one.name for one in fields(Limits) if not one.metadata["help"].endswith(".")] == []


def test_all_inboxes_together_have_room_for_one_frame() -> None:
    assert Limits(frame_bytes_max=10**9, inboxes_bytes_max=10**9).inboxes_bytes_max == 10**9
    with pytest.raises(ValueError, match=r"inboxes_bytes_max .* has no room for one frame"):
        Limits(frame_bytes_max=10**9, inboxes_bytes_max=10**9 - 1)


def test_one_revision_has_room_for_one_value() -> None:
    assert Limits(value_bytes_max=1000, revision_bytes_max=1000).revision_bytes_max == 1000
    with pytest.raises(ValueError, match=r"revision_bytes_max .* has no room for one value"):
        Limits(value_bytes_max=1000, revision_bytes_max=999)
