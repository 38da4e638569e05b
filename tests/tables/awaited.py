"""The awaited cells, in virtual time, and the probe after each: are the other nodes unharmed?"""

import asyncio
import contextlib
import functools
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any

from rdzv.errors import RendezvousClosedError, RendezvousError
from store import Limits, StoreError, recipes
from tests.support.runs import HookedClient, VirtualRun, assert_one_round, rounds_of
from tests.tables.calls import DOCUMENTED, WITHIN
from tests.tables.cells import OF_A_ROUND, TEXTS, Cell

__all__ = ["Enough", "judged", "judging", "play", "undoes"]

LATE = 0.5  # seconds after its time limit by which a call must have ended
TO_UNDO = 2.0  # seconds that undoing a call, or leaving a block, may take, according to their documentation
PATIENT = 60.0  # seconds for a round of the other nodes: longer than a lease
AWAY = 1.0  # seconds until a store in the state "back" is started again
GONE = 130.0  # seconds after which the server has dropped all that has no keeper
# the probe's session and connection; the run's lease
MOST_LEFT = {"sessions": 1, "watches": 0, "waits": 0, "connections": 1, "leases": 1}
PROSE_MOST = 1000  # characters of an error


class Enough(Exception):
    """Ends the body of a round."""


class BriefRun(VirtualRun):
    """A run whose clients have the time limit `WITHIN`."""

    def client(self, source: str, connect_timeout: float = WITHIN) -> HookedClient:
        client = super().client(source, connect_timeout)
        client.timeout = WITHIN
        return client


class Stage:
    """Two nodes, a and b, in a round, and the object that a cell is about.

    Attributes:
        run: The run.
        b: The other node.
        it: The object.
        context: The object's own context, entered before its time is over.
        faults: The defects that were found, in words.
    """

    def __init__(self, run: VirtualRun, cell: Cell) -> None:
        self.run, self.cell = run, cell
        self.faults: list[str] = []
        self.a, self.b = run.handler("a"), run.handler("b", join_timeout=PATIENT)
        self.it: Any = None
        self.infos: list[Any] = []

    @contextlib.asynccontextmanager
    async def set_up(self) -> AsyncIterator[contextlib.AsyncExitStack]:
        """Make the object, and bring it to its state; yield what ends it."""
        of = self.cell.call.of
        async with contextlib.AsyncExitStack() as stack:
            if of == "round":
                await self._of_rounds(stack)
            elif of in OF_A_ROUND:
                await self._of_handler(stack)
            else:
                self.infos = await self.run.meet(self.a, self.b)
                await self._of_client(stack)
                if self.cell.when == "object over":
                    await stack.aclose()
            yield stack

    async def _upset_round(self) -> None:
        if self.cell.when == "member lost":
            self.run.crash("b")
            await asyncio.sleep(1)
        elif self.cell.when == "run over":
            await self.b.set_closed("done")

    async def _of_handler(self, stack: contextlib.AsyncExitStack) -> None:
        of, when, a = self.cell.call.of, self.cell.when, self.a
        if of == "handler" and when == "before":
            self.it = a
            self.infos = await self.run.meet(self.b, self.run.handler("c"))
            return
        self.infos = await self.run.meet(a, self.b)
        stack.push_async_callback(a.aclose)
        self.it = {"handler": a, "info": self.infos[0], "shared": self.infos[0].store, "changes": a.changes()}[of]
        if of == "shared":
            self.it.set_timeout(WITHIN)
        if of == "changes" and when != "before":
            await stack.enter_async_context(self.it)
        await self._upset_round()
        if when == "round over":
            self.infos = await self.run.meet(a, self.b)
        elif when == "object over":
            await stack.aclose()

    async def _of_rounds(self, stack: contextlib.AsyncExitStack) -> None:
        given = rounds_of(self.a)
        stack.push_async_callback(given.aclose)
        joined = asyncio.create_task(self.b.next_rendezvous())
        self.it = await anext(given)
        self.infos = [await joined]
        when, over = self.cell.when, asyncio.Event()
        if when == "before":
            return
        if when == "during":
            await stack.enter_async_context(self.it)
            return

        async def body() -> None:
            with judging(self.faults, self.cell.call.of, "leaving the round"), contextlib.suppress(Enough):
                async with self.it:
                    await over.wait()
                    raise Enough

        task = self.run.start(body())  # else the end of the round would cancel the call
        stack.push_async_callback(asyncio.wait, [task])
        stack.callback(over.set)
        await self._upset_round()
        if when == "object over":
            over.set()
            await asyncio.wait([task])
        elif when == "round over":
            joined = asyncio.create_task(self.b.next_rendezvous())
            await asyncio.wait([task])
            await anext(given)
            self.infos = [await joined]

    async def _of_client(self, stack: contextlib.AsyncExitStack) -> None:
        of, is_before = self.cell.call.of, self.cell.when == "before"
        client: Any = self.run.client("client", WITHIN)
        self.it = client
        if not (of in {"client", "recipes"} and is_before):
            await stack.enter_async_context(client)
        if of == "recipes":
            wrapped = {name: functools.partial(getattr(recipes, name), client) for name in recipes.__all__[1:]}
            self.it = types.SimpleNamespace(**wrapped)
        if of == "lease":
            self.it = await client.grant(40)
            if self.cell.when == "object over":
                await self.it.revoke()
        if of == "watch":
            self.it = client.watch("/rdzv")
            if not is_before:
                await stack.enter_async_context(self.it)
        if of == "kept":
            self.it = await stack.enter_async_context(client.kept_lease(40))

    async def upset_store(self) -> None:
        """Bring the store to the cell's state."""
        match self.cell.store:
            case "away":
                self.run.kill_store()
            case "silent":
                assert self.run.machine.host is not None
                self.run.machine.host.pause()
            case "replaced":
                self.run.kill_store()
                self.run.restart_store()
                await asyncio.sleep(AWAY)
            case "back":
                self.run.kill_store()
                asyncio.get_running_loop().call_later(AWAY, self.run.restart_store)

    async def mend_store(self) -> None:
        """Start the store again, or resume it."""
        if not self.run.machine.is_up:
            await asyncio.sleep(AWAY)
        if not self.run.machine.is_up:
            self.run.restart_store()
        assert self.run.machine.host is not None
        self.run.machine.host.resume()
        await asyncio.sleep(AWAY)


async def play(cell: Cell) -> list[str]:
    """Play one cell. Return the defects."""
    settings: dict[str, Any] = {"min_nodes": 2, "max_nodes": 3, "ttl": 40, "last_call_timeout": 0.1}
    settings |= {"join_timeout": WITHIN, "close_timeout": WITHIN, "limits": Limits(session_ttl=30)}
    async with BriefRun(durable=cell.store != "replaced", **settings) as run:
        stage = Stage(run, cell)
        await _in_context(stage)
        await stage.mend_store()
        await _probe(stage)
    return stage.faults


async def _in_context(stage: Stage) -> None:
    """Make the call in the object's context, then leave the context. Both may raise documented errors."""
    cell = stage.cell
    if cell.manner == "left elsewhere":
        left = stage.set_up()
        await asyncio.create_task(left.__aenter__())
        await stage.upset_store()
        await _act(stage)
        with judging(stage.faults, stage.cell.call.of, "leaving the object's block"):
            raised = Enough() if cell.call.of == "round" and cell.when == "during" else None
            with contextlib.suppress(Enough):
                await asyncio.create_task(left.__aexit__(type(raised) if raised else None, raised, None))
        return
    with judging(stage.faults, stage.cell.call.of, "leaving the object's block"), contextlib.suppress(Enough):
        async with stage.set_up() as stack:
            await stage.upset_store()
            await _in_manner(stage)
            if cell.call.of == "round" and cell.when == "during":
                stack.push_async_exit(_leave_body)


async def _leave_body(*_: object) -> None:
    raise Enough


async def _in_manner(stage: Stage) -> None:
    match stage.cell.manner:
        case "once":
            await _act(stage)
        case "cancelled before":
            for pause in (0.0, 0.0011, 0.5):
                task = asyncio.create_task(_act(stage))
                await asyncio.sleep(pause)
                began = asyncio.get_running_loop().time()
                task.cancel()
                await asyncio.wait([task])
                most = WITHIN if stage.cell.call.name == "aclose" else TO_UNDO  # cancelling `aclose` waits for its end
                if (took := asyncio.get_running_loop().time() - began) > most + LATE:
                    stage.faults.append(f"its cancellation took {took:.1f} s")
            await _act(stage)
        case "twice":
            await asyncio.gather(_act(stage), _act(stage))
        case "second task":
            await asyncio.create_task(_act(stage))
        case "nested group":
            async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
                inner.create_task(_act(stage))
                outer.create_task(_act(stage))


async def _act(stage: Stage) -> None:
    """Make the call, and await its end. Add to the faults if it raises an undocumented error, or is late."""
    call, loop = stage.cell.call, asyncio.get_running_loop()
    began = loop.time()
    with judging(stage.faults, stage.cell.call.of, "the call"):
        limit = asyncio.timeout(WITHIN if call.open_ended else None)
        try:
            async with limit:
                await _to_its_end(
                    call.act(stage.it, TEXTS[stage.cell.text]), apart=stage.cell.manner == "left elsewhere"
                )
        except TimeoutError:
            if not limit.expired():
                raise
    gives_back = undoes(call.name) or stage.cell.manner == "cancelled before"  # the next call waits for that
    most = WITHIN + LATE + (TO_UNDO if gives_back else 0.0)
    if (took := loop.time() - began) > most:
        stage.faults.append(f"the call took {took:.1f} s, with a limit of {WITHIN:g} s")


def undoes(name: str) -> bool:
    """Return True if a call, or leaving its block, returns something to the store. Such a call has two more seconds."""
    locks = {"kept_lease", "lock", "write_lock", "read_lock", "leadership"}
    return name in {"aclose", "close", "leave", "all_here"} | locks


async def _to_its_end(given: Any, *, apart: bool) -> None:
    """Await the result of a call, enter and leave it, or take one item of it."""
    if isinstance(given, tuple) or not hasattr(type(given), "__aenter__"):
        if hasattr(given, "__anext__"):
            try:
                with contextlib.suppress(StopAsyncIteration):
                    await anext(given)
            finally:
                await given.aclose()
        elif hasattr(given, "__await__"):
            await given
        return
    if apart:
        await asyncio.create_task(given.__aenter__())
        await asyncio.create_task(given.__aexit__(None, None, None))
        return
    async with given:
        pass


@contextlib.contextmanager
def judging(faults: list[str], of: str, what: str) -> Iterator[None]:
    """Add an error of the block to the faults, unless it is documented for this object."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  all errors are judged
        if (fault := judged(error, DOCUMENTED[of])) is not None:
            faults.append(f"{what} raised {fault}")


def judged(error: BaseException, documented: tuple[type[BaseException], ...]) -> str | None:
    """Return the defect of an error; None if it is documented and its text is one sentence."""
    said = f"{type(error).__name__}: {str(error)[:300]!a}"
    if isinstance(error, ExceptionGroup | UnicodeError) or not isinstance(error, documented):
        return said
    if not str(error) or "\n" in str(error) or len(str(error)) > PROSE_MOST:
        return f"no sentence: {said}"
    try:
        str(error).encode()
    except UnicodeEncodeError:
        return f"no text that can be printed: {said}"
    return None


async def _probe(stage: Stage) -> None:
    """Check that the other nodes are still members and can meet again, and that nothing is left in the store."""
    run, cell = stage.run, stage.cell
    is_healthy = cell.store != "replaced" and cell.when not in {"run over", "member lost"} and not cell.call.ends
    for info in stage.infos:
        if is_healthy and info.node_id == "b" and (why := info.superseded()) is not None:
            stage.faults.append(f"{info.node_id} is out of its round: {why}")
    for handler in [*run._handlers.values()]:
        if handler is not stage.b or cell.store == "replaced":
            await handler.aclose()
    others = [run.handler(name, join_timeout=PATIENT) for name in ("d", "e")]
    if cell.store != "replaced" and cell.when != "member lost":
        others[0] = stage.b
    try:
        async with asyncio.timeout(PATIENT + LATE):
            assert_one_round(await run.meet(*others))
    except RendezvousClosedError:
        if cell.when != "run over" and not cell.call.ends:
            stage.faults.append("the run is closed")
    except (RendezvousError, StoreError, TimeoutError, AssertionError) as error:
        stage.faults.append(f"no next round: {error!r:.300}")
    for handler in [*others, *run._handlers.values()]:
        await handler.aclose()
    await asyncio.sleep(GONE)
    async with run.client("the probe", WITHIN):  # a server looks for old sessions when one begins
        figures = run.server.figures()
    left = {name: figures[name] for name in MOST_LEFT if figures[name] > MOST_LEFT[name]}
    if left:
        stage.faults.append(f"left at the server: {left}")
