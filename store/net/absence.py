"""Shell: says that a store cannot be reached, for as long as somebody waits for it: soon, and then ever more rarely.

A wait of ten minutes for a name that was mistyped must not pass in silence. Whoever waits for less than `FIRST` seconds
is told by the error alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from store.errors import ConnectionLost
from store.printable import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["absence_told", "wait_for_store"]

log: logging.Logger = logging.getLogger(__name__)

FIRST: Final = (3.0, 10.0, 30.0)
"""After how many seconds it is said; from then on each time after twice as long."""


@contextlib.contextmanager
def absence_told(
    name: str,
    problem: Callable[[], str],
    *,
    within: float,
    ended_by: str,
    at_end: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Say at WARNING, while the block runs, that the store of this name has not answered yet.

    Args:
        name: The store's address.
        problem: Gives the reason, as far as it is known.
        within: Seconds that the wait may take.
        ended_by: What ends it then.
        at_end: Called then.
    """
    # A timer, and no task: nearly every wait is over before there is anything to say.
    loop, moments = asyncio.get_running_loop(), _moments()
    timer: asyncio.TimerHandle

    def tell(waited: float) -> None:
        nonlocal timer
        if waited >= within:
            if at_end is not None:
                at_end()
            return
        log.warning(
            "still no store at %s after %s: %s; %s ends this in %s",
            name,
            in_words(waited),
            problem() or "nobody has answered",
            ended_by,
            in_words(max(within - waited, 0.0)),
        )
        at = min(next(moments), within)
        timer = loop.call_later(at - waited, tell, at)

    at = min(next(moments), within)
    timer = loop.call_later(at, tell, at)
    try:
        yield
    finally:
        timer.cancel()


async def wait_for_store(
    welcomed: asyncio.Future[bool], name: str, problem: Callable[[], str], *, within: float, ended_by: str
) -> None:
    """Wait until a client has been welcomed, or is known to fail: then `welcomed` has the result True.

    The other arguments are those of `absence_told`.

    Raises:
        ConnectionLost: It was not welcomed in time.
    """
    # One timer and no scope of anyio's, which costs as much as the greeting and the welcome together.

    def end() -> None:
        if not welcomed.done():
            welcomed.set_result(False)

    with absence_told(name, problem, within=within, ended_by=ended_by, at_end=end):
        in_time = await welcomed
    if not in_time:
        raise ConnectionLost(f"no store at {name} within {within:g} s: {problem()}", maybe_applied=False)


def _moments() -> Iterator[float]:
    yield from FIRST
    at = FIRST[-1]
    while True:
        at *= 2
        yield at
