"""The loop of a test on virtual time: ten minutes of waiting pass at once, and waiting for nothing is an error.

It is a process of a timeline (`rdzv.testing.timeline`), in which a test may have others: see `tests/support/runs.py`. A
test in which every task waits for something that no timer will bring fails with `DeadlockError`, which names the tasks
and the lines they wait in.

Mark a test (or a module, with `pytestmark`) with `pytest.mark.virtual_time` to run it on this loop; the hook in
`tests/conftest.py` does the rest. Everything in such a test must live on the timeline: sockets, threads and processes
look idle to it, so time would jump past them. Hence `rdzv.testing.network`.
"""

import asyncio
import heapq
from typing import Any

from rdzv.testing.story import where
from rdzv.testing.timeline import START, SimulatedLoop, SimulatedTime

HORIZON = 3 * 86400.0
"""The longest virtual time of one loop. Past this, a timer (say, of a keep-alive) keeps a test alive that never ends.

The longest time in any promise is one day, for which a closed run stays closed.
"""


def next_timer(timeline: SimulatedTime) -> float:
    """Return when the next timer fires, if nothing happens before; infinity if there is none."""
    timers = timeline._timers
    while timers and (timers[0][3].cancelled() or timers[0][2].dead):
        heapq.heappop(timers)
    return timers[0][0] if timers else float("inf")


def timers_of(host: SimulatedLoop) -> list[tuple[float, asyncio.Handle]]:
    """Return a host's timers, in order."""
    timers = sorted(host._timeline._timers, key=lambda timer: timer[:2])
    return [(when, handle) for when, _, of, handle in timers if of is host and not handle.cancelled()]


def now() -> float:
    """Return the time on the clock of the running loop."""
    return asyncio.get_running_loop().time()


async def passes(seconds: float = 0.0) -> float:
    """Let virtual time pass; gives the time it is then."""
    await asyncio.sleep(seconds)
    return now()


class DeadlockError(Exception):
    """Every task waits, and no timer is set (or none that ends the test) that could wake one."""


class VirtualTimeLoop(SimulatedLoop):
    """The process that the test itself is."""

    late = 0.0

    def __init__(self) -> None:
        self.timeline = SimulatedTime()
        super().__init__(self.timeline, "the test", rate=1.0)
        self.timeline.hosts.append(self)
        self._horizon = START + HORIZON

    def run_until_complete(self, future: Any) -> Any:
        """Let time pass until this is done."""
        work: asyncio.Future[Any] = asyncio.ensure_future(future, loop=self)
        timeline = self.timeline
        while not work.done():
            if not timeline.runnable and next_timer(timeline) == float("inf"):
                raise DeadlockError(f"nothing is ready and no timer is set, at {self.time()}; {self._who_waits()}")
            if self.time() > self._horizon:
                self._horizon = float("inf")  # raised once: tasks must still be cancelled when the loop is closed
                raise DeadlockError(f"still not over after {HORIZON:.0f} virtual seconds; {self._who_waits()}")
            try:
                timeline.run_until_time(timeline.now if timeline.runnable else next_timer(timeline))
            finally:
                timeline.problem = None  # it is raised once
        return work.result()

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log it, as any loop does."""
        asyncio.BaseEventLoop.default_exception_handler(self, context)

    def close(self) -> None:
        """End whatever else is on the timeline."""
        self.timeline.end_processes()
        super().close()

    def _who_waits(self) -> str:
        lines = [f"\n  {task.get_name()}: {where(task)}" for host in self.timeline.hosts for task in host.unfinished()]
        return f"waiting:{''.join(sorted(lines))}" if lines else "no task is left"
