"""Exceptions out of the handlers of signals: between any two steps of some work, one after the other."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Torn", "tears", "torn"]


class Torn(Exception):
    """What the handler of a signal raises."""


tears = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning",  # it was not handed over
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def torn(work: Callable[[], object], *, every: int = 1, kind: type[BaseException] = Torn) -> Iterator[str]:
    """Do some work again and again, each time with an exception after one more of its calls; yield where it came.

    That is where CPython looks for signals: a function has been entered, or one written in C has returned.

    Args:
        work: What is torn. It is done in full once there is no such place any more.
        every: 1 for all places, 3 for every third one.
        kind: What is raised.
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
                return
            where = "where it was ignored"  # in what is called back when something is let go of
        finally:
            sys.setprofile(None)
        yield where
