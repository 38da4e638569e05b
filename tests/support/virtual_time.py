"""An event loop whose clock jumps: ten minutes of waiting pass at once, and waiting for nothing is an error.

The loop's selector polls without waiting, and what it was told to wait is added to `time()`. So a test that
sleeps for a day takes no time, always in the same order, and one in which every task waits for something that
no timer will bring fails with `DeadlockError`, naming the tasks and the lines they wait in.

Mark a test (or a module, with `pytestmark`) with `pytest.mark.virtual_time` to run it on this loop; the hook
in `tests/conftest.py` does the rest. Everything in such a test must live in the loop: sockets, threads and
processes look idle to it, so time would jump past them. Hence `rdzv.testing.network`.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from typing import Any, NoReturn

from rdzv.testing.story import frames_of

START = 1000.0
"""When the clock begins. Not 0: no real clock does, so code that takes 0 for "never" should be found out."""

HORIZON = 3 * 86400.0
"""How long one loop may run. Past this, something (a keep-alive, say) ticks on for a test that waits forever.

The longest time any promise speaks of is one day, for which a closed run stays closed.
"""


class DeadlockError(Exception):
    """Every task waits, and no timer is set (or none that ends the test) that could wake one."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on which waiting takes no time."""

    def __init__(self) -> None:
        self._jumping_selector = _JumpingSelector()
        super().__init__(self._jumping_selector)

    def time(self) -> float:
        """Seconds on the virtual clock."""
        return self._jumping_selector.now

    def run_in_executor(self, *_: object, **__: object) -> NoReturn:
        """Refuse: time would jump while the thread works, and the result would come at a random moment."""
        raise RuntimeError("a thread looks idle to virtual time; run this test on a real loop")


class _JumpingSelector(selectors.DefaultSelector):
    """Polls, and if nothing is ready, moves the clock by the wait instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self._horizon = START + HORIZON

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The loop's own self-pipe is real, so a callback that another thread has already handed in is seen.
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError(f"nothing is ready and no timer is set, at {self.now}; {_who_waits()}")
        self.now += timeout
        if self.now > self._horizon:
            # Raised once: the loop must still turn, to cancel its tasks when it is closed.
            self._horizon = math.inf
            waited = self.now - START
            raise DeadlockError(f"still not over after {waited:.0f} virtual seconds; {_who_waits()}")
        return ready


def _who_waits() -> str:
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    if not tasks:
        return "no task is left"
    return "waiting:\n" + "\n".join(f"  {task.get_name()}: {_innermost_line(task)}" for task in tasks)


def _innermost_line(task: asyncio.Task[Any]) -> str:
    """Where a suspended task really stands."""
    frames = frames_of(task)
    if not frames:
        return "not started"
    return f"{frames[-1].f_code.co_qualname} ({frames[-1].f_code.co_filename}:{frames[-1].f_lineno})"
