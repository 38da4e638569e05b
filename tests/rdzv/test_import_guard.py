"""A package `store` that is not ours is named, instead of an AttributeError somewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import ROOT, start

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["store.py", "store/__init__.py"])
async def test_a_users_own_store_in_front_on_the_path_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("items = []\n")
    script = tmp_path / "train.py"
    script.write_text("import rdzv\n")
    async with start(sys.executable, str(script), env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path) as child:
        assert await child.wait() == 1
        last = child.output[-1]
    assert last.startswith("ImportError: rdzv needs its own package `store`")
    assert str(theirs) in last
    assert "rename that file, or take its folder off the path" in last


async def test_our_own_is_taken_without_a_word(tmp_path: Path) -> None:
    async with start(sys.executable, "-c", "import rdzv", env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path) as child:
        assert await child.wait() == 0
        assert child.output == []
