"""A store whose disk is restored to an earlier state: its clients are told, also with other faults beside."""

import asyncio
import random
import sqlite3
from unittest.mock import patch

import pytest

from store.errors import ConnectionLost, StoreError, StoreReplaced
from store.protocol.connection import ClientConnection
from tests.sim.machines import Cosmos, quiet_logs

WRITES = 40


def play(seed: int) -> StoreError | None:
    """Return the error of a client that saw later revisions than the store still has, after the disk was restored."""
    rng = random.Random(seed)
    with quiet_logs():
        cosmos = Cosmos(seed, replay=f"tests/sim/test_gone_back.py, seed {seed}")
        told: list[StoreError | None] = []
        acknowledged = 0

        async def live() -> None:
            nonlocal acknowledged
            async with process.client(timeout=60.0) as client:
                for number in range(WRITES):
                    try:
                        await client.put("k", b"%d" % number)
                        acknowledged += 1
                    except StoreReplaced:
                        break
                    except ConnectionLost:
                        continue
                await asyncio.sleep(30.0)
                told.append(client.failure)

        disk = cosmos.store.disk
        assert disk is not None
        cosmos.store.start()
        process = cosmos.process("c")
        process.host.start_task(live())
        try:
            early = sqlite3.connect(":memory:")
            while acknowledged < 5:
                cosmos.timeline.run_until_time(cosmos.now + 0.05)
            disk.database.backup(early)
            kept = acknowledged
            while acknowledged < kept + 5:
                cosmos.timeline.run_until_time(cosmos.now + 0.05)
            cosmos.store.die(silently=rng.random() < 0.5)
            early.backup(disk.database)
            early.close()
            cosmos.timeline.run_until_time(cosmos.now + rng.uniform(0.1, 3.0))
            cosmos.store.start()
            cosmos.timeline.run_until_time(cosmos.now + 120.0)
        finally:
            cosmos.end()
    assert told, "it waits for ever"
    return told[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_client_that_has_seen_later_revisions_gets_store_replaced(seed: int) -> None:
    failure = play(seed)
    assert isinstance(failure, StoreReplaced)
    assert "has gone back in time" in str(failure)


def test_the_bug_of_a_client_that_forgets_its_revision_is_found() -> None:
    """The planted bug: the client goes on as if nothing had happened."""
    with patch.object(ClientConnection, "_note_revision", lambda *_: None), pytest.raises(AssertionError):
        for seed in range(3):
            assert isinstance(play(seed), StoreReplaced)
