"""What `rdzv serve -v` tells of sessions: one line each when they come, are silent, resume, go, and what lapses."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rdzv.testing.network import MemoryNetwork
from store.engine.leases import LeaseRecord
from store.engine.processes import Closing
from store.server.log_lines import AT_ONCE, REMEMBERED_MOST, SessionLog
from tests.support.stores import connect_in_memory, serve_in_memory


def lease(*keys: str, id: int = 1, keeper: int | None = 7) -> LeaseRecord:
    return LeaseRecord(
        id=id,
        ttl=10.0,
        disconnect_ttl=1.0,
        gone_ttl=None,
        lapses_at=10.0,
        keeper=keeper,
        anonymous=False,
        keys=dict.fromkeys(keys),
    )


def test_a_session_is_followed_from_its_beginning_to_its_end() -> None:
    told = SessionLog()
    node = lease("/rdzv/job-7/nodes/a")
    assert told.opened(1, "10.77.0.12:5123", replaces=None, now=0) == "session 1 from 10.77.0.12:5123 begins"
    assert told.closed(1, "10.77.0.12:5123", Closing.DROPPED, [node], now=5) == (
        "session 1 from 10.77.0.12:5123 is gone: its connection was closed without a goodbye; "
        "it keeps /rdzv/job-7/nodes/a"
    )
    assert told.opened(1, "10.77.0.12:5124", replaces=None, now=6.4) == (
        "session 1 from 10.77.0.12:5124 resumes after 1 s"
    )
    assert told.opened(1, "10.77.0.99:5125", replaces="10.77.0.12:5124", now=8) == (
        "session 1 from 10.77.0.99:5125 resumes: 10.77.0.12:5124, its connection until now, is given up"
    )
    assert told.closed(1, "10.77.0.99:5125", Closing.GOODBYE, [], now=9) == (
        "session 1 from 10.77.0.99:5125 has ended with a goodbye"
    )


def test_after_a_restart_of_the_server_a_session_resumes_and_nobody_knows_since_when() -> None:
    told = SessionLog()
    assert str(told.opened(9, "a:1", replaces=None, now=0)).endswith("begins")
    assert str(told.opened(4, "b:1", replaces=None, now=0)).endswith("resumes")


def test_silence_is_told_once_until_the_session_is_heard_again() -> None:
    told = SessionLog()
    node = lease("k1", "k2", "k3")
    line = told.silent(1, "a:1", node, remaining=4.0, now=0)
    assert line == "session 1 from a:1 is silent: k1 and k2 lapses in 4 s"
    assert told.silent(1, "a:1", node, remaining=3.0, now=1) is None
    told.heard(set())
    assert told.silent(1, "a:1", node, remaining=4.0, now=9) is not None
    assert told.lapsed(node, now=10) == "lease 1 (10 s) has lapsed, and with it k1 and k2"
    assert (
        told.lapsed(lease(id=2, keeper=None), now=10) == "lease 2 (10 s; its client's connection had ended) has lapsed"
    )


def test_ten_thousand_that_come_back_at_once_are_told_of_in_numbers() -> None:
    told = SessionLog()
    lines = [told.opened(number, "a:1", replaces=None, now=0) for number in range(1, REMEMBERED_MOST + 2)]
    assert len([line for line in lines if line]) == AT_ONCE
    left_out = REMEMBERED_MOST + 1 - AT_ONCE
    assert told.opened(1, "a:1", replaces=None, now=1) == (
        f"session 1 from a:1 resumes ({left_out} lines like this were left out before it)"
    )
    for number in range(1, REMEMBERED_MOST + 2):
        told.closed(number, "a:1", Closing.CUT, [], now=2)
    assert len(told._gone) == REMEMBERED_MOST


@pytest.mark.virtual_time
async def test_a_server_that_is_to_tell_logs_who_comes_is_silent_and_lapses(caplog: pytest.LogCaptureFixture) -> None:
    """The log of `rdzv serve -v` had two lines in an hour with outages: that it began, and that it left."""
    caplog.set_level(logging.INFO, logger="store.server.server")
    network = MemoryNetwork()
    async with serve_in_memory(network) as server:
        silence = asyncio.create_task(server.tell_of_silence())
        async with connect_in_memory(network) as client:
            lease = await client.grant(10)
            await client.put("/rdzv/job-7/nodes/a", b"", lease=lease)
            await asyncio.sleep(12)  # it renews nothing
        await asyncio.sleep(1)
        silence.cancel()
    said = [record.message for record in caplog.records if record.message.startswith(("session", "lease"))]
    assert [line.partition("(peer 1) ")[2] or line for line in said] == [
        "begins",
        "is silent: /rdzv/job-7/nodes/a lapses in 4 s",
        "lease 1 (10 s) has lapsed, and with it /rdzv/job-7/nodes/a",
        "has ended with a goodbye",
    ]


@pytest.mark.virtual_time
async def test_a_server_whose_log_nobody_reads_keeps_no_account(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="store.server.server")
    network = MemoryNetwork()
    async with serve_in_memory(network) as server, connect_in_memory(network):
        await server.tell_of_silence()
    assert caplog.records == []
