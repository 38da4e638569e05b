"""Shell: the signals that end an agent, before it has workers and while it leaves.

PyTorch handles them from its first workers on. Before that, SIGTERM would end the process, and its store, without a
message, and Ctrl-C would make PyTorch close the run for all. So this module raises PyTorch's `SignalException`, too:
the node only leaves.

An agent that serves no store has `LEAVES_WITHIN` to leave. One that does waits for the others to go, as `rdzv run`
does. A signal a second or more after the first ends the agent at once; an earlier one is ignored.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rdzv.display.standard_error import flush_errors
from rdzv.torch.pytorch import SignalException

if TYPE_CHECKING:
    from collections.abc import Callable

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
UNHANDLED: Final = (signal.SIG_DFL, signal.default_int_handler)
AGAIN_AFTER: Final = 1.0  # seconds
LEAVES_WITHIN: Final = 1.5  # seconds, also if no store answers


@dataclass
class EndSignals:
    """The handlers of the signals that end one agent."""

    hosts: Callable[[], bool]  # returns True while it serves a store
    give_up: Callable[[str], None]  # called if it cannot leave in time
    _since: float | None = None

    def install(self) -> None:
        """Handle the signals, in the main thread, until PyTorch handles them."""
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) in UNHANDLED:
                    signal.signal(number, self._heed)

    def leave(self, name: str) -> None:
        """Handle more signals while the agent leaves at one; limit the time to leave unless it serves a store."""
        self._begin(signal.Signals[name])
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                signal.signal(number, self._heed)

    def _heed(self, number: int, _: Any) -> None:
        told = signal.Signals(number)
        if self._since is None:
            self._begin(told)
            raise SignalException(f"Process {os.getpid()} got signal: {number}", sigval=told)
        if time.monotonic() - self._since >= AGAIN_AFTER:
            flush_errors()
            os._exit(128 + number)

    def _begin(self, told: signal.Signals) -> None:
        if self._since is None:
            self._since = time.monotonic()
            limit = threading.Timer(LEAVES_WITHIN, self._end, (told,))
            limit.daemon = True
            limit.start()

    def _end(self, told: signal.Signals) -> None:
        if not self.hosts():
            self.give_up(told.name)
            flush_errors()
            os._exit(128 + told)
