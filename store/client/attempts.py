"""Shell: coming back to a store that was met before: short attempts, a few at a time, until one of them is greeted.

An attempt that nobody answers is given up after half a second: after a cut the next one passes at once, while the
system would repeat its first packet only after seconds. One that was taken by the other side's system is kept while
others are made, since a server that is busy greets in the order of coming: who gave up there and came again would
never get his turn, and keep the server busy with taking and losing connections. Those attempts become rarer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

from store.client.link import Link
from store.net.dialing import describe, use_small_packets
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from store.client.link import Owner
    from store.client.patience import Patience
    from store.net.dialing import Dial

__all__ = ["greeted_link"]

KEPT_MOST = 4  # attempts that were taken and have heard nothing; beyond, the oldest makes room


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


async def _close(attempts: list[_Attempt]) -> None:
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
    attempts: list[_Attempt] = []
    winner: _Attempt | None = None
    failed = 0
    try:
        while True:
            use_small_packets(dial, patience.large_packets_seem_lost(len(attempts)))
            newest = _Attempt(dial, owner, patience)
            attempts.append(newest)
            within = patience.attempt(len(attempts) - 1)
            await asyncio.wait([one.task for one in attempts], timeout=within, return_when=asyncio.FIRST_COMPLETED)
            for one in [one for one in attempts if one.task.done()]:
                problem = _problem_of(one)
                if not problem:
                    winner = one
                    assert winner.link is not None
                    return winner.link
                on_problem(problem)
                attempts.remove(one)
                await _close([one])
            if newest.task.done():
                await anyio.sleep(patience.pause(failed))  # it was refused: at once would be too soon
                failed += 1
            elif newest.link is None:  # no answer, not even from a system: the next may pass
                on_problem(describe(TimeoutError()))
                attempts.remove(newest)
                await _close([newest])
            elif len(attempts) > KEPT_MOST:
                await _close([attempts.pop(0)])
    finally:
        await _close([one for one in attempts if one is not winner])


def _problem_of(attempt: _Attempt) -> str:
    """Why an attempt that has ended has failed; empty if it has not."""
    try:
        heard = attempt.task.result()
    except (OSError, UnicodeError) as error:
        return describe(error)
    assert attempt.link is not None, "it was dialed"
    return "" if heard else attempt.link.reason()
