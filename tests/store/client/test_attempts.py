"""Coming back to a store: an attempt that nobody answers is followed by another, one that was taken is kept."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from store.client.attempts import KEPT_MOST
from store.client.coming_back import greeted_link
from store.client.patience import ATTEMPT, Patience

if TYPE_CHECKING:
    from store.client.link import Link

pytestmark = pytest.mark.virtual_time


class Owner:
    """A client that has met its store."""

    met = True

    def received(self, link: Link, data: bytes) -> None:  # noqa: ARG002
        raise AssertionError("nobody has taken the connection up")

    def may_write(self, link: Link, *, writable: bool) -> None:  # noqa: ARG002
        raise AssertionError("nobody has written")


class Transport(asyncio.Transport):
    """A connection whose other end says nothing by itself."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002 - there is no socket
        return default

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            asyncio.get_running_loop().call_soon(self.link.connection_lost, None)


class Network:
    """Answers each attempt as it is told to: "silent", "taken", "speaks", "hangs up", or with an error."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.times: list[float] = []
        self.taken: list[Transport] = []
        self.problems: list[str] = []
        self.given_up = 0

    async def dial(self, factory: Any) -> Any:
        self.times.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer == "silent":
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.given_up += 1
        link = factory()
        transport = Transport(link)
        self.taken.append(transport)
        link.connection_made(transport)
        if answer == "speaks":
            link.data_received(b"hello")
        elif answer == "hangs up":
            link.connection_lost(ConnectionResetError())
        return transport, link

    async def come_back(self) -> Link:
        patience = Patience(random.Random(1))
        patience.connected(0.001)
        return await greeted_link(self.dial, Owner(), patience, self.problems.append)


async def test_the_connection_on_which_the_server_speaks_is_given() -> None:
    network = Network("speaks")
    link = await network.come_back()
    assert link.heard
    assert link.transport is network.taken[0]
    assert not network.taken[0].aborted


async def test_an_attempt_that_nobody_answers_is_given_up_after_half_a_second() -> None:
    network = Network("silent", "silent", "speaks")
    await network.come_back()
    assert [time - network.times[0] for time in network.times] == pytest.approx([0, ATTEMPT, 2 * ATTEMPT])
    assert network.given_up == 2
    assert network.problems == ["it does not answer"] * 2


async def test_what_was_taken_is_kept_beside_others_that_become_rarer() -> None:
    network = Network("taken", "taken", "taken", "taken")
    coming = asyncio.create_task(network.come_back())
    await asyncio.sleep(4.0)
    assert [time - network.times[0] for time in network.times] == pytest.approx([0, 0.5, 1.5, 3.5])
    assert not any(transport.aborted for transport in network.taken)
    network.taken[0].link.data_received(b"hello, at last")
    assert await coming is network.taken[0].link
    assert [transport.aborted for transport in network.taken] == [False, True, True, True]


async def test_no_more_are_kept_than_help() -> None:
    network = Network(*["taken"] * (KEPT_MOST + 2))
    coming = asyncio.create_task(network.come_back())
    await asyncio.sleep(14.0)  # they are made 0.5, 1, 2, 4, 5 and 5 s apart
    assert len(network.taken) == KEPT_MOST + 2
    assert [transport.aborted for transport in network.taken][:2] == [True, False], "the oldest made way"
    coming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coming
    assert all(transport.aborted for transport in network.taken), "and nothing is left open"


async def test_what_fails_is_told_and_tried_again_after_a_pause() -> None:
    network = Network(ConnectionRefusedError(), "hangs up", OSError("No route to host"), "speaks")
    await network.come_back()
    assert network.problems == ["nobody listens there", "it closed the connection", "No route to host"]
    assert len(set(network.times)) == 4


async def test_a_defect_of_ours_is_not_tried_again() -> None:
    network = Network("taken", TypeError("a defect"))
    with pytest.raises(TypeError, match="a defect"):
        await network.come_back()
    assert network.taken[0].aborted
