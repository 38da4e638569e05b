"""The event loop of each test, the tests that a newcomer's run leaves out, and the share of each worker.

Tests run in real time, or in virtual time with the mark `virtual_time`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from store.server.request_scheduler import SLOW_LINE
from tests.support.seeds import EVERYTHING, FRESH
from tests.support.virtual_time import VirtualTimeLoop

# On a busy machine requests are slow, and the store logs a line about that. Tests that count log lines must not see it.
logging.getLogger("store.server.request_scheduler").addFilter(lambda record: record.msg != SLOW_LINE)

# A forked child must not collect objects of earlier tests: a channel of grpc would wait for its thread, for ever.
os.register_at_fork(after_in_child=gc.disable)

# The time that hypothesis needs for an example depends only on the machine.
settings.register_profile(
    "rdzv", max_examples=100 if EVERYTHING else 30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("rdzv")

_worker_died = False

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loop of one test.

    Called once per test function, before it is parametrized. So the mark counts on a function, a class or a module, not
    on one `pytest.param`. There is one factory, so the names of tests do not change.
    """
    if item.get_closest_marker("virtual_time") is not None:
        return {"virtual_time": VirtualTimeLoop}
    return {"real_time": asyncio.new_event_loop}


def pytest_configure() -> None:
    """Prepare the environment and the signals that child processes inherit."""
    # The suite starts hundreds of Pythons. Without cached bytecode each would compile all our modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Under nohup, or behind a shell's "&", these signals are ignored. Child processes must get them.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _has_shares(config: pytest.Config) -> bool:
    """Return True if each worker collects only the files that it runs.

    Collecting all files takes longer than running most of them, and with `loadfile` every worker does it. CI's files
    differ too much in length for fixed shares.
    """
    whole_suite = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return whole_suite and not EVERYTHING and config.getvalue("dist") == "loadfile"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker its share: the files are dealt out by size, as a hint of their length."""
    if _has_shares(node.config):
        files = sorted(Path(__file__).parent.rglob("test_*.py"), key=lambda path: (-path.stat().st_size, path))
        first, workers = int(node.workerinput["workerid"].removeprefix("gw")), node.workerinput["workercount"]
        both_ways = files[first :: 2 * workers] + files[2 * workers - 1 - first :: 2 * workers]
        node.workerinput["share"] = [str(path) for path in both_ways]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of other workers' shares."""
    share = getattr(config, "workerinput", {}).get("share")
    others = share is not None and collection_path.match("test_*.py") and str(collection_path) not in share
    return True if others else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Let each worker run all that it has collected, if it has collected its share."""
    if not _has_shares(config):
        return None
    from xdist.scheduler import EachScheduling  # type: ignore[import-untyped]

    class Shares(EachScheduling):  # type: ignore[misc]
        """Workers that run their shares. The session counts the tests of all of them."""

        def schedule(self) -> None:
            session: Any = config.pluginmanager.get_plugin("session")
            session.testscollected = sum(len(tests) for tests in self.node2collection.values())
            super().schedule()

    return Shares(config, log)


def pytest_report_header() -> str:
    """Show the seed, so that a failure can be repeated."""
    return f"fresh seed: {FRESH} (RDZV_TEST_SEED={FRESH} runs it again)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep quick tests, and some of each large table and long file, the same in every worker; compare limits."""
    end_of_process = float(config.getini("faulthandler_timeout"))
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker is not None and 0 < end_of_process <= marker.args[0]:
            raise pytest.UsageError(f"{item.nodeid} may take {marker.args[0]} s, but faulthandler_timeout is shorter")
    if EVERYTHING:
        return
    left_out = {item for item in items if item.get_closest_marker("in_ci") is not None}
    for mark, end_of_name in ("some_of", "["), ("some_here", "::"):
        tables: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item not in left_out and item.get_closest_marker(mark) is not None:
                tables.setdefault(item.nodeid.partition(end_of_name)[0], []).append(item)
        for name, cases in tables.items():
            marker = cases[0].get_closest_marker(mark)
            assert marker is not None
            kept = random.Random(f"{FRESH} {name}").sample(cases, min(marker.args[0], len(cases)))
            left_out.update(case for case in cases if case not in kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:  # noqa: ARG001  pytest passes by name
    """Remember that a worker of xdist has died: the rest of its tests is not run."""
    global _worker_died
    _worker_died = _worker_died or error is not None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Show by the exit status that not all tests were run. "Some failed" would be run again, and then pass."""
    if _worker_died:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Fail a test that leaves a signal ignored: all processes of later tests would ignore it, too."""
    yield
    ignored = {number for number in ENDING if signal.getsignal(number) is signal.SIG_IGN}
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    assert not ignored, f"left ignored: {sorted(ignored)}"
