"""A journal that writes when a test says so.

journal.begun.acquire()         the writer has a group in hand
journal.may_commit.release()    now it may write it
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import store
from store.engine.changeset import ChangeSet
from store.server.journal import Journal
from tests.support.stores import Peer

__all__ = ["HeldBack", "a_peer", "held_back", "taken"]

PATIENCE = 20.0  # seconds after which a test that forgot to let go fails instead of hanging


class HeldBack(Journal):
    """A journal that writes a group only when the test permits it; it writes to a real file.

    Attributes:
        begun: Released when the writer has taken a group.
        may_commit: To be released once for each group.
        groups: The groups that were written.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.begun = threading.Semaphore(0)
        self.may_commit = threading.Semaphore(0)
        self.groups: list[list[ChangeSet]] = []

    def _commit(self, group: list[ChangeSet]) -> None:
        self.begun.release()
        assert self.may_commit.acquire(timeout=PATIENCE), "nobody let this group be written"
        super()._commit(group)
        self.groups.append(group)


@contextlib.asynccontextmanager
async def held_back(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[tuple[store.Server, HeldBack]]:
    """Serve a store whose disk writes only when the test permits it."""
    monkeypatch.setattr("store.server.journal.Journal", HeldBack)
    async with store.serve(data_dir=directory, **options) as server:
        journal = server._durability.journal
        assert isinstance(journal, HeldBack)
        try:
            yield server, journal
        finally:
            journal.may_commit.release(1000)


async def taken(semaphore: threading.Semaphore) -> None:
    """The writer has a group in hand."""
    assert await asyncio.to_thread(semaphore.acquire, timeout=60)


async def a_peer(server: store.Server, journal: HeldBack) -> Peer:
    """A peer that has been welcomed, which takes a commit: its session is made durable first."""
    _, peer = await asyncio.get_running_loop().create_connection(Peer, server.host, server.port)
    await taken(journal.begun)
    assert peer.connection.welcomed is None, "the welcome waits, too"
    journal.may_commit.release()
    await peer.until(lambda: peer.connection.welcomed)
    peer.said.clear()
    return peer
