"""Bad input from one caller does not break the other nodes: wrong arguments, and keys that cannot be read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import pytest

import rdzv
from rdzv import GiveUp, RendezvousClosedError, RendezvousSettingsError, RunGivenUpError
from rdzv.config.settings import parse
from rdzv.core import stored
from rdzv.core.state import Closed
from tests.support.runs import VirtualRun, assert_one_round, listen, rounds_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rdzv.node.handler import Handler

pytestmark = [pytest.mark.virtual_time, pytest.mark.some_here(16)]


async def leave_because(handler: Handler, text: str) -> None:
    handler.leaves_because(text)
    await handler.leave()


CALLS: dict[str, Callable[[Handler], Awaitable[Any]]] = {
    "resize(max_nodes=4.0)": lambda it: it.resize(max_nodes=4.0),  # type: ignore[arg-type]
    "resize(min_nodes=True)": lambda it: it.resize(min_nodes=True),
    "resize(reason=None)": lambda it: it.resize(max_nodes=3, reason=None),  # type: ignore[arg-type]
    "drain(reason=None)": lambda it: it.drain(reason=None),  # type: ignore[arg-type]
    "drain(within=None)": lambda it: it.drain(within=None),  # type: ignore[arg-type]
    "drain(within=nan)": lambda it: it.drain(within=float("nan")),
    "set_closed(None)": lambda it: it.set_closed(None),  # type: ignore[arg-type]
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
    "leaves_because(bytes)": lambda it: leave_because(it, b"x"),  # type: ignore[arg-type]
    "ban(where, reason=7)": lambda it: it.ban(reason=7, where=("rack", "r1")),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_wrong_argument_is_an_error_for_its_caller_and_does_not_reach_other_nodes(call: str) -> None:
    """Regression: only readers validated it, so every follower of the run ended, as did its status and history."""
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


ODD_TEXTS = ("", "\N{PILE OF POO}" * 24, "\ud800 and \udcff", "\x1b[2J\n\x00", "x" * 1_000_000)


PROSE: dict[str, Callable[[Handler, str], Awaitable[Any]]] = {
    "drain": lambda it, text: it.drain(reason=text),
    "resize": lambda it, text: it.resize(max_nodes=3, reason=text),
    "ban": lambda it, text: it.ban("z", text),
    "ban(where)": lambda it, text: it.ban(reason=text, where=("rack", "r1")),
    "unban": lambda it, text: it.unban("z", text),
    "accuse": lambda it, text: it.accuse(1, text),
    "leaves_because": leave_because,
    "set_closed": lambda it, text: it.set_closed(text),
    "give_up": lambda it, text: it.give_up(text),
}


@pytest.mark.parametrize("text", ODD_TEXTS, ids=["empty", "4-byte characters", "surrogates", "control", "1 MB"])
@pytest.mark.parametrize("call", PROSE)
async def test_a_call_works_with_any_text_that_a_user_gives(call: str, text: str) -> None:
    """Regression: a reason that UTF-8 cannot encode left the record of a departed member in place."""
    async with VirtualRun(min_nodes=2, max_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        await run.meet(a, b)
        if call == "unban":
            await a.ban("z", "to be lifted")
        await PROSE[call](a, text)
        await asyncio.sleep(1)
        if call in {"set_closed", "give_up"}:
            with pytest.raises(rdzv.RendezvousClosedError):
                await b.next_rendezvous()
        elif call == "drain":
            assert list((await b.status()).draining) == ["a"]
        else:
            assert (run.keys("nodes/") == ["b"]) == (call == "leaves_because")
            assert_one_round(await run.meet(a, b))


@pytest.mark.parametrize("text", ODD_TEXTS, ids=["empty", "4-byte characters", "surrogates", "control", "1 MB"])
async def test_no_label_of_a_busy_member_makes_it_lose_its_lease(text: str) -> None:
    """Regression: each keep-alive carried the label, and failed: the healthy member was dropped."""
    async with VirtualRun(min_nodes=2, max_nodes=2, ttl=3, stall_timeout=5) as run:
        busy: list[str] = []

        async def live(name: str) -> None:
            async for round in rounds_of(run.handler(name)):
                async with round, contextlib.AsyncExitStack() as stack:
                    round.beat(1)
                    if name == "a":
                        await stack.enter_async_context(round.busy(60, text))
                    await asyncio.sleep(20)
                    busy.append(name)
                    await run.clients[name].put("/done", b"")
                return

        await asyncio.gather(live("a"), live("b"))
        assert sorted(busy) == ["a", "b"]


@pytest.mark.parametrize("label", [b"bytes", None, 7])
async def test_a_label_that_is_no_text_is_refused_where_it_is_given(label: Any) -> None:
    async with VirtualRun(min_nodes=1) as run:
        async for round in rounds_of(run.handler("a")):
            async with round:
                with pytest.raises(RendezvousSettingsError, match=r"^what=.* must be text"):
                    round.busy(60, label).__enter__()
                break


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1, "soon", None])
async def test_a_busy_time_that_is_no_duration_is_refused_where_it_is_given(seconds: Any) -> None:
    """Regression: without a number as its end (NaN), the member was judged as if it were not busy."""
    async with VirtualRun(min_nodes=1) as run:
        async for round in rounds_of(run.handler("a")):
            async with round:
                with pytest.raises(RendezvousSettingsError, match=r"^seconds=.* must be a number of seconds"):
                    round.busy(seconds)
                break


async def test_a_lease_is_renewed_also_if_its_note_cannot_be_made() -> None:
    async with VirtualRun(min_nodes=1, ttl=3) as run:
        a = run.handler("a")
        await a.next_rendezvous()
        membership = a.node.membership
        assert membership is not None
        membership.beats.counts = True
        membership.beats.current_note = lambda **_: 1 / 0  # type: ignore[method-assign,assignment]
        await asyncio.sleep(30)
        assert membership.over is None


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["order", "choose"])
async def test_any_error_of_a_rank_order_is_in_the_reason_and_no_node_ends(
    error: type[BaseException], where: str
) -> None:
    """Regression: KeyboardInterrupt, and SystemExit in `choose`, ended the thread of all nodes of the process."""
    may_order = False

    class Order:
        def __call__(self, arrivals: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
            if not may_order and where == "order":
                raise error
            return arrivals

        def choose(self, candidates: Sequence[Any], _: Sequence[Any], count: int) -> Sequence[Any]:
            if not may_order and where == "choose":
                raise error
            return candidates[:count]

    async with VirtualRun(min_nodes=1, max_nodes=2, last_call_timeout=1) as run, run.looked_at() as seen:
        nodes = [run.handler(name, rank_order=Order()) for name in "abc"]
        meets = [run.start(node.next_rendezvous()) for node in nodes]
        await asyncio.sleep(5)
        assert f"rank_order fails with {error.__name__}" in (await seen.status()).reason
        may_order = True
        await asyncio.wait(meets, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(5)
        assert sorted(meet.done() for meet in meets) == [False, True, True]


@pytest.mark.parametrize(
    "verdict", ["\ud800", "\N{PILE OF POO}" * 1000, b"bytes", SystemExit(3), GeneratorExit(), asyncio.CancelledError()]
)
async def test_any_failure_of_a_health_check_only_keeps_its_node_out(verdict: object) -> None:
    def check() -> object:
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict

    async with VirtualRun(min_nodes=1) as run:
        with pytest.raises(rdzv.RendezvousError, match="failed its health check"):
            await run.handler("a", health_check=check).next_rendezvous()
        await run.handler("b").next_rendezvous()
        assert [one.node_id for one in (await run.handler("c").status()).members] == ["b"]


@pytest.mark.parametrize("error", [LookupError, SystemExit])
async def test_an_order_that_cannot_choose_among_waiting_nodes_does_not_end_the_nodes_thread(
    error: type[BaseException],
) -> None:
    class Order:
        def __call__(self, records: Any, *_: object) -> Any:
            return records

        def choose(self, *_: object) -> Any:
            raise error("no topology")

    async with VirtualRun(min_nodes=1, max_nodes=2, rank_order=Order()) as run:
        (a,) = await run.met("a")
        for name in "bc":
            await run.join(run.handler(name))
        await asyncio.sleep(3)
        assert sorted((await a.status()).waiting) == ["b", "c"]


@pytest.mark.parametrize(
    "odd",
    [
        {"node_id": "\ud800"},
        {"attributes": {"rack": "\ud800"}},
        {"attributes": {"\ud800": "r"}},
        {"payload": {"\ud800": 1}},
    ],
)
async def test_a_name_that_utf8_cannot_encode_is_refused_before_a_node_joins(odd: dict[str, Any]) -> None:
    with pytest.raises(RendezvousSettingsError):
        parse("tcp://127.0.0.1/job?min_nodes=1", odd, {})
    with pytest.raises(RendezvousSettingsError):
        parse("tcp://127.0.0.1/\ud800?min_nodes=1", {}, {})


async def test_accuse_and_keep_of_a_round_that_is_over_have_no_effect() -> None:
    """Regression: two late watchdogs of an earlier round removed a healthy member from the current one."""
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=0.1) as run:
        earlier: dict[str, rdzv.Round] = {}
        checked: list[str] = []

        async def live(name: str) -> None:
            async for round in rounds_of(run.handler(name)):
                async with round:
                    for step in range(1_000_000 if round.number == 0 else 0):
                        await round.check(step)
                        await asyncio.sleep(0.1)
                    if (old := earlier.get(name)) is not None:
                        await round.keep("path", b"new")
                        for act in (old.keep("path", b"old"), old.accuse((old.rank + 1) % 2, "it does not answer")):
                            with pytest.raises(rdzv.RoundSupersededError):
                                await act
                        checked.append(name)
                    await round.store.barrier("done", 3)
                    await asyncio.sleep(5)
                    assert await round.restore("path") == b"new"
                if round.number == 0:
                    await round.keep("path", b"between the rounds it still is this node's own")
                    if name == "a":
                        await round.accuse((round.rank + 1) % 2, "it has not answered in its last step")
                    earlier[name] = round

        async def come_later() -> None:
            await asyncio.sleep(3)
            await live("c")

        await asyncio.gather(live("a"), live("b"), come_later())
        assert sorted(checked) == ["a", "b"]


@pytest.mark.parametrize("after", [0, 0.001, 0.01])
async def test_a_cancelled_leave_does_not_disturb_the_next_round(after: float) -> None:
    """Regression: the next call found the record that was still being withdrawn, and raised an AssertionError."""
    async with VirtualRun(min_nodes=2, max_nodes=2) as run:
        a, b = run.handler("a"), run.handler("b")
        await run.meet(a, b)
        leaving = asyncio.create_task(a.leave())
        await asyncio.sleep(after)
        leaving.cancel()
        assert_one_round(await run.meet(a, b))
        with contextlib.suppress(asyncio.CancelledError):
            await leaving


async def test_all_here_counts_each_member_once() -> None:
    """Regression: a call cancelled and repeated counted twice, and the others went on without the last member."""
    async with VirtualRun(min_nodes=3, max_nodes=3) as run:
        handlers = [run.handler(name) for name in "abc"]
        await run.meet(*handlers)
        a, b, c = handlers
        for patience in (0.0, 0.001, 0.01, 1.0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await a.all_here(timeout=60)
        waiting = asyncio.gather(a.all_here(timeout=60), b.all_here(timeout=60))
        await asyncio.sleep(5)
        assert not waiting.done(), "c has not come"
        assert await c.all_here(timeout=60)
        assert all(await waiting)


@pytest.mark.parametrize("reason", [None, ValueError("no data"), b"no data", "\ud800"])
async def test_a_run_is_given_up_with_any_reason(reason: object) -> None:
    """Regression: with an error in place of a text, the run was not given up, or the others were not told."""
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
async def test_a_verdict_with_an_invalid_exit_status_still_gives_the_run_up_as_a_failure(
    how: str, status: Any, usable: int
) -> None:
    """Regression: `GiveUp(status=256)` ended a failed run with 0, and a status of another type gave nothing up."""
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
            assert (end.reason == "no data") == (status == usable), "the change is logged"


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
    "head/hosted/z",
    "head/unknown",
    "nodes/stranger",
    "nodes//accused/a/b",
    "begun/a",
    "unfit/z",
    "history",
    "rounds/x",
)


@pytest.mark.parametrize("key", UNREADABLE)
async def test_an_unreadable_key_is_named_in_the_log_and_ignored(key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stored._warn_once.cache_clear()  # a warning is logged once per process, and another test may have caused it
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


async def test_an_unreadable_closed_key_closes_the_run() -> None:
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


async def test_a_callback_that_raises_does_not_disturb_the_node(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the node believed that it had left, but its record was still there, and the others waited for it."""
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


async def test_a_run_under_the_keys_of_another_is_refused_and_adds_no_nodes_to_it() -> None:
    """Regression: its nodes counted as nodes of the other run, which waited for them and completed rounds with them."""
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
