"""The engine's watches and parked waits: their events and answers, and the recipients."""

from store import when
from store.messages import Cancel, Done, Guarded, Put, Stats, Wait, Watch
from tests.support.by_hand import Desk


def test_a_watch_that_was_cancelled_or_dropped_hears_no_more() -> None:
    desk = Desk()
    desk.ask(Watch(prefix=""), request_id=5)
    desk.ask(Watch(prefix=""), request_id=6)
    assert desk.ask(Cancel(target=5)) == Done()
    assert desk.engine.state.watches.remove(1, 6)
    assert not desk.engine.state.watches.remove(1, 6)
    assert desk.ask(Cancel(target=99)) == Done()
    desk.ask(Put("a", b""))
    assert desk.told == {}


def test_closing_a_connection_that_never_said_hello_is_no_matter() -> None:
    desk = Desk()
    desk.disconnect(77)
    assert desk.ask(Stats()).figures["sessions"] == 1


def test_nothing_is_kept_of_waits_that_are_over() -> None:
    desk = Desk()
    for number in range(4):
        desk.ask(Guarded(when=(when.missing("x"),), request=Wait(keys=("a", f"b{number}"))), peer=number)
    desk.ask(Put("a", b""), peer=9)
    desk.ask(Put("b0", b""), peer=9)
    desk.ask(Cancel(target=1), peer=1)
    desk.disconnect(2)
    desk.ask(Put("x", b""), peer=9)
    waits = desk.engine._waits
    assert (waits.parked, waits._at, waits._under, waits._by, waits.bytes) == ({}, {}, {}, {}, 0)
