"""The port that a node promises, in case it becomes rank 0."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from rdzv.node.part.ports import HeldPort

if TYPE_CHECKING:
    import pytest


def test_the_port_to_meet_at_is_taken_from_the_range_that_a_firewall_lets_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("", 0)) as taken:
        first = taken.getsockname()[1]
        last = min(first + 20, 65535)
        one, other = HeldPort(f"{first}-{last}"), HeldPort(f"{first}-{last}")
        assert first < one.hold() <= last
        assert one.hold() == other.hold(), "nodes of one machine: only one of them becomes rank 0"
        one.release()
        other.release()
        assert HeldPort(str(first)).hold() == first
        assert f"somebody listens at each port of master_port={first}" in caplog.text
