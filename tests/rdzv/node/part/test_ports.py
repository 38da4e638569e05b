"""The port that a node promises, in case it becomes rank 0."""

from __future__ import annotations

import os
import socket

import pytest

from rdzv.node.link.ports import HeldPort


def test_the_port_of_rank_0_is_taken_from_the_given_range(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("", 0)) as taken:
        first = taken.getsockname()[1]
        last = min(first + 20, 65535)
        one, other = HeldPort(f"{first}-{last}"), HeldPort(f"{first}-{last}")
        assert first < one.hold() <= last
        assert one.hold() == other.hold(), "nodes of one machine: only one of them becomes rank 0"
        one.release()
        other.release()
        assert HeldPort(str(first)).hold() == first
        assert f"master_port={first}-{first} is in use" in caplog.text


def test_rank_0_can_bind_its_port_after_a_fork() -> None:
    """Regression: a worker of a DataLoader, forked while its node joined, held the promised port as
    long as it lived.
    """
    held = HeldPort()
    port = held.hold()
    reader, writer = os.pipe()
    alive, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(tell, b".")
        os.read(reader, 1)
        os._exit(0)
    try:
        os.read(alive, 1)
        held.release()
        socket.create_server(("", port)).close()
    finally:
        for end in (writer, reader, alive, tell):
            os.close(end)
        os.waitpid(child, 0)


def test_a_promised_port_is_free_for_ipv4_and_ipv6() -> None:
    """Regression: a port of the range that was in use by IPv6 was promised, and rank 0 could not listen there."""
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    with socket.create_server(("::", 0), family=socket.AF_INET6) as taken:
        first = taken.getsockname()[1]
        last = min(first + 20, 65535)
        held = HeldPort(f"{first}-{last}")
        assert first < held.hold() <= last
        held.release()
    free = HeldPort()
    port = free.hold()
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with pytest.raises(OSError, match="in use"), socket.socket(family) as other:
            other.bind((address, port))
    free.release()
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        pass
