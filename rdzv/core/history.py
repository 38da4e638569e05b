"""Pure: what happened in a run, round by round: kept by its coordinators, told in words and as a timeline.

Each round is a chapter, and the last chapters are one key, which the coordinator writes in the transactions that it
makes anyway: with the commit, and with a progress that tells of members that have gone or of the closing. There are at
most `CHAPTERS_MOST` in `BYTES_MOST` bytes, the oldest being forgotten first, and each names at most `NAMED_MOST` nodes
at a time: a run that goes on for months takes no more room than that.

Times are durations, since no two hosts agree on the hour: how long after its predecessor a round completed, and how far
into a round something happened, each on the clock of one coordinator that knew of both moments. A coordinator that
came to the run after the round had completed does not know; then the time is None, and the order is what remains.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgpack

from rdzv.core.named import named
from rdzv.core.plain_data import pack, unpack
from rdzv.core.state import NAMED_MOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rdzv.core.state import Closed, Progress

__all__ = [
    "BYTES_MOST",
    "CHAPTERS_MOST",
    "Chapter",
    "Chronicle",
    "Incident",
    "describe",
    "pack_chapters",
    "timeline",
    "unpack_chapters",
]

CHAPTERS_MOST: Final = 128
"""Rounds that are remembered."""

BYTES_MOST: Final = 64 * 1024
"""What they may take together, so that a commit stays small. Where there are a dozen nodes, 128 rounds take less."""

INCIDENTS_MOST: Final = 64
"""Incidents of one round that are remembered, the first ones: losses that come together are one."""

GIVEN_UP: Final = "given up"

UNKNOWN_SECONDS: Final = 1.0
"""How wide a time that nobody knows is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that happened while a round stood.

    Attributes:
        kind: "lost", "left", "closed" or "given up".
        after: Seconds since the round completed; None if nobody knows.
        count: How many nodes.
        node_ids: The first of them, by name.
        reason: Why it was closed, and by whom; or why it was given up.
    """

    kind: str
    after: float | None
    count: int = 0
    node_ids: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One round.

    Attributes:
        number: Counted from 0.
        size: How many members it had.
        node_ids: The first of them, by rank.
        joined: How many of them had not been in the round before.
        joined_ids: The first of these, by rank.
        after: Seconds since the round before was complete; None if nobody knows, or there was none.
        incidents: What happened to it.
        addresses: Where each of the named members was reached, if that says more than its name.
    """

    number: int
    size: int
    node_ids: tuple[str, ...]
    joined: int
    joined_ids: tuple[str, ...]
    after: float | None = None
    incidents: tuple[Incident, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def pack_chapters(chapters: Sequence[Chapter]) -> bytes:
    """Pack the chapters; leave out the oldest until they fit into `BYTES_MOST`."""
    packed = [_packed(chapter) for chapter in chapters[-CHAPTERS_MOST:]]
    size = sum(map(len, packed))
    while len(packed) > 1 and size > BYTES_MOST:
        size -= len(packed.pop(0))
    return bytes(msgpack.Packer().pack_array_header(len(packed))) + b"".join(packed)


def unpack_chapters(value: bytes) -> tuple[Chapter, ...]:
    """Unpack what the key holds.

    Raises:
        RendezvousStateError: It is no history of ours.
    """
    return unpack("the history", value, lambda plain: tuple(map(_unpacked, plain)))


def _packed(chapter: Chapter) -> bytes:
    plain = {
        "number": chapter.number,
        "size": chapter.size,
        "nodes": list(chapter.node_ids),
        "at": [chapter.addresses.get(node_id, "") for node_id in chapter.node_ids] if chapter.addresses else [],
        "joined": chapter.joined,
        "joined_ids": list(chapter.joined_ids),
        "after": chapter.after,
        "incidents": [[one.kind, one.after, one.count, list(one.node_ids), one.reason] for one in chapter.incidents],
    }
    return pack(plain)


def _unpacked(plain: Mapping[str, Any]) -> Chapter:
    node_ids = tuple(map(str, plain["nodes"]))
    return Chapter(
        number=int(plain["number"]),
        size=int(plain["size"]),
        node_ids=node_ids,
        addresses={id: str(at) for id, at in zip(node_ids, plain.get("at", ()), strict=False) if at},
        joined=int(plain["joined"]),
        joined_ids=tuple(map(str, plain["joined_ids"])),
        after=_seconds(plain["after"]),
        incidents=tuple(
            Incident(
                kind=str(kind),
                after=_seconds(after),
                count=int(count),
                node_ids=tuple(map(str, node_ids)),
                reason=str(reason),
            )
            for kind, after, count, node_ids, reason, *_ in plain["incidents"]
        ),
    )


def _seconds(value: object) -> float | None:
    if value is not None and type(value) not in (int, float):
        raise TypeError(f"{value!r:.40} is no number of seconds")
    return None if value is None else float(value)  # type: ignore[arg-type]  # checked above


class Chronicle:
    """What a coordinator remembers in order to write the history: its chapters; the last is about the current round.

    Nothing it hands out counts before `written` says that it stands in the store.
    """

    def __init__(self) -> None:
        self._chapters: tuple[Chapter, ...] = ()
        self._began: float | None = None  # when the last round completed, on this coordinator's clock; None: unknown

    def took_over(self, chapters: Sequence[Chapter], *, began: float | None) -> None:
        """Go on where the last coordinator was; `began` is when this node heard of the round, if it was there."""
        self._chapters, self._began = tuple(chapters), began

    def completed(
        self, number: int, nodes: Mapping[str, str], *, known: Iterable[str], now: float
    ) -> tuple[Chapter, ...]:
        """Return the history with a round that is about to be committed.

        Args:
            number: The round's.
            nodes: Its members by rank, and where each is reached.
            known: Who was in the round before.
            now: Seconds on this coordinator's clock.
        """
        node_ids = list(nodes)
        before = frozenset(known)
        joined = [node_id for node_id in node_ids if node_id not in before]
        chapter = Chapter(
            number=number,
            size=len(node_ids),
            node_ids=tuple(node_ids[:NAMED_MOST]),
            joined=len(joined),
            joined_ids=tuple(joined[:NAMED_MOST]),
            after=self._since(now),
            addresses={id: nodes[id] for id in node_ids[:NAMED_MOST] if nodes[id] not in ("", id)},
        )
        return (*self._chapters[1 - CHAPTERS_MOST :], chapter)

    def continued(self, progress: Progress, closed: Closed | None, *, now: float) -> tuple[Chapter, ...] | None:
        """Return the history with this progress's news of the current round; None if it has none."""
        chapter = self._chapters[-1] if self._chapters else None
        if chapter is None or chapter.number != progress.round or len(chapter.incidents) >= INCIDENTS_MOST:
            return None
        told = chapter.incidents
        after = self._since(now)
        news = []
        for kind, count, node_ids in (
            ("lost", progress.lost, progress.lost_ids),
            ("left", progress.departed, progress.departed_ids),
        ):
            earlier = [one for one in told if one.kind == kind]
            more = count - sum(one.count for one in earlier)
            if more > 0:
                named = {node_id for one in earlier for node_id in one.node_ids}
                fresh = tuple(node_id for node_id in node_ids if node_id not in named)[:more]
                news.append(Incident(kind=kind, after=after, count=more, node_ids=fresh))
        if closed is not None and not any(one.kind == "closed" for one in told):
            by = f"by {closed.by}" if closed.by else ""
            reason = ": ".join(filter(None, (by, closed.reason)))
            news.append(Incident(kind="closed", after=after, reason=reason))
        if progress.given_up and not any(one.kind == GIVEN_UP for one in told):
            news.append(Incident(kind=GIVEN_UP, after=after, reason=progress.given_up.partition(": ")[2]))
        if not news:
            return None
        return (*self._chapters[:-1], replace(chapter, incidents=(*told, *news)[:INCIDENTS_MOST]))

    def written(self, chapters: Sequence[Chapter], *, now: float) -> None:
        """Note that these chapters are in the store now."""
        if not self._chapters or self._chapters[-1].number != chapters[-1].number:
            self._began = now
        self._chapters = tuple(chapters)

    def _since(self, now: float) -> float | None:
        return None if self._began is None else max(now - self._began, 0.0)


# ------------------------------------------------------------------------------------------------------- telling it


def describe(chapters: Sequence[Chapter]) -> list[str]:
    """Return the history as lines of text."""
    lines = []
    for chapter in chapters:
        when = "" if chapter.after is None else f", {chapter.after:.1f} s after the one before"
        nodes = "1 node" if chapter.size == 1 else f"{chapter.size} nodes"
        lines.append(f"round {chapter.number}{when}: {nodes}: {_names(chapter, chapter.node_ids, chapter.size)}")
        if 0 < chapter.joined < chapter.size:
            lines.append(f"         joined: {_names(chapter, chapter.joined_ids, chapter.joined)}")
        for incident in chapter.incidents:
            at = "later" if incident.after is None else f"{incident.after:.1f} s later"
            what = f"{' ' if incident.kind == 'closed' else ': '}{incident.reason}"
            if incident.count:
                what = f": {_names(chapter, incident.node_ids, incident.count)}"
            lines.append(f"         {at}, {incident.kind}{what}".rstrip())
    return lines


def _names(chapter: Chapter, node_ids: Sequence[str], count: int) -> str:
    more = count - len(node_ids)
    shown = [named(node_id, chapter.addresses.get(node_id)) for node_id in node_ids]
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])


def timeline(run_id: str, chapters: Sequence[Chapter]) -> dict[str, Any]:
    """Return the history as Chrome trace events, which https://ui.perfetto.dev and chrome://tracing open.

    A row for the rounds, and one for each node that was named; microseconds since the first round that is remembered.
    A time that nobody knows is drawn a second wide, and says so.
    """
    events: list[dict[str, Any]] = [_named(0, "rounds"), _named(None, f"run {run_id}")]
    rows: dict[str, int] = {}
    began = 0.0
    for position, chapter in enumerate(chapters):
        length = chapters[position + 1].after if position + 1 < len(chapters) else None
        known = [one.after for one in chapter.incidents if one.after is not None]
        ended = max([UNKNOWN_SECONDS, *known]) if length is None else length
        guessed = {} if length is not None else {"end": "not known"}
        details = {"size": chapter.size, "joined": list(chapter.joined_ids), **guessed}
        events.append(_slice(0, f"round {chapter.number}", began, ended, details))
        gone = {node_id: one for one in chapter.incidents for node_id in one.node_ids}
        for rank, node_id in enumerate(chapter.node_ids):
            if node_id not in rows:
                rows[node_id] = len(rows) + 1
                events.append(_named(rows[node_id], node_id))
            end = gone[node_id].after if node_id in gone else None
            there = ended if end is None else min(end, ended)
            events.append(_slice(rows[node_id], f"round {chapter.number}", began, there, {"rank": rank, **guessed}))
        for incident in chapter.incidents:
            at = began + (UNKNOWN_SECONDS if incident.after is None else incident.after)
            details = {"nodes": list(incident.node_ids), "count": incident.count, "reason": incident.reason}
            moment = {"ph": "i", "s": "t", "pid": 1, "ts": at * 1e6} | _what(incident.kind, details)
            named = [rows[node_id] for node_id in incident.node_ids if node_id in rows]
            events.extend(moment | {"tid": row} for row in named or [0])
        began += ended
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run_id": run_id}}


def _named(row: int | None, name: str) -> dict[str, Any]:
    """Name a row; None names the whole process."""
    kind = "process_name" if row is None else "thread_name"
    return {"ph": "M", "pid": 1, "tid": row or 0, "name": kind, "args": {"name": name}}


def _slice(row: int, name: str, began: float, seconds: float, details: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": row, "ts": began * 1e6, "dur": seconds * 1e6} | _what(name, details)


def _what(name: str, details: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "args": dict(details)}
