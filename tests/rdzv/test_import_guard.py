"""A package `store` that is not ours, or incomplete, is named in the ImportError."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, start


async def error_of(*arguments: str, path: Path = ROOT, cwd: Path) -> str:
    """Return the last line of output of a process that cannot import rdzv."""
    async with start(sys.executable, *arguments, env={"PYTHONPATH": str(path)}, cwd=cwd) as child:
        assert await child.wait() == 1, child.written()
        last = child.output[-1]
    assert last.startswith("ImportError: rdzv needs its own package `store`"), last
    return last


@pytest.mark.parametrize("name", ["store.py", "store/__init__.py"])
@pytest.mark.parametrize("first", ["", "import store; "], ids=["", "imported-before"])
async def test_a_users_own_store_in_front_on_the_path_is_named_with_the_remedy(
    tmp_path: Path, name: str, first: str
) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("items = []\n")
    script = tmp_path / "train.py"
    script.write_text(f"{first}import rdzv\n")
    last = await error_of(str(script), cwd=tmp_path)
    assert str(theirs) in last
    assert "rename that file, or take its folder off the path" in last


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Install both packages in a directory, as pip does."""
    for package in ("rdzv", "store"):
        shutil.copytree(ROOT / package, tmp_path / "site" / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "site"


async def test_a_distribution_that_was_installed_over_ours_is_recognised(site: Path, tmp_path: Path) -> None:
    """`pip install store` leaves our modules in place, but replaces `__init__.py` by an empty one."""
    (site / "store/__init__.py").write_text("")
    (site / "store/database.py").write_text("")
    last = await error_of("-c", "import rdzv", path=site, cwd=tmp_path)
    assert str(site / "store/__init__.py") in last
    assert "pip uninstall store; then pip install --force-reinstall --no-deps rdzv" in last


async def test_the_remains_of_uninstalling_that_distribution_are_recognised(site: Path, tmp_path: Path) -> None:
    (site / "store/__init__.py").unlink()
    await error_of("-c", "import rdzv", path=site, cwd=tmp_path)


@pytest.mark.parametrize("name", ["errors.py", "messages.py", "lazy_names.py"])
async def test_a_module_that_was_replaced_or_is_missing_is_named(site: Path, tmp_path: Path, name: str) -> None:
    code = "import rdzv; rdzv.connect"
    (site / "store" / name).write_text("")
    assert "of which files were replaced or are missing" in await error_of("-c", code, path=site, cwd=tmp_path)
    (site / "store" / name).unlink()
    assert "of which files were replaced or are missing" in await error_of("-c", code, path=site, cwd=tmp_path)


async def test_a_dependency_that_is_missing_is_not_blamed_on_the_store(site: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['msgpack'] = None; import rdzv; rdzv.connect"
    async with start(sys.executable, "-c", code, env={"PYTHONPATH": str(site)}, cwd=tmp_path) as child:
        assert await child.wait() == 1
        assert "msgpack" in child.output[-1]
        assert "store" not in child.output[-1]


@pytest.mark.parametrize("code", ["import rdzv", "import store, rdzv", "import rdzv.sync, store.sync"])
async def test_the_right_package_is_accepted_silently(tmp_path: Path, code: str) -> None:
    async with start(sys.executable, "-W", "error", "-c", code, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path) as child:
        assert await child.wait() == 0
        assert child.output == []
