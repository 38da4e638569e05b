"""Shell: what an agent says on its screen of the rendezvous: one line for each thing that happens to the job.

    W1122 05:12:48.611 16128 rdzv] run job: node-c is lost: its process ended; meeting again, 2 of 3 are left
    I1122 05:12:48.703 16128 rdzv] run job, round 1: 2 nodes, world size 4; gone: node-c; this one, node-a, ...
    I1122 05:12:49.704 16128 rdzv] run job so far: 14 min 2 s; training 99.1 %, ...; 1 loss, of node-c

The lines have the prefix of PyTorch's own, and go where those go. LOGLEVEL is obeyed, as PyTorch obeys it; unless it is
set, these lines are shown from INFO on, and those of the rest of `rdzv` and `store` from WARNING on. Whoever has
configured logging is left alone: the lines are then the configuration's.

An agent that leaves a round for a reason, such as a worker that was killed, writes it into the round's store first, for
the others' screens.

The lines are written by the thread that has something to say, by one that listens to the run's changes for as long as
the handler lives, and by one that says, on rank 0 alone, what the run has cost once it has met again after a loss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from asyncio import CancelledError
from typing import TYPE_CHECKING, Final

from rdzv.core.state import Closed, Draining, NodesLeft, NodesLost, NodesWaiting
from rdzv.display.history import account
from rdzv.errors import RendezvousError
from rdzv.node.front.sharing import absence_of
from rdzv.node.status import read_run
from rdzv.torch.agent.events import EventHandler
from rdzv.torch.pytorch import signal_of
from store import StoreError
from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from rdzv import sync
    from rdzv.config.settings import Settings
    from rdzv.core.state import Change

__all__ = ["WORKERS", "Screen", "configure_logging", "end_with"]

log: logging.Logger = escaping(logging.getLogger("rdzv.torch"))

WAITS_SILENTLY: Final = 3.0
"""In seconds: whoever waits for longer is told for what."""

SAYS_AGAIN_AFTER: Final = 30.0
"""In seconds: what is waited for is repeated so often, if it has not changed."""

JOIN_WITHIN: Final = 1.0
"""In seconds: the threads of this room end as soon as they are told to; nobody waits for longer."""

HELD_FOR: Final = 1.0
"""In seconds: whether nodes wait to come in is told after that; within it, the next round's line tells who is new."""

NAMED_MAX: Final = 8
"""How many nodes a line names."""

COST_AFTER: Final = 1.0
"""In seconds: when a round after a loss is told what the run has cost until now; its processes are about to start."""

COST_WITHIN: Final = 10.0
"""In seconds: a store that takes longer to say what it remembers is not waited for."""

COMPARED_MAX: Final = 64
"""How large a round may be for its members to be compared with those of the last: each agent reads all their names."""

WORKERS: Final = "workers"
"""The attribute in which each agent tells how many workers it runs: their sum is the world size."""

WHY: Final = "rdzv/torch/why/"
"""What the keys of a round's store begin with under which agents tell why they leave it."""


class _Formatter(logging.Formatter):
    """PyTorch's prefix, without the path: level, date, time, process."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or several with a traceback."""
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        milliseconds = int(record.msecs)
        room = record.name.partition(".")[0]
        text = f"{record.levelname[0]}{stamp}.{milliseconds:03d} {record.process} {room}] {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure_logging() -> None:
    """Let the loggers of `rdzv` and `store` write to standard error, unless somebody has configured them."""
    chosen = logging.getLevelName(os.environ.get("LOGLEVEL", "").upper())
    level = chosen if isinstance(chosen, int) else None
    for name in ("rdzv", "store"):
        logger = logging.getLogger(name)
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(_Formatter())
            logger.addHandler(handler)
            logger.propagate = False
        if logger.level == logging.NOTSET and level is not None:
            logger.setLevel(level)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO if level is None else level)
    if not any(isinstance(handler, EventHandler) for handler in log.handlers):
        log.addHandler(EventHandler())


class Screen:
    """What one handler says; see the module.

    Args:
        run_id: The run that it speaks of.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._listener: threading.Thread | None = None
        self._size = 0  # of the round that this node is in
        self._members: frozenset[str] = frozenset()  # of the same, if they are few enough to be named
        self._store: sync.SharedStore | None = None  # of the same
        self._told_of: set[str] = set()  # who of the same is known to have gone
        self._leaving: set[str] = set()  # who of the same is known to be about to leave
        self._failed: set[str] = set()  # who of the same has told at once how a worker of it has failed
        self._stopped_by = ""
        self._handler: sync.Handler | None = None
        self._has_lost = False  # a member of the same
        self._cost: threading.Timer | None = None
        self._held: tuple[str, str] | None = None  # a line that another may make superfluous, and its reason
        self._holding = threading.Lock()

    def begins(self, settings: Settings, node_id: str, workers: int | None, *, hosts: bool) -> None:
        """Say where the others are to be met, and as whom."""
        least, most = settings.min_nodes, settings.max_nodes
        log.info(
            "run %s: joining at %s, %s node%s; this one is %s%s%s",
            *(self._run_id, settings.endpoint.url),
            *(f"{least} to {most}" if least != most else most, "s" * (most != 1), node_id),
            f", with {workers} worker{'s' * (workers != 1)}" * (workers is not None),
            ", and serves the store" * hosts,
        )

    def end_quietly(self, hosts: Callable[[], bool]) -> None:
        """Let an agent that a signal ends say that in one line, instead of PyTorch's traceback.

        Args:
            hosts: Whether the store ends with this process.
        """
        before = sys.excepthook

        def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            name = signal_of(error)
            if name is None or log.isEnabledFor(logging.DEBUG):
                before(kind, error, trace)
                return
            self.stopped_by(name)
            what_then = "the store ends with it, and so the run" if hosts() else "the run goes on without it"
            log.warning("run %s: this agent ends, since %s; %s", self._run_id, self._stopped_by, what_then)

        sys.excepthook = say

    def stopped_by(self, name: str) -> None:
        """Note what has told this agent to end, for `explain`."""
        self._stopped_by = f"it was told to end by {name}"

    def explain(self, node_id: str, reason: str = "", *, in_reach: bool = True) -> None:
        """Tell the other members why this one is about to leave the round: what a signal did, if nothing is given.

        Args:
            node_id: This one.
            reason: In words.
            in_reach: Whether the store is: nothing is worth waiting for it here, perhaps until the lease has run out.
        """
        reason = reason or self._stopped_by
        if self._store is not None and reason and in_reach:
            with contextlib.suppress(RendezvousError, StoreError):
                self._store.set(WHY + node_id, reason)

    def knows(self, node_id: str) -> bool:
        """Whether a node is in this round; True where they are too many to be named."""
        return not self._members or node_id in self._members

    def failed(self, node_id: str, how: str) -> None:
        """Say how a worker of another member has failed, which is told before that member meets the others again."""
        self._failed.add(node_id)
        log.warning("run %s: %s: %s", self._run_id, node_id, how)

    def listen(self, handler: sync.Handler) -> None:
        """Say what happens to the run, from now on and until the handler is closed."""
        self._handler = handler
        self._listener = threading.Thread(target=self._listen, args=(handler,), name="rdzv screen", daemon=True)
        self._listener.start()

    def stop(self) -> None:
        """Wait until nothing is said any more; the handler has been closed."""
        self._take_held()
        if self._cost is not None:
            self._cost.cancel()
        if self._listener is not None:
            self._listener.join(JOIN_WITHIN)

    @contextlib.contextmanager
    def meeting(self, handler: sync.Handler) -> Iterator[None]:
        """Say what is waited for, while the block meets the others and takes longer than a moment."""
        done = threading.Event()
        waiting = threading.Thread(target=self._say_reasons, args=(handler, done), name="rdzv waiting", daemon=True)
        waiting.start()
        try:
            yield
        finally:
            done.set()
            waiting.join(JOIN_WITHIN)

    def met(self, info: sync.RendezvousInfo, seconds: float) -> None:
        """Say that a round has come about, and who is not in it any more, or is new."""
        _, why = self._take_held() or ("", "")
        before, self._members, self._size = self._members, frozenset(), info.world_size
        told, self._store = self._told_of, info.store
        self._told_of, self._failed, self._leaving = set(), set(), set()
        world = ""
        if info.world_size <= COMPARED_MAX:
            with contextlib.suppress(RendezvousError):  # of which the caller will hear
                members = info.participants()
                self._members = frozenset(member.node_id for member in members)
                workers = [member.attributes.get(WORKERS, "") for member in members]
                if all(number.isdecimal() for number in workers):
                    world = f", world size {sum(map(int, workers))}"
        changed, has_lost = "", self._has_lost
        self._has_lost = False
        if before and self._members:
            gone, new = sorted(before - self._members), sorted(self._members - before)
            has_lost = has_lost or bool(gone)
            named = [name if name in told else self._with_absence(name) for name in gone]
            changed = f"; gone: {_listed(named)}" * bool(gone) + f"; new: {_listed(new)}" * bool(new)
        changed += why
        log.info(
            "run %s, round %d: %d node%s%s%s; this one, %s, has rank %d; met within %.1f s",
            *(self._run_id, info.round, info.world_size, "s" * (info.world_size != 1), world, changed),
            *(info.node_id, info.rank, seconds),
        )
        if has_lost and info.rank == 0:
            if self._cost is not None:
                self._cost.cancel()
            self._cost = threading.Timer(COST_AFTER, self._say_cost)
            self._cost.daemon = True
            self._cost.start()

    def _with_absence(self, node_id: str) -> str:
        """A node that has gone before that could be told, with what is known of it."""
        node = self._handler.node if self._handler is not None else None
        how = "" if node is None else absence_of(node, node_id)
        return f"{node_id} ({how})" if how else node_id

    def _say_cost(self) -> None:
        """Say what the run has cost until now, if the store is there to tell."""
        node = self._handler.node if self._handler is not None else None
        if node is None:
            return
        # A store that does not answer, or a handler that is closed meanwhile: others will say so.
        with contextlib.suppress(RendezvousError, StoreError, TimeoutError, CancelledError):
            reading = node.loop.start(node.ask_the_store(lambda store: read_run(store, node.keys, node.head)))
            status, history = reading.wait(COST_WITHIN)
            cost = account(self._run_id, history, now=time.time(), waited=status.waited)
            log.info("run %s so far: %s", self._run_id, str(cost).removeprefix(f"{self._run_id}: "))

    def _say_reasons(self, handler: sync.Handler, done: threading.Event) -> None:
        said, at = "", 0.0
        while not done.wait(WAITS_SILENTLY):
            try:
                reason = handler.status().reason
            except (RendezvousError, RuntimeError) as error:
                reason = str(error)
            kind = "".join(letter for letter in reason if not letter.isdigit())  # seconds that run down are no news
            if done.is_set() or (kind == said and time.monotonic() - at < SAYS_AGAIN_AFTER):
                continue
            said, at = kind, time.monotonic()
            log.info("run %s: waiting: %s", self._run_id, reason)

    def _listen(self, handler: sync.Handler) -> None:
        # Closing the handler ends it, or the end of the process the loop in which it lives.
        with contextlib.suppress(RendezvousError, RuntimeError, ConnectionError), handler.changes() as changes:
            for change in changes:
                self._say(change)
                held_until = time.monotonic() + HELD_FOR
                while self._held is not None:
                    another = changes.poll(max(held_until - time.monotonic(), 0.0))
                    if another is not None:
                        self._say(another)
                    elif time.monotonic() >= held_until and (held := self._take_held()) is not None:
                        log.info("%s", held[0])

    def _take_held(self) -> tuple[str, str] | None:
        """The line that is held back, and its reason; who has taken it tells it, or has told what it says."""
        with self._holding:
            held, self._held = self._held, None
            return held

    def _say(self, change: Change) -> None:
        left = "meeting again"
        match change:
            case NodesLost():
                self._has_lost = True
                remaining = max(self._size - change.count, 0)
                log.warning(
                    "run %s: %s lost%s; %s, %d of %d are left",
                    *(self._run_id, self._named(change), _reasons(change), left, remaining, self._size),
                )
            case NodesLeft():
                named, why = self._named(change), self._why(change.node_ids)
                log.warning("run %s: %s left%s; %s", self._run_id, named, why, left)
            case NodesWaiting(count=count) if count:
                waiting = f"{count} node{' waits' if count == 1 else 's wait'} to come in"
                why = self._why_again()
                _, told = self._take_held() or ("", "")
                why += told
                with self._holding:
                    self._held = f"run {self._run_id}: {waiting}{why}; {left}", why
            case NodesWaiting():
                self._take_held()  # they have come in, and the round's line has told of them, or they have gone
            case Draining(node_ids=ids, reason=reason):
                members = [name for name in ids if self.knows(name) and name not in self._leaving]
                if members:
                    self._leaving.update(members)
                    why = f": {reason}" if reason else ""
                    log.warning("run %s: %s to leave%s; %s", self._run_id, _listed(members), why, left)
            case Closed():
                by = f" by {change.by}" if change.by else ""
                log.info("run %s is closed%s%s", self._run_id, by, f": {change.reason}" if change.reason else "")
            case _:
                pass  # that this node was dropped, it says itself

    def _named(self, change: NodesLost | NodesLeft) -> str:
        """Who, as a subject with its verb; of those that can be named, those of whom it was not told before."""
        one, many = ("has", "have") if isinstance(change, NodesLeft) else ("is", "are")
        names, count = change.node_ids, change.count
        if len(names) == count:
            new = [name for name in names if name not in self._told_of]
            self._told_of.update(names)
            names, count = (tuple(new), len(new)) if new else (names, count)
        return f"{_listed(names, count)} {one if count == 1 else many}"

    def _why_again(self) -> str:
        """Why members have left the round to come in again, of those that have given a reason."""
        reasons = []
        if self._store is not None and self._members:  # they are few: so is what is in their store
            with contextlib.suppress(RendezvousError, StoreError):
                for key in sorted(key for key in self._store.list_keys() if key.startswith(WHY)):
                    name = key.removeprefix(WHY)
                    if name not in self._told_of | self._failed:
                        self._told_of.add(name)
                        reasons.append(f"; {name} again: {self._store.get(key).decode()}")
        return "".join(reasons[:NAMED_MAX])

    def _why(self, names: Sequence[str]) -> str:
        """What the last one that left has given as its reason, if it has given any."""
        if self._store is not None and names:
            key = WHY + names[-1]
            with contextlib.suppress(RendezvousError, StoreError):
                if self._store.check([key]):
                    return f": {self._store.get(key).decode()}"
        return ""


def _reasons(change: NodesLost) -> str:
    """Why they were lost: by name, unless it is the same of all."""
    reasons = [change.reasons[name] for name in change.node_ids if name in change.reasons]
    if not reasons:
        return ""
    if len(set(reasons)) == 1 and len(reasons) == change.count:
        return f": {reasons[0]}"
    named = [f"{name}: {change.reasons[name]}" for name in change.node_ids if name in change.reasons]
    return f": {_listed(named)}"


def _listed(names: Sequence[str], count: int | None = None) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:NAMED_MAX])
    others = (len(names) if count is None else count) - min(len(names), NAMED_MAX)
    return shown if not others else f"{shown} and {others} more" if shown else f"{others} nodes"


def end_with(error: Exception) -> None:
    """End the process of an agent for an error, in one sentence; with LOGLEVEL=DEBUG its traceback comes first.

    Raises:
        SystemExit: With status 1.
    """
    log.error("%s", error, exc_info=error if log.isEnabledFor(logging.DEBUG) else None)
    sys.exit(1)
