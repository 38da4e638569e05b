"""A cluster's events as lines of text, and the errors with these lines."""

from __future__ import annotations

import contextlib
import linecache
import logging
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import store

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator
    from types import FrameType

LINES_MOST = 100_000
LINES_IN_AN_ERROR = 200
LOGGERS = ("rdzv", "store")

FOLDERS = (Path(__file__).parents[1], *(Path(module.__file__ or "").parent for module in (store, anyio)))
NOT_THE_USERS = ("<frozen ", *(f"{folder}/" for folder in (*FOLDERS, sysconfig.get_path("stdlib"))))
"""The folders of code that is not the user's."""


class ClusterError(AssertionError):
    """A failure in a cluster; its message ends with the last events.

    Attributes:
        story: The events, one line each.
    """

    def __init__(self, what: str, story: list[str]) -> None:
        self.what = what
        self.story: list[str] = list(story)
        left_out = len(story) - LINES_IN_AN_ERROR
        lines = [*([f"  ... {left_out} lines before: see .story"] if left_out > 0 else []), *story[-LINES_IN_AN_ERROR:]]
        super().__init__("\n".join([what, "the story, in virtual seconds:", *lines]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.story)


class ClusterStuckError(ClusterError):
    """Nodes have not ended in time."""


class EventLog:
    """A cluster's events: `lines` has a line for each, with the virtual time that `now` returned."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.lines: list[str] = []

    def say(self, what: str) -> None:
        """Add a line."""
        if len(self.lines) < LINES_MOST:
            self.lines.append(f"{self._now():10.3f}  {what}")

    @contextlib.contextmanager
    def capture_logs(self) -> Iterator[None]:
        """Send the library's log records to the story only, during the context."""
        teller = _StoryLogHandler(self)
        loggers = [logging.getLogger(name) for name in LOGGERS]
        before = [(logger.level, logger.propagate) for logger in loggers]
        for logger in loggers:
            logger.addHandler(teller)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        try:
            yield
        finally:
            for logger, (level, propagate) in zip(loggers, before, strict=True):
                logger.removeHandler(teller)
                logger.setLevel(level)
                logger.propagate = propagate


class _StoryLogHandler(logging.Handler):
    def __init__(self, story: EventLog) -> None:
        super().__init__()
        self._story = story

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._story.say(f"    {record.name}: {level}{record.getMessage()}")


def task_frames(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return a suspended task's frames, the innermost last."""
    frames: list[FrameType] = []
    awaited: object = task.get_coro()
    # A coroutine has `cr_frame` and `cr_await`, an asynchronous generator `ag_frame` and `ag_await`.
    while frame := getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None):
        frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return frames


def where(task: asyncio.Task[Any], *, of_users: bool = False) -> str:
    """Return the user's line where a suspended task waits; without one, the library's, or "" with `of_users`."""
    frames = task_frames(task)
    users = [frame for frame in frames if not frame.f_code.co_filename.startswith(NOT_THE_USERS)]
    if of_users and not users:
        return ""
    if not frames or frames[0].f_lasti < 0:
        return "its beginning"
    frame = (users or frames)[-1]
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno}): {line}"
