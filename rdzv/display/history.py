"""A run's history as lines of text, as JSON, and as a timeline."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rdzv.core.absent import node_label
from rdzv.core.report import find_closing_incident, long_duration, round_lengths
from store.printable import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rdzv.core.history import Chapter, History, Incident
    from rdzv.core.report import Account
    from store.records import Record

VERSION: Final = 1
"""The version of `history_as_json`'s result; it increases when a field is removed or changes its meaning."""


def utc_time(at: float | None) -> str:
    """Return a Unix time as text in UTC; an empty text for None."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def history_text(history: History) -> list[str]:
    """Return a run's history as lines of text."""
    lines = []
    if history.past.rounds:
        begun = utc_time(history.past.since)
        lines.append(f"{history.past.rounds} earlier rounds are forgotten{begun and f'; the run began at {begun}'}")
    for chapter, length in zip(history.chapters, round_lengths(history.chapters, None), strict=True):
        begun = utc_time(chapter.at)
        when = "" if chapter.after is None else f", {chapter.after:.1f} s after the one before"
        names = _names_in_words(chapter, chapter.node_ids, chapter.size)
        lines.append(f"{begun and f'{begun}  '}round {chapter.number}{when}: {plural(chapter.size)}: {names}")
        if 0 < chapter.joined < chapter.size:
            lines.append(f"         joined: {_names_in_words(chapter, chapter.joined_ids, chapter.joined)}")
        lines.extend(_describe_incident(chapter, incident) for incident in chapter.incidents)
        if chapter.stopped is not None and chapter is not history.chapters[-1]:
            outage = max(length - chapter.stopped, 0.0)
            short = min(chapter.short, outage)
            what = f"{outage:.1f} s meeting again" + (f", {short:.1f} s of them waiting for nodes" if short else "")
            lines.append(f"         {chapter.stopped:.1f} s later, {what}")
    return lines


def _describe_incident(chapter: Chapter, incident: Incident) -> str:
    at = "later" if incident.after is None else f"{incident.after:.1f} s later"
    clock = utc_time(incident.at)[11:]
    what = f"{' ' if incident.kind == 'closed' else ': '}{incident.reason}".rstrip()
    if incident.count:
        names = _names_in_words(chapter, incident.node_ids, incident.count)
        what = f": {names}: {incident.reason}" if incident.reason else f": {names}"
    return f"         {at}{clock and f' ({clock})'}, {incident.kind}{what}"


def _names_in_words(chapter: Chapter, node_ids: Sequence[str], count: int) -> str:
    more = count - len(node_ids)
    shown = [node_label(node_id, chapter.addresses.get(node_id)) for node_id in node_ids]
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])


def history_as_json(run_id: str, history: History, cost: Account) -> dict[str, Any]:
    """Return the history as JSON types; `docs/history.schema.json` describes the fields."""
    return {
        "version": VERSION,
        "run_id": run_id,
        "cost": cost.as_json(),
        "forgotten": {"rounds": history.past.rounds, "since": history.past.since},
        "rounds": [
            _history_item_as_json(chapter, without=("node_ids", "reached_at"))
            | {
                "members": list(chapter.node_ids),
                "addresses": chapter.addresses,
                "incidents": [_history_item_as_json(one) for one in chapter.incidents],
            }
            for chapter in history.chapters
        ],
    }


def _history_item_as_json(noun: Record, *, without: Collection[str] = ()) -> dict[str, Any]:
    values = {name: getattr(noun, name) for name in noun.fields if name not in without}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


class TimelineSpan(NamedTuple):
    """A part of a row of the timeline; a tuple, as a page may show thousands."""

    kind: str  # "round", "meeting" (members meet again), "lost", "left" or "closed"
    began: float  # seconds from the timeline's beginning to the span's
    seconds: float
    text: str


def timeline(run_id: str, history: History, *, now: float | None = None) -> dict[str, Any]:
    """Return the remembered rounds as rows of spans: one row `rounds`, and a row per node in order of appearance.

    If a round has more than 64 members, only the first 64 and the lost and departed ones have rows, and `note` says so.
    `now` is the run's time of day, as Unix time; None ends the timeline with the last known event.
    """
    bands: list[tuple[Any, ...]] = []  # spans; a round's tuple ends with its number and size
    rows: dict[str, list[tuple[Any, ...]]] = {}  # spans by node id; an absence's tuple ends with its reason
    away: dict[str, tuple[str, float, str]] = {}  # absent nodes by id: kind, time and reason of the absence
    began = 0.0

    def end_absence(node_id: str) -> None:
        if node_id in away:
            kind, since, why = away.pop(node_id)
            text = f"{kind}{f': {why}' if why else ''}; away for {long_duration(began - since)}"
            rows[node_id].append((*_new_span(kind, since, began - since, text), why))

    for chapter, length in zip(history.chapters, round_lengths(history.chapters, now), strict=True):
        gone = {node_id: one for one in chapter.incidents if one.kind in ("lost", "left") for node_id in one.node_ids}
        stopped = _trained_seconds(chapter, length)
        text = f"round {chapter.number}: {plural(chapter.size)}"
        bands.append((*_new_span("round", began, stopped, text), chapter.number, chapter.size))
        if length > stopped:
            what = f"{length - stopped:.1f} s without a round, after round {chapter.number}"
            why = "; ".join(_describe_incident(chapter, one).partition(", ")[2] for one in chapter.incidents)
            bands.append(_new_span("meeting", began + stopped, length - stopped, f"{what}: {why}"))
        for node_id in (*chapter.node_ids, *chapter.joined_ids):
            end_absence(node_id)
        ends = {node_id: stopped if one.after is None else min(one.after, length) for node_id, one in gone.items()}
        for rank, node_id in enumerate(chapter.node_ids):
            spans = rows.setdefault(node_id, [])
            text = f"round {chapter.number}, rank {rank}"
            spans.append(_new_span("round", began, min(ends.get(node_id, stopped), stopped), text))
            meets = ends.get(node_id, length) - stopped
            if meets > 0:
                text = f"meeting again after round {chapter.number}"
                spans.append(_new_span("meeting", began + stopped, meets, text))
        for node_id, one in gone.items():
            if node_id not in chapter.node_ids:
                rows.setdefault(node_id, []).append(_new_span("round", began, ends[node_id], f"round {chapter.number}"))
            away[node_id] = one.kind, began + ends[node_id], one.reason
        began += length
        closing = find_closing_incident(chapter)
        if closing is not None:
            bands.append(_new_span("closed", began, 0.0, f"closed {closing.reason}".rstrip()))
    for node_id in list(away):
        end_absence(node_id)
    most = max(history.chapters, key=lambda chapter: chapter.size, default=None)
    note = ""
    if most is not None and most.size > len(most.node_ids):
        note = (
            f"of up to {most.size:,} nodes of a round, the first {len(most.node_ids)} have a row, and those that went"
        )
    return {
        "run_id": run_id,
        "began": history.chapters[0].at if history.chapters else None,
        "seconds": round(began, 3),
        "rounds": bands,
        "nodes": list(rows.items()),
        "note": note,
    }


def _new_span(kind: str, began: float, seconds: float, text: str) -> TimelineSpan:
    return TimelineSpan(kind, round(began, 3), round(max(seconds, 0.0), 3), text)


def _trained_seconds(chapter: Chapter, length: float) -> float:
    """Return the seconds until the round stopped or lost its first member; `length` if neither is known."""
    gone = [one.after for one in chapter.incidents if one.kind in ("lost", "left") and one.after is not None]
    return min([length, *([] if chapter.stopped is None else [chapter.stopped]), *gone])
