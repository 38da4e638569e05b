"""The figures of a store and its runs, in the format of Prometheus."""

from __future__ import annotations

import asyncio
import platform
from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
from prometheus_client import CollectorRegistry, Histogram, Info, ProcessCollector, generate_latest

from rdzv._version import __version__
from rdzv.core.state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

CONTENT_TYPE = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}

ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
LAG_EVERY = 1.0  # seconds between measurements
LAG_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)  # seconds

COUNTERS = {
    "requests": "Requests carried out since the store was started.",
    "leases_lapsed": "Leases that have lapsed.",
    "connections_refused": "Connections that were refused or closed by the server.",
    "bytes_in": "Bytes received.",
    "bytes_out": "Bytes sent.",
    "log_bytes": "Bytes of the log of the database, which is long while another program reads that.",
    "commits": "Commits to the disk.",
    "commit_seconds": "Seconds that commits to the disk have taken.",
}
GAUGES = {
    "revision": "The last revision: one step per change.",
    "keys": "Keys that it holds.",
    "stored_bytes": "Bytes of keys and values.",
    "groups": "Groups of keys whose share is limited: the runs.",
    "history_bytes": "Bytes of changes that are kept for watches to resume from.",
    "compacted_revision": "The last revision of which the change is not kept any more.",
    "leases": "Leases that are alive.",
    "watches": "Watches that are open.",
    "waits": "Requests that wait for a key.",
    "parked_bytes": "Bytes of requests that wait.",
    "sessions": "Sessions of clients, also of those that are away.",
    "replies_bytes": "Bytes of replies that are kept until they are acknowledged.",
    "unread_bytes": "Bytes of earlier revisions that are kept for listings which were not read to their end.",
    "memory_bytes": "Bytes that all of this takes, as memory_bytes_max counts them.",
    "connections": "Connections that are open.",
    "strangers": "Connections without a valid hello yet, or without a request over HTTP just now.",
    "connection_bytes": "Bytes that connections take, whatever they do.",
    "outbox_bytes": "Bytes that wait to be sent.",
    "inbox_bytes": "Bytes that were received, and are not carried out.",
    "journal_bytes": "Bytes of the journal on the disk.",
    "uptime_seconds": "Since the server was started.",
    "session_ttl_seconds": "For how long a session is kept whose client is away.",
    "handshake_timeout_seconds": "Within which a client must say hello.",
}
"""A figure of the store in neither COUNTERS nor GAUGES has its name as help text."""

IN_SECONDS = ("uptime", "_ttl", "_timeout")
OF_RUNS = {
    "members": "Live members of the last round.",
    "waiting": "Nodes that wait for the next round.",
    "spares": "Nodes for which there is no room.",
    "missing": "Nodes that have gone from the last round and are not back.",
    "banned": "Nodes that are banned.",
    "stuck": "Members that begin no step while others get on.",
    "slow": "Members below 80 % of the median rate, or 10 s behind.",
    "accused": "Members of which another one says that they do not answer.",
    "draining": "Nodes that are to leave.",
    "busy": "Members that have said so.",
    "world_size": "Members that the last round had when it completed.",
}
OF_STEPS = {
    "step": ("The last step that a member has begun.", "step", False),
    "step_age_seconds": ("How long ago that was.", "step_at", True),
    "step_rate": ("Steps a second, lately.", "step_rate", False),
}
"""Metrics of members: the help text, the field of the summary, and True if that field is a time, not a duration."""

OF_TIME = "Seconds since the run began: with a round, regrouping, waiting."
LINES_AT_ONCE = 500  # lines made in one turn of the loop, in a millisecond or two

Sample = tuple[tuple[str, ...], float]
"""The values of a metric's labels, in order, and the metric's value."""


class ProcessMetrics:
    """A process's metrics: release, resources, and loop lag, under the name in `lag`."""

    def __init__(self, lag: str) -> None:
        self.registry: CollectorRegistry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        build = Info("rdzv_build", "The release of rdzv, and of Python.", registry=self.registry)
        build.info({"version": __version__, "python": platform.python_version()})
        text = "How much later than asked the event loop woke a sleeper."
        self._lag = Histogram(lag, text, buckets=LAG_BUCKETS, registry=self.registry)

    async def measure_loop_lag(self, then: Callable[[], None] = lambda: None) -> None:
        """Measure the lag of the running loop until cancelled; call `then` after each measurement."""
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time() + LAG_EVERY
            await anyio.sleep(LAG_EVERY)
            self._lag.observe(max(loop.time() - asked, 0.0))
            then()

    def text(self) -> str:
        """Return the metrics as text."""
        return str(generate_latest(self.registry), "utf-8")


class StoreMetrics:
    """A store's metrics."""

    def __init__(self) -> None:
        self.process: ProcessMetrics = ProcessMetrics("rdzv_loop_lag_seconds")
        self._requests = Histogram(
            "rdzv_store_request_seconds",
            "How long requests took to carry out, by kind and outcome.",
            labelnames=("kind", "outcome"),
            buckets=(0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.05, 0.5),
            registry=self.process.registry,
        )

    def observe_request(self, kind: str, outcome: str, seconds: float) -> None:
        """Record a request that the server has carried out."""
        self._requests.labels(kind, outcome).observe(seconds)

    async def text(self, figures: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], *, ended: int) -> str:
        """Return all metrics as text, made in many turns of the loop; `ended` is the number of runs without nodes."""
        pieces = [self.process.text()]
        lines: list[str] = []
        for line in chain(_store_metric_lines(figures, ended), _run_metric_lines(runs)):
            lines.append(line)
            if len(lines) == LINES_AT_ONCE:
                pieces.append("".join(lines))
                lines.clear()
                await anyio.lowlevel.checkpoint()
        return "".join([*pieces, *lines])


def metric(name: str, kind: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Iterator[str]:
    """Yield one metric in the text format of Prometheus."""
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for values, value in samples:
        named = ",".join(f'{label}="{one.translate(ESCAPES)}"' for label, one in zip(labels, values, strict=True))
        yield f"{name}{{{named}}} {float(value)}\n" if named else f"{name} {float(value)}\n"


def _store_metric_lines(figures: Mapping[str, Any], ended: int) -> Iterator[str]:
    numbers = {
        name: value
        for name, value in figures.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    for name, value in numbers.items():
        if name in COUNTERS:
            yield from metric(f"rdzv_store_{name}_total", "counter", COUNTERS[name], (), [((), value)])
        elif not name.endswith("_max"):
            full = f"{name}_seconds" if name.endswith(IN_SECONDS) else name
            text = GAUGES.get(full, f"{name} of rdzv stats.")
            yield from metric(f"rdzv_store_{full}", "gauge", text, (), [((), value)])
    limits = (((name,), value) for name, value in numbers.items() if name.endswith("_max"))
    yield from metric("rdzv_store_limit", "gauge", "The limits of the store.", ("limit",), limits)
    yield from metric("rdzv_runs_ended", "gauge", "Runs without any nodes.", (), [((), ended)])


def _run_metric_lines(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name, text in OF_RUNS.items():
        yield from metric(f"rdzv_run_{name}", "gauge", text, ("run",), (((run["run_id"],), run[name]) for run in runs))
    for name, (text, field, is_hour) in OF_STEPS.items():
        every = ((run, node_id, one[field]) for run in runs for node_id, one in run["steps"].items())
        steps = [
            ((node_id, run["run_id"]), max(run["now"] - value, 0.0) if is_hour else value)
            for run, node_id, value in every
        ]
        yield from metric(f"rdzv_run_{name}", "gauge", text, ("node", "run"), steps)
    rounds = (((run["run_id"],), 0 if run["round"] is None else run["round"] + 1) for run in runs)
    yield from metric("rdzv_run_rounds_completed_total", "counter", "Rounds that have completed.", ("run",), rounds)
    lost = (((reason or "not known", run["run_id"]), count) for run in runs for reason, count in run["lost"].items())
    yield from metric("rdzv_run_nodes_lost_total", "counter", "Members that were lost.", ("reason", "run"), lost)
    spent = (((run["run_id"], what), seconds) for run in runs for what, seconds in run["spent"].items())
    yield from metric("rdzv_run_seconds_total", "counter", OF_TIME, ("run", "spent"), spent)
    met = (((run["run_id"],), run["met"]) for run in runs if run["met"] is not None)
    text = "Last arrival to completion of the last round."
    yield from metric("rdzv_run_last_meeting_seconds", "gauge", text, ("run",), met)
    phases = (((phase.value, run["run_id"]), run["phase"] == phase.value) for run in runs for phase in Phase)
    yield from metric("rdzv_run_phase", "gauge", "1 for the phase that a run is in.", ("phase", "run"), phases)
