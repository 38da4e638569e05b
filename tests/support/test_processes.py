"""Children are heard, signalled, and gone when their block is left."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import ChildError, require, start, start_python

if TYPE_CHECKING:
    from pathlib import Path

PAUSE = "print('ready'); import signal; signal.pause()"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_news(pid: int, news: int) -> None:
    """Return once the kernel has stopped or continued it; WNOWAIT leaves the news for the loop's own watcher."""
    os.waitid(os.P_PID, pid, news | os.WNOWAIT)


async def test_lines_are_read_in_order_and_passed_over_until_one_contains_the_text() -> None:
    script = "print('one'); print('two'); print('three'); print('tail', end='')"
    async with start_python("-c", script) as child:
        assert await child.line() == "one"
        assert await child.line(containing="thr") == "three"
        assert await child.line() == "tail"
        assert await child.wait() == 0


async def test_a_child_that_ends_without_the_line_is_an_error_with_its_output() -> None:
    script = "import sys; print('so far'); print('went wrong', file=sys.stderr); sys.exit(3)"
    async with start_python("-c", script) as child:
        await child.wait()
        with pytest.raises(ChildError) as caught:
            await child.line(containing="ready")
    assert "without a line containing 'ready' (exit status 3)" in str(caught.value)
    assert "so far" in str(caught.value)
    assert "went wrong" in str(caught.value)


async def test_a_line_that_does_not_come_in_time_is_an_error_with_the_output() -> None:
    async with start_python("-c", PAUSE) as child:
        await child.line(containing="ready")
        with pytest.raises(ChildError, match=r"within 0.01 s \(still running\)(?s:.)*ready"):
            await child.line(containing="never", timeout=0.01)
        with pytest.raises(ChildError, match="did not exit within"):
            await child.wait(timeout=0.01)


async def test_an_error_in_the_block_carries_the_output_as_a_note() -> None:
    with pytest.raises(ValueError, match="of the test") as caught:
        async with start_python("-c", PAUSE) as child:
            await child.line()
            raise ValueError("of the test")
    assert any("ready" in note for note in caught.value.__notes__)
    assert not is_alive(child.pid)


@pytest.mark.parametrize(
    ("method", "number"),
    [("kill", signal.SIGKILL), ("terminate", signal.SIGTERM), ("interrupt", signal.SIGINT)],
)
async def test_a_signal_ends_a_child_and_shows_in_its_exit_status(method: str, number: signal.Signals) -> None:
    # Python turns SIGINT into KeyboardInterrupt, and ends with the signal all the same.
    async with start_python("-c", PAUSE) as child:
        await child.line(containing="ready")
        getattr(child, method)()
        assert await child.wait() == -number
        with pytest.raises(ChildError, match="had exited before"):
            child.kill()


async def test_a_stopped_child_stands_still_until_it_is_resumed() -> None:
    async with start_python("-c", PAUSE) as child:
        await child.line(containing="ready")
        child.stop()
        wait_for_news(child.pid, os.WSTOPPED)
        child.resume()
        wait_for_news(child.pid, os.WCONTINUED)


async def test_what_the_child_started_is_gone_too_even_if_the_child_has_exited() -> None:
    # Leaving the block waits for the end of the output, which the grandchild holds open as long as it lives.
    async with start("/bin/sh", "-c", "sleep 600 & echo started") as child:
        await child.line(containing="started")
    assert child.returncode is not None


def test_what_is_installed_is_found_as_a_command_or_as_a_module() -> None:
    assert require("sh").endswith("sh")
    assert require("asyncio.events").endswith("events.py")


@pytest.mark.parametrize("name", ["no-such-thing", "no_such.thing", "tests_of_no_such_thing"])
def test_what_is_not_installed_skips_the_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RDZV_TEST_REQUIRE_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"skipped, not installed: {name}"):
        require(name)


def test_a_mere_folder_is_not_an_installed_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RDZV_TEST_REQUIRE_ALL", raising=False)
    (tmp_path / "just_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(pytest.skip.Exception):
        require("just_a_folder")


def test_what_is_not_installed_fails_the_test_where_everything_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RDZV_TEST_REQUIRE_ALL", "1")
    with pytest.raises(pytest.fail.Exception, match="not installed: no-such-thing"):
        require("no-such-thing")
