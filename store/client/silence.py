"""Shell: has the pulse of one connection taken in time, and looks for a fresh one beside it once it is silent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import anyio

from store.client.pulse import Line, Pulse, Say
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from store.client.link import Link
    from store.client.patience import Patience

__all__ = ["Seeking", "Silence"]


class Seeking(Protocol):
    """What watching over a connection needs of the client that it belongs to."""

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
        """Ask what any server answers at once, if it can be asked now."""
        ...

    async def find_fresh_link(self) -> Link:
        """Give a fresh connection."""
        ...

    async def probe(self) -> None:
        """Return once the server has answered somebody who asks now."""
        ...


class Silence:
    """Watches over one connection, until `stop`.

    Args:
        link: The connection; it is closed if the server stays silent.
        patience: How long that may be.
        client: Whose connection it is.
        heartbeats: See `Pulse`.

    Attributes:
        pulse: What is known of it.
        successor: The connection that was found in its place.
    """

    def __init__(self, link: Link, patience: Patience, client: Seeking, heartbeats: float = 1.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._link, self._patience, self._client = link, patience, client
        self.pulse: Pulse = Pulse(patience, self._loop.time(), heartbeats=heartbeats)
        self._timer: asyncio.TimerHandle | None = None  # for the next look ...
        self._look_due = 0.0  # ... at this time; a handle of uvloop's does not say so of what is due at once
        self._finding: asyncio.Task[None] | None = None
        self._ended: set[asyncio.Task[None]] = set()  # searches that were cancelled and have not quite ended
        self.successor: asyncio.Future[Link] = self._loop.create_future()
        self._stopped = self._looks_soon = False
        self._look_at(self.pulse.look(self.pulse.began, Line()).until)

    def expect_answer(self) -> None:
        """Something was asked: from now on silence counts, if it does not yet."""
        if self.pulse.asked_at is None and not self.successor.done():
            self.pulse.expect(self._loop.time())
            self._look_soon()

    def heard(self, *, expecting: bool) -> None:
        """The server has said something; `expecting` if it still has something to answer."""
        self.pulse.heard(self._loop.time(), expecting=expecting)
        if self.pulse.asked_at is not None:
            self._look_soon()
        if self._finding is not None:
            self._finding.cancel()
            self._ended.add(self._finding)
            self._finding = None

    def stop(self) -> None:
        """The connection is over: look no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def aclose(self) -> None:
        """The connection has ended, or has a successor: nothing more is looked for."""
        self.stop()
        searches = [*self._ended, *([] if self._finding is None else [self._finding])]
        try:
            await cancel_and_wait(*searches)
        except BaseException:  # the client is being closed just now: nobody takes up what was found
            if self.successor.done() and not self.successor.cancelled() and self.successor.exception() is None:
                self.successor.result().abort()
            raise

    def _look_soon(self) -> None:
        """Look in time for what was asked. A look that is of no use costs less than a timer for each request."""
        if not self._looks_soon:
            self._looks_soon = True
            self._look_at(self._loop.time() + self.pulse.first_look_in())

    def _look_at(self, at: float) -> None:
        if self._stopped or (self._timer is not None and self._look_due <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._look_due, self._timer = at, self._loop.call_at(at, self._look)

    def _look(self) -> None:
        link, client, now = self._link, self._client, self._loop.time()
        assert self._timer is not None, "this look was due"
        late, self._timer, self._looks_soon = now - self._look_due, None, False
        unsent_bytes, held_back = link.queue()
        verdict = self.pulse.look(
            now,
            Line(
                unsent_bytes=unsent_bytes,
                held_back=held_back,
                acknowledged=link.acknowledged,
                greeted=client.connected,
                has_watches=client.has_watches,
            ),
            late=late,
        )
        match verdict.say:
            case Say.PING:
                client.ask_ping()
            case Say.SEEK:
                name = "find a fresh connection"
                self._finding = asyncio.create_task(self._find_successor(verdict.busy_for), name=name)
            case Say.HANG_UP:
                hint = "; if it speaks TLS, write tcps://" if link.mute and not client.met else ""
                link.farewell = f"it has been silent for {now - self.pulse.heard_at:.0f} s{hint}"
                link.abort()
                return
            case Say.NOTHING:
                pass
        self._look_at(verdict.until)
        self._looks_soon = self.pulse.asked_at is not None and not self.pulse.seeking

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
