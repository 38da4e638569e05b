"""Keeps the state of runs up to date for displays: a run is read again only if one of its keys has changed.

Steps change no key: nodes send them with keep-alives. A refresh reads them, but seldom if no member reports any.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rdzv.core.keys import Keys
from rdzv.core.live.changes import report_for_page, summary_of, without_jitter
from rdzv.core.report import run_cost, status_as_of, status_json
from rdzv.listeners import Listeners
from rdzv.node.link.head_watcher import HeadWatcher
from rdzv.node.run.status import read_run, read_run_time, read_steps_and_waits, run_wait_reason
from store import StoreError
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.core.history import History
    from rdzv.core.report import Account, RunStatus
    from store import Store

FOLLOWED_FOR: Final = 30.0  # seconds after a run's last refresh until it is no longer followed
IDLE_SHARE: Final = 0.002  # the largest share of its time that a reader spends on steps while no member reports any


class FollowedRun:
    """A run and its last read state; it calls `on_change` when one of the run's keys has changed."""

    def __init__(self, store: Store, keys: Keys, on_change: Callable[[], object]) -> None:
        self._store = store
        self._keys = keys
        self._on_change = on_change
        self._follower = HeadWatcher(store, keys)
        self._follower.on_change = self._mark_changed
        self._is_stale = True
        self._read: tuple[RunStatus, History] | None = None
        self._read_at = 0.0
        self._steps_from = 0.0
        self._version = self._reported = self._streamed = 0
        self._report: dict[str, Any] = {}
        self._stream: dict[str, Any] = {}
        self.used_at: float = store.time()
        following = (self._follower.run(), self._watch_prefix(keys.nodes), self._watch_prefix(keys.unfits))
        self._tasks = [asyncio.create_task(one, name=f"follow run {keys.run_id}") for one in following]

    @property
    def has_watch_ended(self) -> bool:
        """True if a watch of the run has ended, so that changes go unnoticed."""
        return any(task.done() for task in self._tasks)

    async def aclose(self) -> None:
        """Stop following the run."""
        await cancel_and_wait(*self._tasks)

    def _mark_changed(self) -> None:
        self._is_stale = True
        self._on_change()

    async def _watch_prefix(self, prefix: str) -> None:
        try:
            async with self._store.watch(prefix) as watch:
                self._mark_changed()  # the run may have changed before the watch was open
                async for _ in watch.batches():
                    self._mark_changed()
        except StoreError:
            self._mark_changed()

    async def refresh(self) -> None:
        """Read the run again if changed, or else its steps; raise StoreError on failure."""
        await self._follower.synced.wait()
        if self._follower.error is not None:
            raise self._follower.error
        self.used_at = began = self._store.time()
        if self._is_stale or self._read is None:
            self._is_stale = False
            try:
                time_of_day = await read_run_time(self._store, self._keys)
                self._read = await read_run(self._store, self._keys, self._follower.head, time_of_day=time_of_day)
            except BaseException:
                self._is_stale = True
                raise
            self._read_at = began
            self._version += 1
        elif began >= self._steps_from:
            status, history = self.current_status()
            members = {member.node_id for member in status.members}
            steps, awaits = await read_steps_and_waits(self._store, self._keys, self._follower.head, members)
            self._steps_from = began if steps else began + (self._store.time() - began) / IDLE_SHARE
            if steps or status.steps:
                self._read, self._read_at = (replace(status, steps=steps, awaits=awaits), history), began
                self._version += 1

    def current_status(self) -> tuple[RunStatus, History]:
        """Return the last status read, with its durations as of now, and the history."""
        assert self._read is not None, "it was refreshed"
        (status, history), now = self._read, self._store.time()
        later = status_as_of(status, now - self._read_at, reason="")
        return replace(later, reason=run_wait_reason(self._follower.head, later, now=now)), history

    def unix_time(self) -> float:
        """Return the run's present Unix time, by its coordinator's clock."""
        assert self._read is not None, "it was refreshed"
        return self._read[0].now + self._store.time() - self._read_at

    def run_cost(self) -> Account:
        """Return how the run has spent its time, and its losses, until now or its closing."""
        status, history = self.current_status()
        return run_cost(self._keys.run_id, history, now=status.now, waited=status.waited)

    def current_report(self) -> dict[str, Any]:
        """Return the run's report, whose ages are those of the last reading of the run."""
        if self._reported != self._version:
            self._report, self._reported = status_json(self.current_status()[0]), self._version
        return self._report

    def web_page_state(self) -> dict[str, Any]:
        """Return what a page shows: cost, count of events, report without ages; the same object until a new reading."""
        if self._streamed != self._version:
            assert self._read is not None, "it was refreshed"
            history = self._read[1]
            happened = history.past.rounds + sum(1 + len(one.incidents) for one in history.chapters)
            told = report_for_page(self.current_report()) | {"happened": happened, "cost": self.run_cost().as_json()}
            self._stream, self._streamed = without_jitter(self._stream, told), self._version
        return self._stream

    def summary(self) -> dict[str, Any]:
        """Return this run's values for the metrics."""
        return summary_of(self.current_report(), self.run_cost(), self.current_status()[1].chapters, self.unix_time())


class FollowedRuns:
    """The runs of a store that displays read, each watched until it is unused for a while."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._runs: dict[str, FollowedRun] = {}
        self.changed: set[str] = set()  # names of pages that changed since they were last read; the reader removes them
        self.listeners: Listeners = Listeners()

    def _note_change(self, run_id: str) -> None:
        self.changed |= {"", run_id, f"{run_id}/"}  # names of pages: the list of runs, this run's report, its stream
        self.listeners.notify()

    async def follow_and_refresh(self, run_id: str) -> FollowedRun:
        """Return a run, and follow it from now on; raise StoreError if that fails."""
        run = self._runs.get(run_id)
        if run is None or run.has_watch_ended:
            keys = Keys(self._prefix, run_id)
            self._runs[run_id] = FollowedRun(self._store, keys, partial(self._note_change, run_id))
            if run is not None:
                await run.aclose()
        await self._runs[run_id].refresh()
        return self._runs[run_id]

    def unix_time(self, run_id: str) -> float:
        """Return a run's time of day, or this machine's if the run is not followed."""
        return self._runs[run_id].unix_time() if run_id in self._runs else time.time()

    async def summary_of(self, run_id: str) -> dict[str, Any]:
        """Return an ended run's values for the metrics, without following the run."""
        run = FollowedRun(self._store, Keys(self._prefix, run_id), int)
        try:
            await run.refresh()
            return run.summary()
        finally:
            await run.aclose()

    async def drop_unused(self, unused_for: float = FOLLOWED_FOR) -> None:
        """Stop following runs not read for `unused_for` seconds."""
        now = self._store.time()
        for run_id in [run_id for run_id, run in self._runs.items() if now - run.used_at >= unused_for]:
            await self._runs.pop(run_id).aclose()
