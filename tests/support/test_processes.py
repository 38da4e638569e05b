"""Children are heard, signalled, and gone when their block is left."""

from pathlib import Path

import pytest

from tests.support.processes import require, start


async def test_processes_of_the_child_are_gone_too_even_if_the_child_has_exited() -> None:
    # Leaving the block waits for the end of the output, which the grandchild holds open as long as it lives.
    async with start("/bin/sh", "-c", "sleep 600 & echo started") as child:
        await child.line(containing="started")
    assert child.returncode is not None


@pytest.mark.parametrize("name", ["no-such-thing", "no_such.thing", "tests_of_no_such_thing"])
def test_a_missing_program_skips_the_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RDZV_TEST_REQUIRE_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"skipped, not installed: {name}"):
        require(name)


def test_a_mere_folder_is_not_an_installed_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RDZV_TEST_REQUIRE_ALL", raising=False)
    (tmp_path / "just_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(pytest.skip.Exception):
        require("just_a_folder")


def test_a_missing_program_fails_the_test_if_everything_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_TEST_REQUIRE_ALL", "1")
    with pytest.raises(pytest.fail.Exception, match="not installed: no-such-thing"):
        require("no-such-thing")
