"""Shell: notices that answers stay away on one connection, and looks for a fresh one beside it meanwhile.

After half of the client's patience it asks once more: whoever answers that is only slow with the rest. After all of it
the search begins; it ends as soon as the silent connection is heard again. Bytes that the other side's system still
takes count as an answer: a large value over a slow network is no silence. Where that system has acknowledged all that
was sent, the server may only be busy, and thousands who come back over fresh connections would keep it busier still: so
the search begins much later, or once the server has answered a newcomer that asked later than we (`probe`). Nobody asks
until the server has been silent for much longer than it was lately, since that costs it time, too. Time in which this
process was too busy to look is not the server's silence, either.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import anyio

from store.client.patience import HEARTBEAT, HEARTBEATS_OF_BUSY, WATCHES_HEAR_EVERY
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from store.client.link import Link
    from store.client.patience import Patience

__all__ = ["Heartbeat", "Pinging", "Seeking", "Silence"]

LATE = 0.1  # seconds; a look that comes so late finds that its own loop was held up
LOOKS = 8  # that are taken within the patience at most, where it has become shorter meanwhile


class Seeking(Protocol):
    """What looking for a fresh connection needs of the client that it is for."""

    def ask_ping(self) -> None:
        """Ask what any server answers at once, if it can be asked now."""
        ...

    async def find_fresh_link(self) -> Link:
        """Give a fresh connection."""
        ...

    async def probe(self) -> None:
        """Return once the server has answered somebody who asks now."""
        ...


class Silence:
    """How long one connection has been silent though something was asked.

    Args:
        link: The connection.
        patience: How long that may be.
        client: Whose connection it is.

    Attributes:
        asked_at: Since when there is something to answer, and nothing has been heard; None if there is nothing.
    """

    def __init__(self, link: Link, patience: Patience, client: Seeking) -> None:
        self._loop = asyncio.get_running_loop()
        self._link, self._patience, self._client = link, patience, client
        self.asked_at: float | None = None
        self._pinged = False  # since then
        self._unsent_bytes = 0  # at the last look
        self._postponed = False  # the last look: its own loop had been held up, and may not have read what has come
        self._look: asyncio.TimerHandle | None = None  # when the next one is taken
        self._look_at = 0.0
        self._finding: asyncio.Task[None] | None = None
        self._ended: set[asyncio.Task[None]] = set()  # searches that were cancelled and have not quite ended
        self.successor: asyncio.Future[Link] = self._loop.create_future()  # the connection that was found

    def expect_answer(self) -> None:
        """Something was asked: from now on silence counts, if it does not yet."""
        if self.asked_at is None and not self.successor.done():
            self._begin(self._loop.time())

    def heard(self, *, expecting: bool) -> None:
        """The server has said something; `expecting` if it still has something to answer."""
        now = self._loop.time()
        if self.asked_at is not None:
            self._patience.was_silent(now - self.asked_at, now=now)
        if self._finding is not None:
            self._finding.cancel()
            self._ended.add(self._finding)
            self._finding = None
        if expecting:
            self._begin(now)
        else:
            self.asked_at = None

    async def aclose(self) -> None:
        """The connection has ended, or has a successor: nothing more is looked for."""
        self.asked_at = None
        if self._look is not None:
            self._look.cancel()
        searches = [*self._ended, *([] if self._finding is None else [self._finding])]
        try:
            await cancel_and_wait(*searches)
        except BaseException:  # the client is being closed just now: nobody takes up what was found
            if self.successor.done() and not self.successor.cancelled() and self.successor.exception() is None:
                self.successor.result().abort()
            raise

    def _begin(self, now: float) -> None:
        self.asked_at, self._pinged = now, False
        if self._look is None:
            self._look_in(self._patience.silence() / 2)

    def _look_in(self, seconds: float) -> None:
        self._look_at = self._loop.time() + seconds
        self._look = self._loop.call_later(seconds, self._look_now)

    def _look_now(self) -> None:
        self._look = None
        if self.asked_at is None or self._finding is not None:
            return
        before = self._unsent_bytes
        self._unsent_bytes, held_back = self._link.queue()
        now = self._loop.time()
        late = now - self._look_at
        if held_back or self._unsent_bytes < before:
            self.asked_at = now
        elif late >= LATE:  # what was answered meanwhile has not been read yet
            self.asked_at = min(self.asked_at + late, now)
            if not self._postponed:  # else a loop that is always busy would never look
                self._postponed = True
                self._look_in(0.0)
                return
        self._postponed = False
        acknowledged = self._link.acknowledged
        silence = now - self.asked_at
        longest = self._patience.busy_silence(now=now) if acknowledged else self._patience.silence()
        if silence >= longest and (self._pinged or not acknowledged):
            busy_for = self._patience.silence(acknowledged=True) - silence if acknowledged else 0.0
            self._finding = asyncio.create_task(self._find_successor(busy_for), name="find a fresh connection")
            return
        if not self._pinged and silence >= longest / 2:
            self._pinged = True
            self._client.ask_ping()
        self._look_in(max((longest if self._pinged else longest / 2) - silence, longest / LOOKS))

    async def _find_successor(self, busy_for: float) -> None:
        """Find a fresh connection; while the server may be busy, for so long, only once it has answered another."""
        try:
            if busy_for > 0:
                with anyio.move_on_after(busy_for):
                    await anyio.sleep(self._patience.spread())
                    await self._client.probe()
            self.successor.set_result(await self._client.find_fresh_link())
        except Exception as error:  # noqa: BLE001 - a defect of ours, which is for whoever waits for a successor
            self.successor.set_exception(error)
        self._link.has_successor()


class Pinging(Protocol):
    """What a heartbeat needs of the client that it belongs to."""

    @property
    def met(self) -> bool:
        """Whether the store has been met, on any connection."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the server has welcomed us, so that it can be asked."""
        ...

    @property
    def has_watches(self) -> bool:
        """Whether any watch is open, and wants to hear how far the store has come."""
        ...

    def ask_ping(self) -> None:
        """Ask what any server answers at once."""
        ...


class Heartbeat:
    """The heartbeat of one connection, until `stop`.

    Args:
        link: The connection; it is closed if the server stays silent.
        client: Whose it is.
        heartbeats: How many of them a server that greets nobody is given.

    Attributes:
        began: When it began, on the loop's clock.
        heard_at: When the server last said something.
    """

    def __init__(self, link: Link, client: Pinging, heartbeats: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._link, self._client, self._heartbeats = link, client, heartbeats
        self.began: float = self._loop.time()
        self.heard_at: float = self.began
        self._asked_at: float | None = None
        self._pinged_at = self.heard_at
        self._held = 0  # bytes that we had to send, at the last look
        self._timer = self._loop.call_later(HEARTBEAT, self._look)

    def heard(self) -> None:
        """The server has said something."""
        self.heard_at = self._loop.time()

    def stop(self) -> None:
        """The connection is over."""
        self._timer.cancel()

    def _look(self) -> None:
        """Ask if it is time to, or hang up."""
        link, client, now = self._link, self._client, self._loop.time()
        assert link.transport is not None, "it was made before anybody listens to it"
        held_before, self._held = self._held, link.transport.get_write_buffer_size()
        if self._held != held_before:
            self.heard_at = now  # it takes what we send, which may be a large value over a slow network
        silence = now - self.heard_at
        if self._asked_at is not None and self._asked_at <= self.heard_at:
            self._asked_at = None
        asked_at = self._asked_at if client.connected else self.heard_at  # to come is to ask for a welcome
        unanswered = 0.0 if asked_at is None else now - asked_at
        # Where the system acknowledges, its server is busy, or stopped: another connection would not help it.
        patient = self._heartbeats if not client.connected else HEARTBEATS_OF_BUSY if link.acknowledged else 1.0
        if unanswered >= HEARTBEAT * patient and silence >= 2 * HEARTBEAT * patient:
            hint = "; if it speaks TLS, write tcps://" if link.mute and not client.met else ""
            link.farewell = f"it has been silent for {silence:.0f} s{hint}"
            link.abort()
            return
        # Watches want to hear how far the store has come, also while others keep the connection busy.
        stale = client.has_watches and now - self._pinged_at >= WATCHES_HEAR_EVERY
        if client.connected and self._asked_at is None and (silence >= HEARTBEAT or stale):
            self._asked_at = self._pinged_at = now
            client.ask_ping()
        self._timer = self._loop.call_later(HEARTBEAT, self._look)
