"""The pace at which runs are read for clients of HTTP."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from rdzv.http.run_reader import RunReader
from store import Client


class Clock:
    """The part of a client that is needed here."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    async def count(self, _: str) -> int:
        return 1


class Slow(RunReader):
    """Runs that take this long to read, as a thousand do."""

    def __init__(self, clock: Clock, takes: float) -> None:
        super().__init__(cast("Client", clock), prefix="/rdzv")
        self.clock, self.takes, self.looks = clock, takes, 0

    async def _read_live_runs(self) -> list[dict[str, Any]]:
        self.looks += 1
        self.clock.now += self.takes
        return []

    async def _read_report(self, _: str) -> dict[str, Any]:
        await self._read_live_runs()
        return {}


@pytest.mark.parametrize(
    "ask", [RunReader.list_live_runs, lambda runs: runs.report("job")], ids=["all", "one of thousands of nodes"]
)
@pytest.mark.parametrize(("takes", "share"), [(0.01, 0.02), (2.0, 0.2)])
async def test_reading_takes_at_most_a_fifth_of_the_stores_time_with_any_number_of_clients(
    takes: float, share: float, ask: Callable[[RunReader], Awaitable[object]]
) -> None:
    """A page asks once a second. Regression: if a read took as long, the store did nothing else."""
    clock = Clock()
    runs, began = Slow(clock, takes), clock.now
    for _ in range(1000):
        await ask(runs)
        clock.now += 0.1
    assert runs.looks * takes <= 1.05 * share * (clock.now - began)
    assert runs.looks > 5
