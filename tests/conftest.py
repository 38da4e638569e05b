"""Which event loop a test runs on: real time, or virtual time for those marked `virtual_time`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from store.server.conversations import SLOW_LINE
from tests.support.seeds import EVERYTHING, FRESH
from tests.support.virtual_time import VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


# A busy machine makes requests slow, which the store's log has a line for: not for tests that count its lines.
logging.getLogger("store.server.conversations").addFilter(lambda record: record.msg != SLOW_LINE)

# A forked child must not end what earlier tests have left behind: a channel of grpc waits for its thread, for ever.
os.register_at_fork(after_in_child=gc.disable)

# How long an example takes, or the making of one, tells of the machine and of nothing else.
settings.register_profile("rdzv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rdzv")

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loop of one test.

    Asked once per test function, before it is parametrized: the mark counts on a function, a class or a
    module, not on one `pytest.param`. One factory, so the tests' names stay as they are.
    """
    if item.get_closest_marker("virtual_time") is not None:
        return {"virtual_time": VirtualTimeLoop}
    return {"real_time": asyncio.new_event_loop}


def pytest_configure() -> None:
    """Prepare what the processes that are started here inherit."""
    # The suite starts hundreds of Pythons, and each would compile all of our modules anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # They are to hear of signals that were ignored here, as under nohup or behind a shell's "&".
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Name the seed, so that what it brings to light can be run again."""
    return f"fresh seed: {FRESH} (RDZV_TEST_SEED={FRESH} runs it again)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some cases of each large table, the same in every worker."""
    if EVERYTHING:
        return
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some_of") is not None:
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for name, cases in tables.items():
        marker = cases[0].get_closest_marker("some_of")
        assert marker is not None
        kept = random.Random(f"{FRESH} {name}").sample(cases, min(marker.args[0], len(cases)))
        left_out.update(case for case in cases if case not in kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Fail a test that leaves a signal ignored: all processes that later tests start would ignore it, too."""
    yield
    ignored = {number for number in ENDING if signal.getsignal(number) is signal.SIG_IGN}
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    assert not ignored, f"left ignored: {sorted(ignored)}"
