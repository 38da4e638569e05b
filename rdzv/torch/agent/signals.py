"""The signals that end an agent, before it has workers and while it leaves.

PyTorch handles these signals only once it has started workers. Earlier, SIGTERM would end the process, and its store,
without a message, and Ctrl-C would make PyTorch close the run for all. So at a signal this module raises PyTorch's
`SignalException`, as PyTorch does later: the node only leaves the run.

An agent that serves the store waits until the other nodes have left; others have `LEAVES_WITHIN`. A second signal
within a second is ignored, as PyTorch would signal the workers again. A later signal ends a leaving agent at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rdzv.display.standard_error import flush_standard_error
from rdzv.torch.pytorch import SignalException, patch_to_ignore_signals

if TYPE_CHECKING:
    from collections.abc import Callable

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
UNHANDLED: Final = (signal.SIG_DFL, signal.default_int_handler)
AGAIN_AFTER: Final = 1.0  # seconds; earlier repeats are ignored
LEAVES_WITHIN: Final = 1.5  # seconds for an agent without a store to leave


@dataclass
class EndSignals:
    """The handlers of the signals that end one agent."""

    hosts: Callable[[], bool]  # returns True while the agent serves a store
    give_up: Callable[[str], None]  # called if the agent cannot leave in time
    told: Callable[[str], None]  # called with the first signal's name, in the signal handler
    _since: float | None = None  # when the first signal came
    _limit: threading.Timer | None = None  # None until the agent leaves

    def install(self, *, instead_of_others: bool = False) -> None:
        """In the main thread, handle the ending signals that have no handler; with `instead_of_others`, all."""
        if threading.current_thread() is threading.main_thread():
            if not instead_of_others:
                patch_to_ignore_signals(self._is_repeated)
            for number in ENDING:
                if instead_of_others or signal.getsignal(number) in UNHANDLED:
                    signal.signal(number, self._handle)

    def handle_while_leaving(self, name: str) -> None:
        """Handle further signals while the agent leaves; limit that time unless the agent serves a store."""
        self._start_exit_timer(signal.Signals[name])
        self.install(instead_of_others=True)

    def _is_repeated(self, number: int) -> bool:
        if self._since is None:
            self._since = time.monotonic()
            self.told(signal.Signals(number).name)
            return False
        return time.monotonic() - self._since < AGAIN_AFTER

    def _handle(self, number: int, _: Any) -> None:
        if self._is_repeated(number):
            return
        if self._limit is not None:
            flush_standard_error()
            os._exit(128 + number)
        self._start_exit_timer(told := signal.Signals(number))
        raise SignalException(f"Process {os.getpid()} got signal: {number}", sigval=told)

    def _start_exit_timer(self, told: signal.Signals) -> None:
        if self._limit is None:
            self._limit = threading.Timer(LEAVES_WITHIN, self._exit_at_limit, (told,))
            self._limit.daemon = True
            self._limit.start()

    def _exit_at_limit(self, told: signal.Signals) -> None:
        if not self.hosts():
            self.give_up(told.name)
            flush_standard_error()
            os._exit(128 + told)
