"""Which of the restored sessions make way first."""

import random
from typing import Any

import pytest

from store.engine.changeset import SavedSession
from store.engine.sessions import Sessions
from store.messages import Added, CompareAndSetResult, Entry, Granted, Written


@pytest.mark.parametrize("seed", range(5))
def test_of_restored_sessions_those_that_wrote_last_make_way_last(seed: int) -> None:
    replies: list[tuple[int, Any]] = [
        (1, Granted(lease=1, ttl=1.0)),
        (1, Written(revision=7)),
        (1, CompareAndSetResult(True, Entry(key="k", value=b"", create_revision=8, mod_revision=8, lease=None))),
        (1, Added(value=1, revision=9)),
    ]
    saved = [
        SavedSession(id=bytes([9 - number]) * 16, number=number, replies=(replies[number],) if number < 4 else ())
        for number in range(6)
    ]
    order = [0, 4, 5, 1, 2, 3]
    random.Random(seed).shuffle(saved)
    sessions = Sessions(ttl=300.0, sessions_max=6)
    sessions.restore(saved, last=6, now=0.0)
    went = [sessions.evict_for_session(bytes(16), 9.9)]
    for newcomer in range(100, 106):
        id = bytes([newcomer]) * 16
        went.append(sessions.evict_for_session(id, 10.0))
        sessions.open_session(id, peer=newcomer)
    assert went == [[], *([bytes([9 - number]) * 16] for number in order)]
