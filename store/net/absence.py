"""Shell: says that a store cannot be reached, for as long as somebody waits for it: soon, and then ever more rarely.

A wait of ten minutes for a name that was mistyped must not pass in silence. Whoever waits for less than `FIRST` seconds
is told by the error alone. Of several in one process that wait for the same store, the first one speaks for all.

A store that was met, and is out of reach later, is told of once by each client, and once when it is back: `Outages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from store.printable import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Outages", "absence_told"]

log: logging.Logger = logging.getLogger(__name__)

FIRST: Final = (3.0, 10.0, 30.0)
"""After how many seconds it is said; from then on each time after twice as long."""

FORGOTTEN_AFTER: Final = 10.0
"""Seconds without a failed attempt: longer than a client that blocks pauses between two. Then it was not called."""

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


class Outages:
    """What one client says, at INFO, of a store that it had met: that it is out of reach, and that it is back.

    Args:
        name: The store's address.
        problem: Gives the reason, as far as it is known.
        log: The client's logger.
    """

    def __init__(self, name: str, problem: Callable[[], str], log: logging.Logger) -> None:
        self._name, self._problem, self._log = name, problem, log
        self._since = self._failed_at = -math.inf
        self._lasts = self._said = self._met = False

    def lasts_for(self, now: float) -> float:
        """Return for how many seconds the store has been out of reach."""
        return now - self._since if self._lasts else 0.0

    def failed(self, now: float) -> None:
        """Note that the connection was lost, or that an attempt has failed; say so if that has lasted."""
        if not self._lasts or now - self._failed_at > FORGOTTEN_AFTER:
            self._since, self._lasts = now, True
        self._failed_at = now
        if self._met and now - self._since >= FIRST[0] and not self._said:
            self._said = True
            self._say("the store at %s has been out of reach for %s: %s", now, self._problem())

    def lost(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note that the connection was lost, and say so later if it is not found."""
        self._met = True
        self.failed(loop.time())
        loop.call_later(FIRST[0], lambda: self.failed(loop.time()) if self._lasts else None)

    def over(self, now: float = math.inf) -> None:
        """Note that the store has answered; or, without the time, that this does not matter any more."""
        if self._said and now < math.inf:
            self._say("the store at %s is back after %s%s", now, "")
        self._lasts = self._said = False
        self._met = True

    def _say(self, text: str, now: float, more: str) -> None:
        if self._log.isEnabledFor(logging.INFO):
            said = (text, self._name, in_words(now - self._since), more)
            # In a thread: no event loop waits for a terminal or a pipe that takes nothing.
            threading.Thread(target=self._log.info, args=said, name="log", daemon=True).start()
