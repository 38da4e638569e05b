"""Limits are above zero, and agree with each other. `guarantees/test_s6_every_limit.py` tests each of them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from store.limits import Limits

NAMES = [field.name for field in fields(Limits)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_limit_is_above_zero_and_finite(name: str, value: float) -> None:
    limit: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"the limit {name} is .*; it must be above 0"):
        Limits(**limit)


@pytest.mark.parametrize(
    ("limit", "least", "others"),
    [("frame_bytes_max", 100_000, {"value_bytes_max": 100_000 - 4096}), ("memory_bytes_max", 3 * 2**26, {})],
)
def test_a_limit_within_another_is_no_larger(limit: str, least: int, others: dict[str, Any]) -> None:
    assert getattr(Limits(**{limit: least, **others}), limit) == least
    with pytest.raises(ValueError, match=f"{limit} .* has no room for"):
        Limits(**{limit: least - 1, **others})


def shown(value: Any, name: str) -> str:
    """Return a default as a person would write it."""
    if "bytes" in name:
        return f"{value // 2**20} MiB" if value >= 2**20 else f"{value // 2**10} KiB"
    if type(value) is float:
        return f"{value / 86_400:g} days" if value >= 86_400 else f"{value:g} s"
    return f"{value:,}"


def table() -> str:
    """Return the table of limits, as docs/limits.md has it."""
    rows = ["| limit | default | it bounds | past it |", "| --- | --- | --- | --- |"]
    for one in fields(Limits):
        help, past = one.metadata["help"], one.metadata["past"]
        rows.append(f"| `{one.name}` | {shown(one.default, one.name)} | {help[0].lower()}{help[1:-1]} | {past} |")
    return "\n".join(rows)


def test_the_table_in_the_docs_is_that_of_the_limits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    assert table() in page, f"put this into docs/limits.md:\n\n{table()}\n"
    fixed = [name for name in Limits.__annotations__ if name not in NAMES]
    assert [name for name in fixed if f"`{name}` {shown(getattr(Limits, name), name)}" not in page] == []


def test_every_limit_is_explained() -> None:
    assert [one.name for one in fields(Limits) if not one.metadata["help"].endswith(".")] == []
