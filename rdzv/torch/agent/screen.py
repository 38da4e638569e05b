"""The lines that an agent writes about the rendezvous, one for each event of the job.

docs/pytorch.md shows these lines, which have PyTorch's prefix and destination. LOGLEVEL sets their level; the default
is INFO, and WARNING for other lines of `rdzv` and `store`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from rdzv import RendezvousError
from rdzv.config.resizing import describe_size
from rdzv.display.standard_error import NonBlockingStderrHandler
from rdzv.loop import EndKind
from rdzv.torch.agent.unnamed_run import NO_NAME
from rdzv.torch.pytorch import signal_name_of_error
from store.printable import make_logger, plural, without_durations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from rdzv import Closed, Ending, sync
    from rdzv.config.settings import Settings

log: Final = make_logger("rdzv.torch")

WAITS_SILENTLY: Final = 3.0  # seconds until a waiting agent logs the reason, and until it looks again
SAYS_AGAIN_AFTER: Final = 30.0  # seconds until the same reason for a wait is logged again
JOIN_WITHIN: Final = 1.0  # seconds to wait for the end of a logging thread
COST_AFTER: Final = 1.0  # seconds from a round that lacks earlier members until rank 0 logs the use of the run's time


class _LogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        room = record.name.partition(".")[0]
        text = f"{record.levelname[0]}{stamp}.{int(record.msecs):03d} {record.process} {room}] {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure_logging() -> None:
    """Let the loggers of `rdzv` and `store` write to standard error, unless logging is configured."""
    chosen = logging.getLevelName(os.environ.get("LOGLEVEL", "").upper())
    level = chosen if isinstance(chosen, int) else None
    for name in ("rdzv", "store"):
        logger = logging.getLogger(name)
        if not logger.hasHandlers():
            handler = NonBlockingStderrHandler()
            handler.setFormatter(_LogFormatter())
            logger.addHandler(handler)
            logger.propagate = False
        if logger.level == logging.NOTSET and level is not None:
            logger.setLevel(level)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO if level is None else level)


class HandlerLogger:
    """The log lines of one handler."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._cost: threading.Timer | None = None
        self._has_warned = False

    def log_start(self, settings: Settings, node_id: str, *, host: str | None) -> None:
        """Write the store's address and host (None: this process; empty: unknown), and this node's name."""
        size = describe_size(settings.min_nodes or 0, settings.max_nodes or 0)
        serves = ", and serves the store" if host is None else f"; {host} serves the store" if host else ""
        log.info(
            "run %s: joining at %s, %s; this one is %s%s", *(self._run_id, settings.endpoint.url, size, node_id, serves)
        )

    def hide_signal_traceback(self, end: Callable[[str], None]) -> None:
        """Suppress PyTorch's traceback for an agent that a signal ends; call `end` with the signal's name."""
        before = sys.excepthook

        def filtered_excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            name = signal_name_of_error(error)
            if name is None:
                before(kind, error, trace)
            else:
                log.debug("run %s: a signal ends this agent here", self._run_id, exc_info=error)
                end(name)

        sys.excepthook = filtered_excepthook

    def log_signal(self, name: str, *, serves_for: float | None) -> None:
        """Write that a signal ends this agent, and how long it still serves its store to other agents."""
        what_then = "the run goes on without it"
        if serves_for is not None:
            what_then = (
                f"the store ends with it, once the others have gone; those of this run have {serves_for:g} s for that; "
                f"again after a second: at once"
            )
        log.warning("run %s: this agent ends, since %s; %s", self._run_id, signal_reason(name), what_then)

    def cancel_cost_line(self) -> None:
        """Cancel the pending line about the run's cost."""
        if self._cost is not None:
            self._cost.cancel()

    @contextlib.contextmanager
    def log_waits(self, handler: sync.Handler) -> Iterator[None]:
        """Write the reason if the block waits long for other nodes."""
        done = threading.Event()
        waiting = threading.Thread(target=self._log_waiting, args=(handler, done), name="rdzv waiting", daemon=True)
        waiting.start()
        try:
            yield
        finally:
            done.set()
            waiting.join(JOIN_WITHIN)

    def log_round(self, handler: sync.Handler, *, again: bool, seconds: float) -> None:
        """Write the new round, agreed in `seconds`, and the members that were lost, left or joined."""
        assert handler.membership is not None
        round, rank = handler.membership.round, handler.membership.rank
        lost, left, joined = round.since if again else ((), (), ())
        gone = [f"{name} ({how})" if (how := handler.describe_gone_node(name)) else name for name in (*lost, *left)]
        changed = f"; gone: {', '.join(gone)}" * bool(gone) + f"; new: {', '.join(joined)}" * bool(joined)
        log.info(
            "run %s, round %d: %s%s; this one, %s, has rank %d; met within %.1f s",
            *(self._run_id, round.number, plural(round.size), changed),
            *(handler.node_id, rank, seconds),
        )
        if gone and rank == 0:
            self.cancel_cost_line()
            self._cost = threading.Timer(COST_AFTER, self._log_run_cost, args=(handler,))
            self._cost.daemon = True
            self._cost.start()

    def log_round_end(self, ending: Ending, closed: Closed | None, *, done: bool = False) -> None:
        """Write why a round has ended; `done` if this agent's workers have succeeded."""
        if ending.kind is EndKind.CLOSED and closed is not None:
            by = f" by {closed.by}" if closed.by else ""
            log.info("run %s is closed%s%s", self._run_id, by, f": {closed.reason}" if closed.reason else "")
        else:
            then = "the workers here have succeeded, and this agent does not come again" if done else "meeting again"
            log.warning("run %s: %s; %s", self._run_id, ending.reason, then)

    def _log_run_cost(self, handler: sync.Handler) -> None:
        with contextlib.suppress(RendezvousError):  # the error is logged elsewhere
            _, _, cost = handler.status_and_cost()
            log.info("run %s so far: %s", self._run_id, str(cost).removeprefix(f"{self._run_id}: "))

    def _log_waiting(self, handler: sync.Handler, done: threading.Event) -> None:
        said, at = "", 0.0
        while not done.wait(WAITS_SILENTLY):
            try:
                status = handler.status()
                reason = status.reason
                if self._run_id == NO_NAME and handler.node_id in status.spares and not self._has_warned:
                    self._has_warned = True
                    log.warning(
                        "run %s: this agent is a spare of a job without a name, which may be another one than its own; "
                        "give each job a name: --rdzv-id=NAME",
                        self._run_id,
                    )
            except RendezvousError as error:
                reason = str(error)
            kind = without_durations(reason)  # reasons that differ only in durations count as the same
            if done.is_set() or (kind == said and time.monotonic() - at < SAYS_AGAIN_AFTER):
                continue
            said, at = kind, time.monotonic()
            log.info("run %s: waiting: %s", self._run_id, reason)


def signal_reason(signal: str) -> str:
    """Return the reason for leaving at a signal, as other nodes see it."""
    return f"it was told to end by {signal}"


def print_error_and_exit(error: Exception) -> None:
    """Write one sentence for an error (with LOGLEVEL=DEBUG also its traceback), and exit with status 1."""
    log.error("%s", error, exc_info=error if log.isEnabledFor(logging.DEBUG) else None)
    sys.exit(1)
