"""Logs that a store cannot be reached while calls wait for it; only a process's oldest call to a store logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from store.printable import time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log: logging.Logger = logging.getLogger(__name__)

FIRST: Final = (3.0, 10.0, 30.0)  # seconds of waiting at which a line is logged; later at each doubling
FORGOTTEN_AFTER: Final = 10.0  # seconds; if the last failure is longer ago than this, a failure begins a new outage

_waiting: defaultdict[str, list[object]] = defaultdict(list)  # by name of the store: its waits, oldest first


@contextlib.contextmanager
def warn_if_silent(name: str, problem: Callable[[], str], *, within: float, ended_by: str) -> Iterator[None]:
    """While the block runs, log at WARNING that a store has not answered; `ended_by` names the limit of the wait."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    me, waiting = object(), _waiting[name]

    def log_store_absent(waited: float) -> None:
        nonlocal timer
        if waited and waiting[0] is me:
            what, so_far, rest = problem() or "nobody has answered", time_text(waited), time_text(within - waited)
            text = "still no store at %s after %s: %s; %s ends this in %s"
            _log_in_thread(log, logging.WARNING, text, name, so_far, what, ended_by, rest)
        at = next((moment for moment in FIRST if moment > waited), 2 * waited)
        if at < within:
            timer = loop.call_later(at - waited, log_store_absent, at)

    waiting.append(me)
    log_store_absent(0.0)
    try:
        yield
    finally:
        waiting.remove(me)
        if timer is not None:
            timer.cancel()


class OutageLog:
    """Logs at INFO that a store, connected before, is out of reach, and that it is back."""

    def __init__(self, name: str, problem: Callable[[], str], log: logging.Logger) -> None:
        self._name, self._problem, self._log = name, problem, log
        self._since = self._failed_at = -math.inf
        self._lasts = self._said = self._met = False
        self._lock = threading.RLock()  # several threads and signal handlers use it

    def outage_seconds(self, now: float) -> float:
        """Return the seconds since the store was lost; 0 if it is not."""
        return now - self._since if self._lasts else 0.0

    def note_failure(self, now: float) -> None:
        """Note a lost connection or a failed attempt; log an outage that has lasted some seconds."""
        with self._lock:
            if not self._lasts or now - self._failed_at > FORGOTTEN_AFTER:
                self._since, self._lasts = now, True
            self._failed_at = now
            if self._met and now - self._since >= FIRST[0] and not self._said:
                self._said = True
                self._log_outage("the store at %s has been out of reach for %s: %s", now, self._problem())

    def note_loss(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note a lost connection, and log the outage later if the connection is not restored."""
        self._met = True
        self.note_failure(loop.time())
        loop.call_later(FIRST[0], lambda: self.note_failure(loop.time()) if self._lasts else None)

    def note_end(self, now: float = math.inf) -> None:
        """End the outage; if it was logged and `now` is given, log that the store is back."""
        with self._lock:
            if self._said and now < math.inf:
                self._log_outage("the store at %s is back after %s%s", now, "")
            self._lasts = self._said = False
            self._met = True

    def _log_outage(self, text: str, now: float, more: str) -> None:
        _log_in_thread(self._log, logging.INFO, text, self._name, time_text(now - self._since), more)


def _log_in_thread(log: logging.Logger, level: int, *said: object) -> None:
    """Log in a thread: a terminal or pipe may block."""
    if log.isEnabledFor(level):
        threading.Thread(target=log.log, args=(level, *said), name="log", daemon=True).start()
