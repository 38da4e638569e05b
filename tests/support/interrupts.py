"""Exceptions out of the handlers of signals, and cancellations: at each step of some work, one after the other."""

import asyncio
import contextlib
import functools
import gc
import itertools
import random
import signal
import sys
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

import pytest

from tests.support.processes import ROOT
from tests.support.seeds import EVERYTHING, FRESH

__all__ = ["Torn", "alarms", "cancelled_at_each_await", "tears", "torn", "torn_at_each_place"]

T = TypeVar("T")


class Torn(Exception):
    """The exception that the signal handler raises."""


@contextlib.contextmanager
def alarms() -> Iterator[None]:
    """Raise `Torn` from the handler of SIGALRM."""

    def ring(*_: object) -> None:
        raise Torn

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


tears = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning",  # it was not handed over
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:unclosed:ResourceWarning",  # a new socket, before the interruption could hand it to its owner
)


def torn(work: Callable[[], object], *, every: int = 1, kind: type[BaseException] = Torn) -> Iterator[str]:
    """Repeat some work, each time with an exception after one more of its calls; yield the place of each exception.

    These are the places where CPython looks for signals: at the entry of a function, and after the return of one
    written in C.

    Args:
        work: The work to interrupt. It is done in full once there is no such place any more.
        every: 1 for all places, 3 for every third one.
        kind: The exception to raise.
    """
    for number in itertools.count(step=every):
        passed = 0
        raised: BaseException | None = None

        def raise_there(frame: FrameType, event: str, _: object, after: int = number) -> None:
            nonlocal passed, raised
            if event in ("call", "c_return"):
                passed += 1
                if passed > after:
                    raised = kind(f"{frame.f_code.co_qualname}, line {frame.f_lineno}, {event}")
                    raise raised

        sys.setprofile(raise_there)
        try:
            work()
        except kind as error:
            if error is not raised:
                raise
            where = str(error)
        else:
            if passed <= number:
                sys.setprofile(None)  # what the garbage's finalizers call is no part of the work
                gc.collect()  # here, where the warnings of `tears` are ignored
                return
            where = "where it was ignored"  # in a callback of a destructor
        finally:
            sys.setprofile(None)
        raised = None  # it holds the frames of the work, and with them all that these hold
        yield where


PLACES_MOST = 300
"""The number of places at which a test interrupts its work, chosen by the seed; all with `RDZV_TEST_EVERYTHING`."""

Place = tuple["CodeType", int]


def torn_at_each_place(work: Callable[[], object], *rooms: str) -> Iterator[str]:
    """Do some work again and again, each time with an exception at one more place of these rooms; yield which.

    A place is an instruction. There are more than CPython hears signals at, so this is harsher than signals are.
    """
    paths = tuple(str(ROOT / room) for room in rooms)
    passed: dict[Place, None] = {}
    _traced(work, paths, passed.setdefault)
    places = list(passed)
    if not EVERYTHING and len(places) > PLACES_MOST:
        places = random.Random(FRESH).sample(places, PLACES_MOST)
    for chosen in places:

        def tear(place: Place, at: Place = chosen) -> None:
            if place == at:
                raise Torn

        with contextlib.suppress(Torn):
            _traced(work, paths, tear)
        code, offset = chosen
        line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
        yield f"{code.co_qualname}, line {line}, offset {offset}"


def _traced(work: Callable[[], object], paths: tuple[str, ...], look: Callable[[Place], object]) -> None:
    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(paths):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            look((frame.f_code, frame.f_lasti))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


@types.coroutine
def _counted(work: Coroutine[Any, Any, T], paused: Callable[[], object]) -> Generator[Any, Any, T]:
    send: Callable[[], Any] = functools.partial(work.send, None)
    while True:
        try:
            waits_for = send()
        except StopIteration as done:
            result: T = done.value
            return result
        paused()
        try:
            send = functools.partial(work.send, (yield waits_for))
        except BaseException as error:  # noqa: BLE001 - a cancellation, too, is for the work
            send = functools.partial(work.throw, error)


async def cancelled_at_each_await(work: Callable[[], Coroutine[Any, Any, object]]) -> AsyncIterator[int]:
    """Do some work again and again, each time cancelled at one more of its awaits; yield which.

    Raises:
        AssertionError: It was not cancelled for all that.
    """
    for number in itertools.count(1):
        awaits = 0
        tasks: list[asyncio.Task[object]] = []

        def paused(after: int = number, tasks: list[asyncio.Task[object]] = tasks) -> None:
            nonlocal awaits
            awaits += 1
            if awaits == after:
                asyncio.get_running_loop().call_soon(tasks[0].cancel)

        async def counted(paused: Callable[[], object] = paused) -> object:
            return await _counted(work(), paused)

        tasks.append(asyncio.create_task(counted()))
        await asyncio.wait(tasks)
        if awaits < number:
            tasks[0].result()
            return
        assert tasks[0].cancelled(), f"a cancellation at await {number} was lost"
        yield number
