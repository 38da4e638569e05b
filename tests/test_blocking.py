"""What blocks is made from what awaits, and nobody has edited it since."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.blocking import HALVES, made_from, ruff

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("source", HALVES)
def test_the_blocking_half_is_what_the_awaited_one_makes(source: str) -> None:
    if ruff() is None:
        pytest.skip("ruff tidies up what is made, and is not installed")
    assert (ROOT / HALVES[source]).read_text(encoding="utf-8") == made_from(source), "run `python -m tools.blocking`"
