"""Shell: the figures of a store and its runs, in the format of Prometheus. Needs the extra `http`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rdzv.core.state import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["LAG_BUCKETS", "Metrics"]

LAG_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)  # seconds

COUNTERS = {
    "requests": "Requests carried out since the store was started.",
    "leases_lapsed": "Leases that have lapsed.",
    "connections_refused": "Connections that were refused or hung up on.",
    "bytes_in": "Bytes received.",
    "bytes_out": "Bytes sent.",
    "commits": "Commits to the disk.",
    "commit_seconds": "Seconds that commits to the disk have taken.",
}
GAUGES = {
    "revision": "The last revision: one step per change.",
    "keys": "Keys that it holds.",
    "stored_bytes": "Bytes of keys and values.",
    "groups": "Groups of keys whose share is limited: the runs.",
    "group_parts": "How many parts of a key name its group.",
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
    "strangers": "Connections that have proved nothing, or ask nothing just now over HTTP.",
    "connection_bytes": "Bytes that connections take, whatever they do.",
    "outbox_bytes": "Bytes that wait to be sent.",
    "inbox_bytes": "Bytes that were received, and are not carried out.",
    "journal_bytes": "Bytes of the journal on the disk.",
    "uptime_seconds": "Since the server was started.",
    "session_ttl_seconds": "For how long a session is kept whose client is away.",
    "handshake_timeout_seconds": "Within which a client must say hello.",
    "frame_timeout_seconds": "Within which a frame that was begun must be whole.",
}
"""Of figures that are not here, the name says what they are."""

IN_SECONDS = ("uptime", "_ttl", "_timeout")
OF_RUNS = {
    "members": "Live members of the last round.",
    "waiting": "Nodes that wait for the next round.",
    "spares": "Nodes for which there is no room.",
    "missing": "Nodes that have gone from the last round and are not back.",
    "banned": "Nodes that are banned.",
    "world_size": "Members that the last round had when it completed.",
}
OF_STEPS = {
    "step": "The last step that a member has begun.",
    "step_age_seconds": "How long ago that was.",
    "step_rate": "Steps a second, lately.",
}
"""Only of runs whose members say it."""


class Metrics:
    """What `/metrics` says. A registry of its own: whoever embeds a store may have one for the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._figures: Mapping[str, Any] = {}
        self._runs: Sequence[Mapping[str, Any]] = ()
        self.loop_lag: Histogram = Histogram(
            "rdzv_loop_lag_seconds",
            "How much later than asked the event loop woke a sleeper.",
            buckets=LAG_BUCKETS,
            registry=self._registry,
        )
        self._requests = Histogram(
            "rdzv_store_request_seconds",
            "How long requests took to carry out, by kind and outcome.",
            labelnames=("kind", "outcome"),
            buckets=(0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.05, 0.5),
            registry=self._registry,
        )

    def request(self, kind: str, outcome: str, seconds: float) -> None:
        """Count a request that was carried out."""
        self._requests.labels(kind, outcome).observe(seconds)

    def text(self, figures: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> bytes:
        """Return all metrics, given what the server and its runs show now."""
        self._figures, self._runs = figures, runs
        text: bytes = generate_latest(self._registry)
        return text

    def collect(self) -> Iterator[Metric]:
        """Yield what there is; called by the registry."""
        limits = GaugeMetricFamily("rdzv_store_limit", "What the store does not go beyond.", labels=["limit"])
        for name, value in self._figures.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if name in COUNTERS:
                yield CounterMetricFamily(f"rdzv_store_{name}", COUNTERS[name], value=value)
            elif name.endswith("_max"):
                limits.add_metric([name], value)
            else:
                full = f"{name}_seconds" if name.endswith(IN_SECONDS) else name
                yield GaugeMetricFamily(f"rdzv_store_{full}", GAUGES.get(full, f"{name} of rdzv stats."), value=value)
        yield limits
        for name, text in OF_RUNS.items():
            gauge = GaugeMetricFamily(f"rdzv_run_{name}", text, labels=["run"])
            for run in self._runs:
                gauge.add_metric([run["run_id"]], run[name])
            yield gauge
        for name, text in OF_STEPS.items():
            gauge = GaugeMetricFamily(f"rdzv_run_{name}", text, labels=["run", "node"])
            for run in self._runs:
                for node_id, values in run["steps"].items():
                    gauge.add_metric([run["run_id"], node_id], values[name])
            yield gauge
        completed = CounterMetricFamily("rdzv_run_rounds_completed", "Rounds that have completed.", labels=["run"])
        phases = GaugeMetricFamily("rdzv_run_phase", "1 for the phase that a run is in.", labels=["run", "phase"])
        for run in self._runs:
            completed.add_metric([run["run_id"]], 0 if run["round"] is None else run["round"] + 1)
            for phase in Phase:
                phases.add_metric([run["run_id"], phase.value], float(run["phase"] == phase.value))
        yield completed
        lost = CounterMetricFamily("rdzv_run_nodes_lost", "Members that were lost.", labels=["run", "reason"])
        spent = CounterMetricFamily(
            "rdzv_run_seconds",
            "Seconds since the run began: with a round, regrouping, waiting.",
            labels=["run", "spent"],
        )
        met = GaugeMetricFamily(
            "rdzv_run_last_meeting_seconds", "Last arrival to completion of the last round.", labels=["run"]
        )
        for run in self._runs:
            for reason, count in run["lost"].items():
                lost.add_metric([run["run_id"], reason or "not known"], count)
            for what, seconds in run["spent"].items():
                spent.add_metric([run["run_id"], what], seconds)
            if run["met"] is not None:
                met.add_metric([run["run_id"]], run["met"])
        yield lost
        yield spent
        yield met
        yield phases
