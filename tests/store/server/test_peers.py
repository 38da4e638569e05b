"""If all connections together hold too much, the one that holds most is closed, not the one that gets an event now."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from store.engine.sessions import ByteCount
from store.limits import Limits
from store.protocol.wire import Rejection
from store.server.accept.connection_table import ConnectionTable
from store.server.outbox import Outbox, frame_memory
from store.server.peers import Peers

KIB = 1024


class FakePeer:
    """A connection that holds as many bytes as a test says."""

    def __init__(self, name: str, outboxes: ByteCount, inboxes: ByteCount) -> None:
        self.name = name
        self.outbox = Outbox(outboxes)
        self.inbox_bytes = 0
        self.since = 0.0
        self.gone = False
        self._inboxes = inboxes

    def receives(self, size: int) -> None:
        self._inboxes.bytes += size - self.inbox_bytes
        self.inbox_bytes = size

    def inbox_cost(self, now: float) -> float:
        return self.inbox_bytes * (1.0 + now - self.since)

    def refuse(self, sorry: Rejection) -> None:  # noqa: ARG002
        self.abort()

    def abort(self) -> None:
        self.gone = True
        self.outbox.clear()
        self.receives(0)


class Scene:
    """A memory, its store, and some peers."""

    def __init__(self, **limits: int) -> None:
        self.snapshots = SimpleNamespace(held_bytes=0, oldest=None)
        self.state = SimpleNamespace(memory_bytes=0, snapshots=self.snapshots)
        self.pending_commits = SimpleNamespace(bytes=0)
        engine = SimpleNamespace(state=self.state)
        durability: Any = SimpleNamespace(engine=engine, pending_commits=self.pending_commits)
        of_all = Limits(value_bytes_max=8 * KIB, history_bytes_max=KIB, **limits)
        self.memory = Peers(of_all, durability, ConnectionTable(of_all, lambda: 0.0))
        self.peers: dict[int, Any] = cast("dict[int, Any]", self.memory.by_id)
        for number in range(3):
            self.peers[number] = FakePeer(f"peer {number}", self.memory.outboxes, self.memory.inboxes)

    def full(self) -> bool:
        return self.memory.outboxes_hold_too_much

    @property
    def gone(self) -> list[int]:
        return [number for number, peer in self.peers.items() if peer.gone]


def test_the_slowest_reader_pays_for_all(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(memory_bytes_max=100 * KIB, outbox_bytes_max=60 * KIB, frame_bytes_max=16 * KIB)
    for number, peer in scene.peers.items():
        peer.outbox.queue(bytes((1 + number) * 10 * KIB))
    assert not scene.full()
    scene.peers[1].outbox.queue(bytes(30 * KIB))
    assert scene.full()
    scene.memory.close_slowest_readers()
    assert scene.gone == [1]
    assert "memory_bytes_max is 102400" in caplog.text
    scene.memory.outboxes.bytes = 101 * KIB
    scene.peers.clear()
    scene.memory.close_slowest_readers()  # no peer is left to close


def test_the_most_expensive_and_oldest_half_request_is_closed_first(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(memory_bytes_max=100 * KIB, outbox_bytes_max=10 * KIB, frame_bytes_max=40 * KIB)
    for number, size in ((0, 30), (1, 40), (2, 31)):
        scene.peers[number].receives(size * KIB)
        scene.peers[number].since = 10.0 * number
    scene.memory.close_costliest_inboxes(now=20.0)
    assert scene.gone == [0]
    assert "memory_bytes_max is 102400" in caplog.text


@pytest.mark.parametrize("held", ["by the store", "for the disk"])
def test_memory_of_the_store_and_its_disk_counts_except_their_reserve(
    held: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(memory_bytes_max=200 * KIB, outbox_bytes_max=20 * KIB, frame_bytes_max=20 * KIB)
    if held == "by the store":
        scene.state.memory_bytes = 190 * KIB
    else:
        scene.pending_commits.bytes = 190 * KIB
    scene.peers[0].outbox.queue(bytes(15 * KIB))
    assert frame_memory(15 * KIB) < 20 * KIB
    assert not scene.full(), "a store that is full must still be read from"
    scene.peers[1].outbox.queue(bytes(5 * KIB))
    scene.memory.close_slowest_readers()
    assert scene.gone == [0]
    assert "memory_bytes_max is 204800" in caplog.text
    scene.peers[2].receives(21 * KIB)
    scene.memory.close_costliest_inboxes(now=1.0)
    assert scene.gone == [0, 2]


def test_the_listing_that_was_unread_for_longest_is_closed() -> None:
    scene = Scene(outbox_bytes_max=60 * KIB, frame_bytes_max=16 * KIB, memory_bytes_max=400 * KIB)
    scene.state.memory_bytes = 401 * KIB
    scene.snapshots.held_bytes = 101 * KIB
    scene.memory.close_oldest_listing_reader()  # no peer reads any more
    scene.snapshots.oldest = SimpleNamespace(reader=1)
    scene.snapshots.held_bytes = 50 * KIB
    scene.memory.close_oldest_listing_reader()
    assert scene.gone == [], "so much is kept back for it, whatever else is held"
    scene.snapshots.held_bytes = 80 * KIB
    for _ in range(2):
        scene.memory.close_oldest_listing_reader()
    assert scene.gone == [1]
