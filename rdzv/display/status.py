"""A run's status as lines of text, and the screen of `rdzv status --watch`, made of such lines.

If the store does not answer, the first line of the screen says so, and the other lines are old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rdzv._version import __version__
from rdzv.config.resizing import describe_size
from rdzv.core.absent import node_label
from rdzv.core.report import count_states, node_states, run_state, run_steps_overview, status_as_of
from rdzv.display.history import utc_time
from store.net.address import join_host_port
from store.printable import printable, short_names, time_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rdzv.core.report import Account, RunStatus

NAMED_MOST = 4  # node ids in a line about nodes refused for the same reason
SETTINGS_SHOWN = ("min_nodes", "max_nodes", "node_unit", "last_call_timeout")


def summary_lines(status: RunStatus) -> list[str]:
    """Return the first lines of a status: phase and reason, round, numbers of nodes, settings."""
    pace = run_steps_overview(status)
    found = count_states(status, node_states(status, pace))
    lines = [
        f"run {status.run_id}: {status.phase.value}: {status.reason}",
        f"state: {run_state(status, pace, found)[1]}",
    ]
    if status.round is not None and status.bootstrap is not None:
        where = join_host_port(*status.bootstrap)
        lines.append(f"round {status.round}: world size {status.world_size}, rank 0 at {where}")
    counts = {name: found[name] for name in ("members", "waiting", "spares", "missing")}
    counts["refused"] = len(status.refused)
    shown = ", ".join(
        f"{count:,} {name if count != 1 else name.removesuffix('s')}"
        for name, count in counts.items()
        if count or name == "members"
    )
    lines.append(f"{shown}; coordinator: {_node_name(status, status.coordinator) if status.coordinator else 'none'}")
    if settings := [f"{name}={status.settings[name]}" for name in SETTINGS_SHOWN if name in status.settings]:
        lines.append(f"settings: {', '.join(settings)}")
    if len(status.releases) > 1 or (status.releases and __version__ not in status.releases):
        counts = dict(sorted(status.releases.items()))
        lines.append("releases: " + ", ".join(f"{count} nodes of {release}" for release, count in counts.items()))
    return lines


def describe_store_health(health: Mapping[str, Any]) -> str:
    """Return the store's response time and how much of its limits is used, in words."""
    figures = health["figures"]
    parts = [f"answers in {health['answers_in'] * 1000:.1f} ms"]
    for name, what in (("keys", "keys"), ("memory_bytes", "bytes of memory"), ("connections", "connections")):
        if name in figures:
            most = f" of {figures[f'{name}_max']:,}" if f"{name}_max" in figures else ""
            parts.append(f"{figures[name]:,}{most} {what}")
    return "; ".join(parts)


def problem_lines(status: RunStatus) -> list[str]:
    """Return lines about missing, stuck, slow, accused, draining, refused and waiting nodes, and a pending resize."""
    lines = [f"    missing  {_node_name(status, one.node_id)}: {one.describe()}" for one in status.missing]
    if status.missing_count > len(status.missing):
        lines.append(f"    missing  and {status.missing_count - len(status.missing)} more")
    pace = run_steps_overview(status)
    for kind, found in (("stuck", pace.stuck), ("slow", pace.slow)):
        lines.extend(f"  {kind:>9}  {node_id}: {why}" for node_id, why in found.items())
    lines.extend(f"    accused  {node_id}: by {by}: {why}" for node_id, by, why in status.accused)
    for node_id, (seconds_left, reason) in status.draining.items():
        lines.append(f"   draining  {node_id}: leaves within {seconds_left:.0f} s{f': {reason}' if reason else ''}")
    if status.resized is not None:
        size = describe_size(status.resized.min_nodes, status.resized.max_nodes)
        why = f": {status.resized.reason}" if status.resized.reason else ""
        lines.append(f"    resized  to {size} from the next round on, by {status.resized.by}{why}")
    by_reason: dict[str, list[str]] = {}
    for node_id, reason in status.refused.items():
        by_reason.setdefault(reason, []).append(node_id)
    lines.extend(
        f"    refused  {short_names(node_ids, NAMED_MOST)}: {reason}" for reason, node_ids in by_reason.items()
    )
    for node_id in status.waiting:
        kind = "spare" if node_id in status.spares else "waiting"
        lines.append(f"  {kind:>9}  {_node_name(status, node_id)}{_arrival_text(status, node_id)}")
    return lines


def member_lines(status: RunStatus, most: int | None = None) -> list[str]:
    """Return a line for each of the first `most` members: rank, node, address, time of arrival, step, attributes."""
    return [
        f"  rank {member.rank:>4}  {member.node_id}  {member.address}{_arrival_text(status, member.node_id)}"
        + _step_text(status, member.node_id)
        + _wait_text(status, member.node_id)
        + "".join(f"  {name}={value}" for name, value in member.attributes.items())
        for member in status.members[:most]
    ]


def _node_name(status: RunStatus, node_id: str) -> str:
    return node_label(node_id, status.addresses.get(node_id))


def _step_text(status: RunStatus, node_id: str) -> str:
    steps = status.steps.get(node_id)
    if steps is None:
        return ""
    busy = f", busy with {steps.busy}" if steps.busy else ""
    if steps.step is None:
        return f"  no step yet{busy}"
    rate = f", {steps.rate:.3g}/s" if steps.rate else ""
    return f"  step {steps.step:,}, {time_text(steps.age)} ago{rate}{busy}"


def _wait_text(status: RunStatus, node_id: str) -> str:
    if node_id not in status.awaits:
        return ""
    key, seconds = status.awaits[node_id]
    return f"  waits {time_text(seconds)} in the round's store{key and f', for {key}'}"


def _arrival_text(status: RunStatus, node_id: str) -> str:
    at = status.since.get(node_id)
    return "" if at is None else f"  since {utc_time(at)}"


class Line(NamedTuple):
    """A line of the screen. `meant` is its colour: "bad", "good", "soft" or ""; if `may_be_cut`, it does not wrap."""

    text: str
    meant: str = ""
    may_be_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopData:
    """The contents of a screen. Times are in seconds."""

    status: RunStatus
    cost: Account | None = None  # the run's cost when `status` was read
    read_ago: float = 0.0  # seconds since `status` was read
    silent_for: float | None = None  # the time without an answer of the store; None if it answers
    answers_in: float = 0.0  # the duration of the last round trip to the store


def screen_lines(frame: TopData, *, height: int) -> list[Line]:
    """Return the screen's lines; the caller crops those beyond `height`."""
    status = status_as_of(frame.status, frame.read_ago, reason=frame.status.reason)
    first, *rest = summary_lines(status)
    lines = [_answer_time_line(frame), Line(first, "bad" if status.missing_count else "good" if status.members else "")]
    lines += map(Line, rest)
    if frame.cost is not None:
        lines.append(Line(str(frame.cost), "soft"))
    texts, most = problem_lines(status), max(height // 2, 1)
    lines += [Line(text, "bad" if text.lstrip().startswith("missing") else "") for text in texts[:most]]
    if len(texts) > most:
        unnamed = max(status.missing_count - len(status.missing) - 1, 0)  # `texts` has one line for all unnamed nodes
        lines.append(Line(f"             and {len(texts) - most + unnamed:,} more that are missing, refused or wait"))
    lines += [Line(text, may_be_cut=True) for text in member_lines(status, height)]
    return [line._replace(text=printable(line.text)) for line in lines]


def _answer_time_line(frame: TopData) -> Line:
    if frame.silent_for is not None:
        text = f"the store has not answered for {time_text(frame.silent_for)}; what follows is as it was before"
        return Line(text, "bad")
    return Line(f"the store answers in {frame.answers_in * 1000:.1f} ms; q quits", "soft")
