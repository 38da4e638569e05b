"""What one caller gives must never break the others: wrong arguments, keys that nobody can read."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

import rdzv
from rdzv import GiveUp, RendezvousClosedError, RendezvousSettingsError, RunGivenUpError
from rdzv.core import stored
from rdzv.core.state import Closed
from tests.support.runs import VirtualRun, assert_one_round, listen, rounds_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rdzv.node.handler import Handler

pytestmark = pytest.mark.virtual_time

CALLS: dict[str, Callable[[Handler], Awaitable[Any]]] = {
    "resize(max_nodes=4.0)": lambda it: it.resize(max_nodes=4.0),  # type: ignore[arg-type]
    "resize(min_nodes=True)": lambda it: it.resize(min_nodes=True),
    "resize(reason=None)": lambda it: it.resize(max_nodes=3, reason=None),  # type: ignore[arg-type]
    "drain(reason=None)": lambda it: it.drain(reason=None),  # type: ignore[arg-type]
    "drain(within=None)": lambda it: it.drain(within=None),  # type: ignore[arg-type]
    "drain(within=nan)": lambda it: it.drain(within=float("nan")),
    "set_closed(None)": lambda it: it.set_closed(None),  # type: ignore[arg-type]
    "set_closed(surrogate)": lambda it: it.set_closed("\ud800"),
    "ban(reason=None)": lambda it: it.ban("z", None),  # type: ignore[arg-type]
    "ban(now=1)": lambda it: it.ban("z", now=1),  # type: ignore[arg-type]
    "keep(data=text)": lambda it: it.keep("k", "text"),  # type: ignore[arg-type]
    "keep(key=3)": lambda it: it.keep(3, b""),  # type: ignore[arg-type]
    "keep(key=surrogate)": lambda it: it.keep("\ud800", b""),
    "restore(3)": lambda it: it.restore(3),  # type: ignore[arg-type]
    "accuse(1.0)": lambda it: it.accuse(1.0, "x"),  # type: ignore[arg-type]
    "accuse(why=None)": lambda it: it.accuse(1, None),  # type: ignore[arg-type]
    "accuse(why=bytes)": lambda it: it.accuse(1, b"x"),  # type: ignore[arg-type]
    "unban(reason=None)": lambda it: it.unban("z", None),  # type: ignore[arg-type]
    "ban_where(reason=7)": lambda it: it.ban_where("rack", "r1", 7),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_wrong_argument_is_refused_to_who_gave_it_and_nobody_else_hears_of_it(call: str) -> None:
    """Readers checked what writers did not: every follower of the run ended, and so did its status and history."""
    async with VirtualRun(min_nodes=2, max_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        assert_one_round(await run.meet(a, b))
        heard, before = await listen(run, b), run.keys("")
        with pytest.raises(RendezvousSettingsError):
            await CALLS[call](a)
        await asyncio.sleep(1)
        assert run.keys("") == before
        assert not heard.changes
        assert (await b.status()).closed is None
        assert_one_round(await run.meet(a, b))


@pytest.mark.parametrize("reason", [None, ValueError("no data"), b"no data", "\ud800"])
async def test_whatever_a_member_gives_up_with_the_run_is_given_up(reason: object) -> None:
    """An error instead of a text gave nothing up, or kept all others from hearing of it."""
    async with VirtualRun(min_nodes=2, max_nodes=2) as run:

        async def live(name: str) -> None:
            async for round in rounds_of(run.handler(name)):
                async with round:
                    if name == "a":
                        raise GiveUp(reason, status=7)
                    await asyncio.sleep(3600)

        ends = await asyncio.gather(live("a"), live("b"), return_exceptions=True)
        assert [type(end) for end in ends] == [GiveUp, RunGivenUpError]
        assert all(isinstance(end, GiveUp | RunGivenUpError) and end.status == 7 for end in ends)


@pytest.mark.parametrize(
    ("status", "usable"),
    [
        (0, 0),
        (1, 1),
        (255, 255),
        (256, 1),
        (-9, 137),
        (-127, 255),
        (-128, 1),
        (2**70, 1),
        ("7", 1),
        (None, 1),
        (1.5, 1),
    ],
)
@pytest.mark.parametrize("how", ["raise", "call"])
async def test_a_verdict_stands_whatever_its_exit_status_and_never_becomes_a_success(
    how: str, status: Any, usable: int
) -> None:
    """`GiveUp(status=256)` ended a failed run with 0, and one of another kind gave nothing up."""
    async with VirtualRun(min_nodes=2, max_nodes=2) as run:

        async def live(name: str) -> None:
            handler = run.handler(name)
            async for round in rounds_of(handler):
                async with round:
                    if name == "a" and how == "call":
                        await handler.give_up("no data", status=status)
                    elif name == "a":
                        raise GiveUp("no data", status=status)
                    await asyncio.sleep(3600)

        ends = await asyncio.gather(live("a"), live("b"), return_exceptions=True)
        assert [type(end) for end in ends] == [RunGivenUpError if how == "call" else GiveUp, RunGivenUpError]
        for end in ends:
            assert isinstance(end, GiveUp | RunGivenUpError)
            assert end.status == usable
            assert end.reason.startswith("no data")
            assert (end.reason == "no data") == (status == usable), "what was changed is said"


async def test_a_spare_of_a_run_that_is_given_up_does_not_end_with_success() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=1) as run:
        a, spare = run.handler("a"), run.handler("spare")
        await run.meet(a)
        waiting = await run.join(spare)
        await a.give_up("no data", status=7)
        with pytest.raises(RendezvousClosedError) as closed:
            await waiting
        assert (closed.value.given_up, closed.value.status) == (True, 7)


UNREADABLE = (
    "head/progress",
    "head/stop",
    "head/resized",
    "head/draining/a",
    "head/banned/z",
    "head/banned/with/rack=r1",
    "head/unbanned/z",
    "head/asked/q",
    "head/unknown",
    "nodes/stranger",
    "nodes//accused/a/b",
    "begun/a",
    "unfit/z",
    "history",
    "rounds/x",
)


@pytest.mark.parametrize("key", UNREADABLE)
async def test_a_key_that_nobody_can_read_is_named_and_passed_over(key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stored._warn.cache_clear()  # what another test has had said is not said again
    async with VirtualRun(min_nodes=2, max_nodes=2, rank_order="name") as run:
        a, b = run.handler("a"), run.handler("b")
        first = await run.meet(a, b)
        await run.clients["b"].put(f"/rdzv/job/{key}", b"\xff\xc1 not ours")
        await asyncio.sleep(5)
        for handler in (a, b, run.handler("observer", min_nodes=None, max_nodes=None)):
            assert len((await handler.status()).members) == 2
            await handler.history()
            assert not await handler.is_closed()
        again = await run.meet(a, b)
        assert_one_round(again)
        assert again[0].round == first[0].round + 1
        run.crash("a")
        await asyncio.sleep(20)
        assert_one_round(await run.meet(b, run.handler("c")))
        await b.set_closed("done")
        assert await b.is_closed()
    if key.startswith("head/") and key != "head/unknown":
        assert f"/rdzv/job/{key} is passed over" in caplog.text


async def test_a_closing_that_nobody_can_read_is_a_closing() -> None:
    async with VirtualRun(min_nodes=1, max_nodes=1) as run:
        a = run.handler("a")
        await a.next_rendezvous()
        heard = await listen(run, a)
        await run.clients["a"].put("/rdzv/job/head/closed", b"\xc1")
        await heard.until(Closed)
        await a.set_closed("done")
        assert await a.is_closed()
        with pytest.raises(rdzv.RendezvousClosedError):
            await a.next_rendezvous()


async def test_a_callback_that_raises_keeps_the_node_from_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The node had left, as far as it knew itself, and its record stood: a ghost, for which the others waited."""
    async with VirtualRun(min_nodes=1, max_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        info, _ = await run.meet(a, b)
        heard: list[str] = []
        nothing: dict[str, None] = {}
        for callback in (nothing.__getitem__, heard.remove, heard.append):
            info.on_superseded(callback)
        await a.leave()
        assert len(heard) == 1
        assert run.keys("nodes/") == ["b"]
        assert "a callback of a round has failed" in caplog.text
        assert_one_round(await run.meet(a, b))


async def test_a_run_among_the_keys_of_another_is_refused_and_no_phantom_there() -> None:
    """Its nodes were taken for nodes of the other run, which waited for them, and completed rounds with them."""
    async with VirtualRun(min_nodes=1, max_nodes=3) as run:
        a = run.handler("a")
        await a.next_rendezvous()
        for inside in ("/rdzv/job", "/rdzv/job/nodes", "/rdzv/job/head"):
            with pytest.raises(RendezvousSettingsError):
                await run.handler("b", prefix=inside).next_rendezvous()
        record = await run.clients["a"].get("/rdzv/job/nodes/a")
        assert record is not None
        await run.clients["a"].put("/rdzv/job/nodes/nodes/b", record.value)
        await asyncio.sleep(5)
        assert (await a.status()).waiting == ()
        assert await a.num_nodes_waiting() == 0
