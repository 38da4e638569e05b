"""Shell: says that a store cannot be reached, for as long as somebody waits for it: soon, and then ever more rarely.

A wait of ten minutes for a name that was mistyped must not pass in silence. Whoever waits for less than `FIRST` seconds
is told by the error alone. Of several in one process that wait for the same store, the first one speaks for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from store.printable import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["absence_told"]

log: logging.Logger = logging.getLogger(__name__)

FIRST: Final = (3.0, 10.0, 30.0)
"""After how many seconds it is said; from then on each time after twice as long."""

_waiting: defaultdict[str, list[object]] = defaultdict(list)  # who waits for a store, the first to come first


@contextlib.contextmanager
def absence_told(name: str, problem: Callable[[], str], *, within: float, ended_by: str) -> Iterator[None]:
    """Say at WARNING, while the block runs, that the store of this name has not answered yet.

    Args:
        name: The store's address.
        problem: Gives the reason, as far as it is known.
        within: Seconds that the wait may take.
        ended_by: What ends it then.
    """
    # A timer, and no task: nearly every wait is over before there is anything to say.
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    me, waiting = object(), _waiting[name]

    def wait_on(waited: float) -> None:
        nonlocal timer
        at = next((moment for moment in FIRST if moment > waited), 2 * waited)
        if at < within:
            timer = loop.call_later(at - waited, tell, at)

    def tell(waited: float) -> None:
        if waiting[0] is me:
            what, so_far, rest = problem() or "nobody has answered", in_words(waited), in_words(within - waited)
            log.warning("still no store at %s after %s: %s; %s ends this in %s", name, so_far, what, ended_by, rest)
        wait_on(waited)

    waiting.append(me)
    wait_on(0.0)
    try:
        yield
    finally:
        waiting.remove(me)
        if timer is not None:
            timer.cancel()
