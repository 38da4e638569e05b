"""S6: `memory_bytes` counts what each kind of request leaves in memory: no table costs more than it is counted for."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from store import Grant, Put, when
from store.messages import CompareAndSet, Guarded, KeepAlive, Request, Transact, Wait, Watch
from tests.support.by_hand import Desk

MANY = 1000
WIDE = "\U0001f600" + "a" * 400  # each of its characters takes four bytes of memory

FILLINGS: dict[str, Callable[[int], Request[Any]]] = {
    "keys": lambda number: Put(f"k{number}", b""),
    "groups of one key": lambda number: Put(f"/a/{number}/k", b""),
    "keys of wide characters": lambda number: Put(f"{number}{WIDE}", b""),
    "keys with a time to live": lambda number: Put(f"k{number}", b"", ttl=60.0),
    "leases": lambda _: Grant(ttl=60.0, disconnect_ttl=1.0, gone_ttl=0.1),
    "watches of a prefix each": lambda number: Watch(prefix=f"/a/{number}/"),
    "watches of one prefix": lambda _: Watch(prefix="a"),
    "watches of wide characters": lambda number: Watch(prefix=f"{number}{WIDE}"),
    "waits": lambda number: Wait(keys=(f"n{number}",)),
    "waits for many keys": lambda number: Wait(keys=tuple(f"n{number}/{key}" for key in range(20))),
    "waits under many conditions": lambda number: Guarded(
        when=tuple(when.mod_revision(f"c{number}/{key}") == 0 for key in range(20)), request=Wait(keys=("never",))
    ),
    "kept replies": lambda number: Put("k", b"%d" % number),
    "kept refusals": lambda _: Guarded(when=(when.exists("x" * 300),), request=Put("k", b"")),
    "kept replies with an entry": lambda _: CompareAndSet(key="large", value=b"", expected_revision=0),
    "kept replies of transactions": lambda _: Transact(when=(), then=tuple(Put(f"k{key}", b"") for key in range(20))),
}


@pytest.fixture
def desk() -> Iterator[Desk]:
    limits = {"session_replies_max": MANY, "session_replies_bytes_max": 2**30, "waits_bytes_max": 2**30}
    desk = Desk(**limits, watches_max=MANY, sessions_max=4 * MANY, history_bytes_max=1000)
    desk.ask(Put("large", bytes(1000)), peer=10**6)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield desk
    tracemalloc.stop()
    gc.enable()


def check(desk: Desk, fill: Callable[[], None]) -> None:
    """Fill a table, and compare the memory that it takes with the bytes that are counted."""
    held, counted = tracemalloc.get_traced_memory()[0], desk.engine.state.memory_bytes
    fill()
    desk.told.clear()
    desk.answers.clear()
    gc.collect()
    took, told = tracemalloc.get_traced_memory()[0] - held, desk.engine.state.memory_bytes - counted
    assert took <= 1.1 * told, f"{took / MANY:.0f} bytes for each, and {told / MANY:.0f} are counted"


@pytest.mark.some_of(6)
@pytest.mark.parametrize("name", FILLINGS)
def test_s6_what_requests_leave_in_memory_is_counted(name: str, desk: Desk) -> None:
    """Regression: a wait took three times, a watch and a kept reply twice as much as they were counted for."""

    def fill() -> None:
        for number in range(MANY):
            peer = 0 if number % 2 or name.startswith("kept") else number  # a session of its own counts for 800 bytes
            desk.ask(FILLINGS[name](number), peer=peer, acknowledged=0)

    check(desk, fill)


def test_s6_sessions_of_clients_that_are_away_and_notes_are_counted(desk: Desk) -> None:
    def fill() -> None:
        for number in range(MANY):
            desk.connect(number, session=b"%016d" % number, process=b"%016d" % number)
            lease = desk.ask(Grant(ttl=60.0, disconnect_ttl=50.0, gone_ttl=40.0), peer=number).lease
            desk.ask(KeepAlive(lease=lease, note=bytes(128)), peer=number)
            desk.now += 0.1
            desk.disconnect(number)

    check(desk, fill)
