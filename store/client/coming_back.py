"""Shell: coming back to a store that was met before, by as many attempts as it takes (`attempts`).

While the server is silent on the first connection, `server_answers` asks on a second one whether it answers at all.
Where the other side's system acknowledges what it is sent, silence has two causes that look alike. The server is busy,
or stopped: then whoever comes back over a fresh connection stands last in its queue again, and keeps it busier still.
Or what acknowledges is not the server's system: a proxy or a tunnel behind which the connection has gone. A server that
greets, and answers a newcomer, has had time for what was asked before: then the first connection is of no more use.

The second connection has a session of its own, which ends with it, and belongs to no process: no lease depends on it.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import anyio

from store.client.attempts import Attempts
from store.client.link import Link
from store.errors import StoreError
from store.net.dialing import describe, use_small_packets
from store.net.tasks import cancel_and_wait
from store.protocol import wire
from store.protocol.connection import ClientConnection
from store.protocol.wire import Welcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from store.client.link import Owner
    from store.client.patience import Patience
    from store.net.dialing import Dial

__all__ = ["greeted_link", "server_answers"]


class _Attempt:
    """One attempt: its task ends once the server has spoken, with whether it has."""

    def __init__(self, dial: Dial, owner: Owner, patience: Patience) -> None:
        self._owner = owner
        self.link: Link | None = None
        self.task = asyncio.create_task(self._run(dial, patience), name="reconnect to a store")

    def _make_link(self) -> Link:
        """Called once the other side's system has answered, before any TLS."""
        self.link = Link(self._owner)
        return self.link

    async def _run(self, dial: Dial, patience: Patience) -> bool:
        began = asyncio.get_running_loop().time()
        await dial(self._make_link)
        patience.connected(asyncio.get_running_loop().time() - began)
        assert self.link is not None, "dialing has made it"
        return await self.link.hear()

    def problem(self) -> str:
        """Why it has failed, which has ended; empty if it has not."""
        try:
            heard = self.task.result()
        except (OSError, UnicodeError) as error:
            return describe(error)
        assert self.link is not None, "it was dialed"
        return "" if heard else self.link.reason()


async def _close(attempts: Iterable[_Attempt]) -> None:
    for one in attempts:
        if one.link is not None:
            one.link.abort()
    await cancel_and_wait(*[one.task for one in attempts])


async def greeted_link(dial: Dial, owner: Owner, patience: Patience, on_problem: Callable[[str], None]) -> Link:
    """Connect until a server speaks; the connection on which it did.

    Args:
        dial: How to connect.
        owner: The client that the connection is for.
        patience: How long to wait for what.
        on_problem: Told of each attempt that has failed, in words.

    Raises:
        TypeError: Or whatever else a defect in `dial` raises; errors of the network are problems to try again after.
    """
    loop, attempts = asyncio.get_running_loop(), Attempts(patience)
    going: dict[int, _Attempt] = {}
    try:
        while True:
            move = attempts.look(loop.time())
            for number in move.give_up:
                if going[number].link is None:
                    on_problem(describe(TimeoutError()))
                await _close([going.pop(number)])
            if move.begin is not None:
                use_small_packets(dial, move.small_packets)
                going[move.begin] = _Attempt(dial, owner, patience)
            within = max(move.until - loop.time(), 0.0)
            if going:
                tasks = [one.task for one in going.values()]
                await asyncio.wait(tasks, timeout=within, return_when=asyncio.FIRST_COMPLETED)
            else:
                await anyio.sleep(within)
            for number, one in list(going.items()):
                if one.link is not None:
                    attempts.was_taken(number)
                if one.task.done():
                    problem = one.problem()
                    del going[number]
                    if not problem:
                        assert one.link is not None, "it was heard on it"
                        return one.link
                    on_problem(problem)
                    attempts.has_failed(number, loop.time())
                    await _close([one])
    finally:
        await _close(going.values())


def _pass_over(_: str) -> None:
    """Say nothing of an attempt that has failed: there will be another one."""


class _Newcomer:
    """A client that says hello and farewell, and nothing between."""

    met = True  # whoever asks has met the store

    def __init__(self, token: bytes | None, name: str) -> None:
        self._connection = ClientConnection(session_id=secrets.token_bytes(16), token=token, name=name)
        self._connection.connected(nonce=secrets.token_bytes(16))
        self.welcomed = False

    def received(self, link: Link, data: bytes) -> None:
        """Bytes have come; called by the connection."""
        assert link.transport is not None
        try:
            for item in self._connection.receive(data):
                if isinstance(item, bytes):
                    link.write(item)
                elif isinstance(item, Welcome):
                    self.welcomed = True
                    link.write(wire.encode_bye("done"))
                    link.transport.close()
        except StoreError as error:  # it is full, say: nothing is known then
            link.farewell = str(error)
            link.abort()

    def may_write(self, link: Link, *, writable: bool) -> None:
        """Nothing is written that would fill a buffer."""


async def server_answers(dial: Dial, patience: Patience, *, token: bytes | None, name: str) -> None:
    """Return once the server has welcomed a newcomer; until then, try again and again.

    Raises:
        TypeError: Or whatever else a defect in `dial` raises.
    """
    tried = 0
    while True:
        newcomer = _Newcomer(token, name)
        link = await greeted_link(dial, newcomer, patience, _pass_over)
        try:
            link.take_up()
            await link.over
        finally:
            link.abort()
        if newcomer.welcomed:
            return
        await anyio.sleep(patience.pause(tried))
        tried += 1
