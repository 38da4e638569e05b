"""Strangers cannot fill a log, and what it left out is counted; the operator is warned at 80 % of any limit, once."""

from __future__ import annotations

import dataclasses

import pytest

import store
from store.engine.keyspace import Groups
from store.limits import Limits
from store.server import server as server_room
from store.server.log_lines import AT_ONCE, PER_SECOND, Complaints, LimitWarnings


def figures(limits: Limits, **used: int) -> dict[str, object]:
    return {**dict.fromkeys(Limits.used_by().values(), 0), **dataclasses.asdict(limits), **used}


@pytest.mark.parametrize(("limit", "used"), Limits.used_by().items())
def test_each_limit_of_the_whole_store_is_warned_of_once_until_it_is_well_below(limit: str, used: str) -> None:
    limits = Limits()
    most = getattr(limits, limit)
    warnings, groups = LimitWarnings(), Groups(limits)
    assert warnings.look(figures(limits, **{used: most * 8 // 10}), groups) == []
    (line,) = warnings.look(figures(limits, **{used: most * 9 // 10}), groups)
    assert f"90 % of {limit} ({most})" in line or f"89 % of {limit} ({most})" in line
    assert warnings.look(figures(limits, **{used: most}), groups) == []
    assert warnings.look(figures(limits, **{used: most * 75 // 100}), groups) == []
    assert warnings.look(figures(limits, **{used: most * 9 // 10}), groups) == [], "it has not been well below"
    assert warnings.look(figures(limits, **{used: most // 2}), groups) == []
    assert len(warnings.look(figures(limits, **{used: most * 9 // 10}), groups)) == 1


def test_the_group_that_holds_most_is_named() -> None:
    limits = Limits(keys_max=100)
    groups = Groups(limits)
    groups.count("/rdzv/small/x", 10, 10)
    groups.count("/rdzv/big/x", 80, 20)
    (line,) = LimitWarnings().look(figures(limits, keys=90), groups)
    assert line == (
        "keys is 90, 90 % of keys_max (100); of all groups of keys, '/rdzv/big/' holds 80 keys and 20 bytes, which is "
        "most"
    )


def test_groups_near_their_own_limits_are_named_some_of_them() -> None:
    limits = Limits(group_keys_max=10)
    groups = Groups(limits)
    warnings = LimitWarnings()
    for number in range(12):
        groups.count(f"/rdzv/{number}/x", 9, 100)
    lines = warnings.look(figures(limits), groups)
    assert len(lines) == 9
    assert lines[0].startswith("'/rdzv/0/' holds 9 keys and 100 bytes: near group_keys_max (10)")
    assert lines[-1] == "so do 4 more groups of keys"
    assert warnings.look(figures(limits), groups) == []
    groups.count("/rdzv/3/x", -5, 0)
    assert warnings.look(figures(limits), groups) == []
    groups.count("/rdzv/3/x", 5, 0)
    assert len(warnings.look(figures(limits), groups)) == 1


async def test_a_server_writes_it_to_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The honest run: a store of ten keys, nine of which are one group's."""
    monkeypatch.setattr(server_room, "WARN_EVERY", 0.01)
    async with (
        store.serve(limits=Limits(keys_max=10)) as server,
        store.connect(server.url) as client,
    ):
        for number in range(9):
            await client.put(f"/rdzv/job/{number}", b"")
        while "keys_max (10)" not in caplog.text:  # the limit of every test ends this
            await client.ping()
        assert "'/rdzv/job/' holds 9 keys" in caplog.text
        stats = await client.stats()
        assert (stats["keys"], stats["keys_max"], stats["groups"]) == (9, 10, 1)


# ------------------------------------------------------------------------------------------------ complaints


def test_a_flood_gets_so_many_lines_and_then_few_a_second() -> None:
    complaints = Complaints()
    said = sum(complaints.say(number / 3000) for number in range(30_000))  # ten seconds of it
    assert AT_ONCE + 9 * PER_SECOND <= said <= AT_ONCE + 11 * PER_SECOND
    assert complaints.take_unsaid() == 30_000 - said
    assert complaints.take_unsaid() == 0


def test_what_is_said_now_and_then_is_always_said() -> None:
    complaints = Complaints()
    assert all(complaints.say(number / PER_SECOND) for number in range(5 * AT_ONCE))
    assert complaints.take_unsaid() == 0


def test_after_a_quiet_hour_there_is_no_more_than_at_first() -> None:
    complaints = Complaints()
    assert sum(complaints.say(0.0) for _ in range(2 * AT_ONCE)) == AT_ONCE
    assert sum(complaints.say(3600.0) for _ in range(2 * AT_ONCE)) == AT_ONCE


def test_a_clock_that_stands_still_gives_nothing() -> None:
    complaints = Complaints()
    for _ in range(AT_ONCE):
        complaints.say(5.0)
    assert not complaints.say(5.0)
    assert not complaints.say(4.0)
