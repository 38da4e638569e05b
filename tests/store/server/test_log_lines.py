"""Unauthenticated peers cannot fill a log; at 80 % of a limit the operator is warned, once."""

import dataclasses
import logging

import pytest

import store
from store.engine.keyspace import KeyGroupTable
from store.limits import Limits
from store.server import server as server_room
from store.server.log_lines import AT_ONCE, PER_SECOND, LimitWarnings, RateLimitedLog

log = logging.getLogger(__name__)


def figures(limits: Limits, **used: int) -> dict[str, object]:
    return {**dict.fromkeys(Limits.figure_by_limit().values(), 0), **dataclasses.asdict(limits), **used}


@pytest.mark.parametrize(("limit", "used"), Limits.figure_by_limit().items())
def test_each_limit_of_the_whole_store_is_warned_of_once_until_it_is_well_below(limit: str, used: str) -> None:
    limits = Limits()
    most = getattr(limits, limit)
    warnings, groups = LimitWarnings(), KeyGroupTable()
    said = [
        (step, limit in line and "9 %" in line.replace("90 %", "89 %"))
        for step, percent in enumerate((80, 90, 100, 75, 90, 50, 90))
        for line in warnings.lines_to_log(figures(limits, **{used: most * percent // 100}), groups)
    ]
    assert said == [(1, True), (6, True)], "the first and the last time"


def test_the_group_that_holds_most_is_named() -> None:
    limits = Limits(keys_max=100)
    groups, warnings = KeyGroupTable(), LimitWarnings()
    for number, keys in enumerate((2, 9, 4)):
        groups.add_usage(f"/rdzv/{number}/x", keys, 100)
    (line,) = warnings.lines_to_log(figures(limits, keys=90), groups)
    assert "keys_max (100); of all groups of keys, '/rdzv/1/' holds 9 keys and 100 bytes" in line


async def test_a_server_writes_it_to_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The honest run: a store of ten keys, nine of which belong to one group."""
    monkeypatch.setattr(server_room, "WARN_EVERY", 0.01)
    async with store.serve(limits=Limits(keys_max=10)) as server, store.connect(server.url) as client:
        for number in range(9):
            await client.put(f"/rdzv/job/{number}", b"")
        while "keys_max (10)" not in caplog.text:  # the limit of every test ends this
            await client.ping()
        assert "'/rdzv/job/' holds 9 keys" in caplog.text
        stats = await client.stats()
        assert (stats["keys"], stats["keys_max"], stats["groups"]) == (9, 10, 1)


def said_of(caplog: pytest.LogCaptureFixture, times: list[float]) -> int:
    clock = iter([0.0, *times])
    lines = RateLimitedLog(lambda: next(clock))
    caplog.clear()
    for number, _ in enumerate(times):
        lines.write(log, logging.WARNING, "line %d", number)
    return len(caplog.records)


def test_a_flood_of_lines_is_limited_and_the_omitted_ones_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    said = said_of(caplog, [number / 1000 for number in range(10_000)])
    assert AT_ONCE + 9 * PER_SECOND <= said <= AT_ONCE + 11 * PER_SECOND
    assert "(99 lines like this were left out before it)" in caplog.text
    assert said_of(caplog, [number / PER_SECOND for number in range(2 * AT_ONCE)]) == 2 * AT_ONCE, "now and then"
    assert said_of(caplog, [0.0] * 2 * AT_ONCE + [3600.0] * 2 * AT_ONCE) == 2 * AT_ONCE, "after a quiet hour"
    assert said_of(caplog, [5.0] * AT_ONCE + [5.0, 4.0]) == AT_ONCE, "a clock that stands still gives nothing"
