"""When a client takes a connection for broken, and when only for slow; when it asks on an idle one."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from store.client.patience import (
    BUSY_FACTOR,
    HEARTBEAT,
    HEARTBEATS_OF_BUSY,
    SILENCE,
    SLOW_FOR,
    SPREAD,
    WATCHES_HEAR_EVERY,
    Patience,
)
from store.client.pulse import Line
from store.client.silence import Silence
from tests.support.processes import require

if TYPE_CHECKING:
    from store.client.link import Link

pytestmark = pytest.mark.virtual_time


class Watched:
    """A client and its connection, on which nothing is heard, as far as silence looks at them."""

    def __init__(
        self,
        *,
        acknowledged: bool = False,
        answers_others: bool = False,
        connected: bool = True,
        heartbeats: float = 1.0,
    ) -> None:
        patience = Patience(random.Random(0))
        patience.connected(0.001)
        self.connected, self.acknowledged = connected, acknowledged
        self.met = self.has_watches = self.aborted = self.mute = False
        self.farewell = ""
        self.held = 0
        self.pings = 0
        self.probes = 0
        self.looked_at: float | None = None
        self._answers_others = answers_others
        self.silence = Silence(cast("Link", self), patience, self, heartbeats)

    def queue(self) -> tuple[int, bool]:
        return self.held, False

    def abort(self) -> None:
        self.aborted = True

    async def probe(self) -> None:
        self.probes += 1
        if not self._answers_others:
            await asyncio.Event().wait()

    def ask_ping(self) -> None:
        self.pings += 1

    async def find_fresh_link(self) -> Link:
        self.looked_at = asyncio.get_running_loop().time()
        never: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        return await never


async def test_a_fresh_connection_is_looked_for_after_a_second_and_much_later_where_the_system_answers() -> None:
    began = asyncio.get_running_loop().time()
    broken, busy = Watched(acknowledged=False), Watched(acknowledged=True)
    for one in (broken, busy):
        one.silence.expect_answer()
    await asyncio.sleep(5 * SILENCE)
    assert broken.looked_at is not None
    assert broken.looked_at - began == pytest.approx(SILENCE)
    assert (busy.looked_at, busy.pings, busy.probes) == (None, 1, 1)
    assert broken.probes == 0, "it goes at once"
    await asyncio.sleep(BUSY_FACTOR * SILENCE)
    assert busy.looked_at is not None, "a proxy may answer for a server that is gone"
    for one in (broken, busy):
        await one.silence.aclose()


async def test_a_server_that_was_slow_lately_is_given_more_time_before_others_ask_it() -> None:
    """Each of thousands who waited asked it beside, which made it slower, and them ask again: none was served."""
    watched = Watched(acknowledged=True)
    for _ in range(2):
        watched.silence.expect_answer()
        await asyncio.sleep(4 * SILENCE)
        watched.probes = 0
        watched.silence.heard(expecting=False)
    watched.silence.expect_answer()
    await asyncio.sleep(2 * 4 * SILENCE)
    assert watched.probes == 0
    await asyncio.sleep(2 * 4 * SILENCE)
    assert watched.probes == 1
    watched.silence.heard(expecting=False)
    for _ in range(int(10 * SLOW_FOR / HEARTBEAT)):
        await asyncio.sleep(HEARTBEAT)
        watched.silence.heard(expecting=False)
    watched.silence.expect_answer()
    await asyncio.sleep(2 * SILENCE)
    assert watched.probes == 2, "that was long ago"
    await watched.silence.aclose()


async def test_a_connection_is_left_whose_server_answers_those_who_ask_later() -> None:
    """A proxy whose own connection to the server had gone was believed for eight seconds, as a busy server is."""
    began = asyncio.get_running_loop().time()
    dead = Watched(acknowledged=True, answers_others=True)
    dead.silence.expect_answer()
    await anyio.sleep(SILENCE + SPREAD)
    assert dead.looked_at is not None
    assert SILENCE <= dead.looked_at - began <= SILENCE + SPREAD
    await dead.silence.aclose()


async def test_a_server_that_is_heard_again_is_asked_on_no_second_connection() -> None:
    heard = Watched(acknowledged=True, answers_others=True)
    heard.silence.expect_answer()
    await anyio.sleep(SILENCE)
    heard.silence.heard(expecting=False)
    await anyio.sleep(2 * SPREAD)
    assert (heard.probes, heard.looked_at) == (0, None)
    await heard.silence.aclose()


async def test_time_in_which_the_loop_was_held_up_is_not_the_servers_silence() -> None:
    """With thousands of clients in one loop, what the server had answered was taken for silence before it was read."""
    watched = Watched(acknowledged=False)
    watched.silence.expect_answer()
    loop = asyncio.get_running_loop()
    await asyncio.sleep(SILENCE / 4)
    loop._jumping_selector.now += 30.0  # type: ignore[attr-defined]  # one callback that takes half a minute
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    looked_at = [watched.looked_at]
    await asyncio.sleep(SILENCE)
    looked_at.append(watched.looked_at)
    assert looked_at[0] is None
    assert looked_at[1] is not None
    await watched.silence.aclose()


async def test_a_server_is_not_asked_again_before_what_it_said_meanwhile_was_read() -> None:
    """In a loop that was too busy with thousands of clients each request cost a ping as well, which kept it busier."""
    watched = Watched(acknowledged=False)
    watched.silence.expect_answer()
    loop = asyncio.get_running_loop()
    await asyncio.sleep(SILENCE / 4)
    loop._jumping_selector.now += 30.0  # type: ignore[attr-defined]
    loop.call_later(0.0, lambda: loop.call_soon(lambda: watched.silence.heard(expecting=False)))  # as the socket has it
    await asyncio.sleep(SILENCE * 4)
    assert (watched.pings, watched.looked_at) == (0, None)
    await watched.silence.aclose()


# ---------------------------------------------------------------------------------------------- the heartbeat


async def test_a_silent_server_is_asked_and_then_given_up() -> None:
    broken, busy = Watched(), Watched(acknowledged=True)
    await asyncio.sleep(HEARTBEAT * 1.5)
    assert (broken.pings, broken.aborted) == (1, False)
    await asyncio.sleep(HEARTBEAT)
    assert (broken.pings, broken.aborted, busy.aborted) == (1, True, False)
    assert broken.farewell == "it has been silent for 10 s"
    await asyncio.sleep(2 * HEARTBEAT * HEARTBEATS_OF_BUSY)
    assert busy.aborted
    assert busy.pings == 1


async def test_one_that_answers_is_asked_again_and_one_that_takes_what_we_send_is_there() -> None:
    answering, taking = Watched(), Watched()
    taking.held = 100
    taking.silence.pulse.look(taking.silence.pulse.began, Line(unsent_bytes=101))
    for beat, asked in enumerate((1, 1, 2)):
        await asyncio.sleep(HEARTBEAT + 0.1)
        assert answering.pings == asked
        if beat == 0:
            answering.silence.heard(expecting=False)
        taking.held -= 1
    assert (taking.pings, taking.aborted, answering.aborted) == (0, False, False)
    for one in (answering, taking):
        one.silence.stop()


async def test_watches_hear_how_far_the_store_has_come_also_on_a_connection_that_is_busy() -> None:
    busy = Watched()
    busy.has_watches = True
    for _ in range(int(WATCHES_HEAR_EVERY) + int(HEARTBEAT)):
        busy.silence.heard(expecting=False)
        await asyncio.sleep(1)
    assert busy.pings == 1
    busy.silence.stop()
    await asyncio.sleep(100)
    assert (busy.pings, busy.aborted) == (1, False)


async def test_who_greets_nobody_is_given_so_many_heartbeats_and_the_error_says_what_it_may_be() -> None:
    mute = Watched(connected=False, heartbeats=2.0)
    mute.mute = True
    await asyncio.sleep(HEARTBEAT * 3.5)
    assert (mute.pings, mute.aborted) == (0, False)
    await asyncio.sleep(HEARTBEAT)
    assert (mute.pings, mute.aborted) == (0, True)
    assert mute.farewell == "it has been silent for 20 s; if it speaks TLS, write tcps://"


def test_on_uvloop_a_look_that_is_due_at_once_is_one_that_can_be_hastened() -> None:
    """uvloop makes of it a handle that does not say when it is due, and the first request after it failed."""
    require("uvloop")
    import uvloop

    async def ask() -> None:
        watched = Watched()
        watched.silence._look_at(asyncio.get_running_loop().time() - 1.0)
        watched.silence.expect_answer()
        await asyncio.sleep(0)
        await watched.silence.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())
