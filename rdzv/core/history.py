"""A run's history, as its coordinators keep it.

The last rounds (chapters) are in one key, which the coordinator writes together with each commit, and with each
progress that has a new `Incident`.

A duration is None if the coordinator does not know its beginning or end.

All readers of a run use one *time of day*. The coordinator sets this time by its clock when it commits a round, and
advances it by its monotonic clock. A new coordinator continues from the time in the last progress that it received. The
coordinator's keep-alives carry the time, and the store adds their age, so no reader compares two clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from rdzv.core.absent import LEFT, LOST, Missing
from rdzv.core.state import NAMED_MOST, Phase
from rdzv.core.stored import Prose, Stored
from store.records import Record

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from rdzv.core.state import Closed, Progress, Unban

CHAPTERS_MOST: Final = 128
BYTES_MOST: Final = 64 * 1024  # limit of the history, which each commit contains: about 128 rounds of a dozen nodes
INCIDENTS_MOST: Final = 64  # a chapter keeps its first incidents; simultaneous losses for one reason are one incident
NODES_COUNTED_MOST: Final = 32
REASONS_COUNTED_MOST: Final = 16
REASON_LETTERS_MOST: Final = 200
GIVEN_UP: Final = "given up"


class Incident(Record, kw_only=True):
    """An event during a round."""

    kind: str  # "lost", "left", "closed", "given up", "unbanned" or "store lost"
    after: float | None  # seconds from the round's completion to the event; None if unknown
    count: int = 0
    node_ids: tuple[str, ...] = ()  # the ids of the first nodes that were lost or left
    reason: Prose = ""  # why it happened, and by whose command; empty if unknown
    at: float | None = None  # the Unix time of the event; None if not recorded


class Chapter(Record, kw_only=True):
    """One round in a run's history."""

    number: int  # from 0
    size: int
    node_ids: tuple[str, ...]  # the ids of the first members, by rank
    joined: int  # how many members were not in the previous round
    joined_ids: tuple[str, ...]  # the ids of the first new members, by rank
    after: float | None = None  # seconds since the previous round completed; None if unknown, or for the first round
    incidents: tuple[Incident, ...] = ()
    reached_at: tuple[str, ...] = ()  # the address of each node in `node_ids`; "" if the address is the id
    at: float | None = None  # the Unix time of the completion; None if not recorded
    met: float | None = None  # seconds from the last arrival to the round's completion; None if unknown
    stopped: float | None = None  # seconds from the completion until a member was gone; None if none was, or if unknown
    short: float = 0.0  # seconds with too few nodes for a round, after the first member was gone

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses by id of the members in `node_ids`, except addresses that are the id."""
        return {node_id: at for node_id, at in zip(self.node_ids, self.reached_at, strict=False) if at}


class TimeSpent(Record, kw_only=True):
    """A run's time by use, in seconds."""

    trained: float = 0.0  # seconds while all members of a round were live
    regrouped: float = 0.0  # seconds while enough nodes were present, but no round had all its members
    waited: float = 0.0  # seconds while there were too few nodes for a round

    def __add__(self, other: TimeSpent) -> TimeSpent:
        return TimeSpent(
            trained=self.trained + other.trained,
            regrouped=self.regrouped + other.regrouped,
            waited=self.waited + other.waited,
        )


class EarlierRoundTotals(Record, kw_only=True):
    """The sums of the rounds whose chapters were dropped."""

    rounds: int = 0
    spent: TimeSpent = TimeSpent()  # the time of the dropped rounds, and the time before the first round
    losses: int = 0
    lost: Mapping[str, int] = MappingProxyType({})  # the ids of the nodes lost most often, with the numbers of losses
    reasons: Mapping[str, int] = MappingProxyType({})  # losses by their most common reasons; "" is an unknown reason
    since: float | None = None  # the run's earliest recorded Unix time; None if none is recorded


class History(Stored, kw_only=True):
    """A run's last rounds, the oldest first, and the sums of earlier ones."""

    called = "the history"

    chapters: tuple[Chapter, ...] = ()
    past: EarlierRoundTotals = EarlierRoundTotals()


class TimeOfDayNote(Stored, kw_only=True):
    """The run's time of day, as Unix time, when the note was sent."""

    called = "the time of day of a run"

    hour: float


def nodes_gone_before_round(history: History, number: int, *, here: Container[str], now: float) -> list[Missing]:
    """Return the nodes lost or left in the previous round, and not `here`; none unless `number` is the last round."""
    if len(history.chapters) < 2 or history.chapters[-1].number != number:
        return []
    before, last = history.chapters[-2:]

    def seconds_since_incident(incident: Incident) -> float | None:
        if last.at is not None and last.after is not None and incident.after is not None:
            return max(now - last.at, 0.0) + max(last.after - incident.after, 0.0)
        return None if incident.at is None else max(now - incident.at, 0.0)

    gone = {
        node_id: Missing(
            node_id=node_id,
            how=incident.kind,
            ago=seconds_since_incident(incident),
            address=before.addresses.get(node_id, ""),
            why=incident.reason,
        )
        for incident in before.incidents
        if incident.kind in (LOST, LEFT)
        for node_id in incident.node_ids
        if node_id not in here
    }
    return list(gone.values())


def time_spent(chapter: Chapter, seconds: float) -> TimeSpent:
    """Return how the first `seconds` after a round's completion were spent."""
    trained = seconds if chapter.stopped is None else min(chapter.stopped, seconds)
    waited = min(chapter.short, seconds - trained)
    return TimeSpent(trained=trained, regrouped=seconds - trained - waited, waited=waited)


def seconds_between_rounds(chapter: Chapter, following: Chapter) -> float:
    """Return the seconds between two rounds' completions: measured, else by times of day, else to the last incident."""
    if following.after is not None:
        return following.after
    if chapter.at is not None and following.at is not None:
        return max(following.at - chapter.at, 0.0)
    return max([0.0, *(one.after for one in chapter.incidents if one.after is not None)])


def _drop_oldest_round(history: History) -> History:
    oldest, following = history.chapters[:2]
    past = history.past
    lost, reasons = Counter(past.lost), Counter(past.reasons)
    losses = [one for one in oldest.incidents if one.kind == "lost"]
    for one in losses:
        lost.update(one.node_ids)
        reasons[one.reason[:REASON_LETTERS_MOST]] += one.count
    return History(
        chapters=history.chapters[1:],
        past=EarlierRoundTotals(
            rounds=past.rounds + 1,
            spent=past.spent + time_spent(oldest, seconds_between_rounds(oldest, following)),
            losses=past.losses + sum(one.count for one in losses),
            lost=MappingProxyType(dict(lost.most_common(NODES_COUNTED_MOST))),
            reasons=MappingProxyType(dict(reasons.most_common(REASONS_COUNTED_MOST))),
            since=past.since if past.since is not None else oldest.at,
        ),
    )


def pack_history(history: History) -> bytes:
    """Pack the history; drop its oldest chapters if it would be too large."""
    packed = history.pack()
    while len(history.chapters) > 1 and (len(packed) > BYTES_MOST or len(history.chapters) > CHAPTERS_MOST):
        history = _drop_oldest_round(history)
        packed = history.pack()
    return packed


class HistoryWriter:
    """A run's history, continued by a coordinator. When a returned history is stored, call `note_written`."""

    def __init__(self) -> None:
        self._history = History()
        self._began: float | None = None  # when the last round completed, or the run began; None: unknown
        self._stopped: float | None = None  # when a member was first gone, the run began, or a previous `_short` ended
        self._short = 0.0  # `Chapter.short` without the seconds since `_short_since`
        self._short_since: float | None = None  # since when there are too few nodes; None if there are enough

    def take_over(
        self,
        history: History,
        *,
        began: float | None,
        now: float,
        ended: float | None = None,
        waited: float = 0.0,
        hour: float | None = None,
    ) -> None:
        """Continue the previous coordinator's history.

        `began`: when this node saw the last round complete. `ended`: when it left that round. None: it did not.
        `waited`: seconds with too few nodes until now; if no round has completed, the run began with this wait.
        `hour`: the run's time of day, if known.
        """
        self._history, self._began = history, began
        if not history.chapters:
            self._began = self._stopped = now - waited
            return
        last = history.chapters[-1]
        if began is None and hour is not None and last.at is not None:
            self._began = began = now - max(hour - last.at, 0.0)
        if last.stopped is not None:
            # `short` contains the wait up to the chapter's last incident.
            written = max([last.stopped, *(one.after for one in last.incidents if one.after is not None)])
            self._stopped = now if began is None else began + written
            self._short = last.short
        else:
            self._stopped = ended

    def note_progress(self, progress: Progress, *, now: float) -> None:
        """Record whether the last round still has all its members, and whether there are enough nodes."""
        chapters = self._history.chapters
        intact = bool(chapters) and chapters[-1].number == progress.round and progress.live >= chapters[-1].size
        if not intact and self._stopped is None:
            self._stopped = now
        too_few = progress.phase is Phase.GATHERING
        if too_few and self._short_since is None:
            self._short_since = max(now - (progress.absent.waited or 0.0), self._stopped or now)
        elif not too_few:
            self._short, self._short_since = self._seconds_with_too_few(now), None

    def history_with_round(
        self,
        number: int,
        nodes: Mapping[str, str],
        *,
        known: Iterable[str],
        now: float,
        at: float | None = None,
        arrived: float | None = None,
        lost_store: str = "",
    ) -> History:
        """Return the history with a round about to be committed.

        `nodes`: addresses by id, in order of rank. `known`: the previous round's ids. `at`: the time of day at `now`.
        `arrived`: when the last node arrived, on the clock of `now`. `lost_store`: the host of a lost former store.
        """
        node_ids = list(nodes)
        before = frozenset(known)
        joined = [node_id for node_id in node_ids if node_id not in before]
        reached_at = ["" if nodes[node_id] == node_id else nodes[node_id] for node_id in node_ids[:NAMED_MOST]]
        after = self._since_round_completed(now)
        chapter = Chapter(
            number=number,
            size=len(node_ids),
            node_ids=tuple(node_ids[:NAMED_MOST]),
            joined=len(joined),
            joined_ids=tuple(joined[:NAMED_MOST]),
            after=after if self._history.chapters else None,
            reached_at=tuple(reached_at if any(reached_at) else ()),
            at=at,
            met=None if arrived is None else max(now - arrived, 0.0),
        )
        history = self._history
        if not history.chapters:
            waited = min(self._seconds_with_too_few(now), after or 0.0)
            spent_before = TimeSpent(regrouped=(after or 0.0) - waited, waited=waited)
            since = None if at is None else at - (after or 0.0)
            if lost_store:
                moved = Incident(kind="store lost", after=0.0, reason=f"at {lost_store}, before this round", at=at)
                chapter = chapter.replace(incidents=(moved,))
            return History(chapters=(chapter,), past=history.past.replace(spent=spent_before, since=since))
        history = history.replace(chapters=(*history.chapters[:-1], self._last_chapter(now), chapter))
        return _drop_oldest_round(history) if len(history.chapters) > CHAPTERS_MOST else history

    def history_with_incidents(
        self,
        progress: Progress,
        closed: Closed | None,
        *,
        now: float,
        at: float | None = None,
        why: Mapping[str, str] = MappingProxyType({}),
        unbans: Iterable[Unban] = (),
    ) -> History | None:
        """Return the history with new incidents; None if none can be added. `why` maps node ids to reasons."""
        chapter = self._history.chapters[-1] if self._history.chapters else None
        if chapter is None or chapter.number != progress.round or len(chapter.incidents) >= INCIDENTS_MOST:
            return None
        told = chapter.incidents
        after = self._since_round_completed(now)
        news: list[Incident] = []
        for kind, count, node_ids in (
            ("lost", progress.lost, progress.lost_ids),
            ("left", progress.departed, progress.departed_ids),
        ):
            earlier = [one for one in told if one.kind == kind]
            more = count - sum(one.count for one in earlier)
            named = {node_id for one in earlier for node_id in one.node_ids}
            by_reason: dict[str, list[str]] = {}
            fresh = [node_id for node_id in node_ids if node_id not in named][: max(more, 0)]
            for node_id in fresh:
                by_reason.setdefault(why.get(node_id, ""), []).append(node_id)
            if more > len(fresh):  # more nodes have gone than are named; the reasons of unnamed nodes are unknown
                by_reason.setdefault("", [])
            for reason, ids in by_reason.items():
                of_them = len(ids) + (0 if reason else more - len(fresh))
                news.append(Incident(kind=kind, after=after, count=of_them, node_ids=tuple(ids), reason=reason, at=at))
        if closed is not None and not any(one.kind == "closed" for one in told):
            reason = ": ".join(filter(None, (closed.by and f"by {closed.by}", closed.reason)))
            news.append(Incident(kind="closed", after=after, reason=reason, at=at))
        if progress.given_up and not any(one.kind == GIVEN_UP for one in told):
            news.append(Incident(kind=GIVEN_UP, after=after, reason=progress.given_up.partition(": ")[2], at=at))
        news.extend(Incident(kind="unbanned", after=after, reason=str(unban), at=at) for unban in unbans)
        if not news:
            return None
        current = self._last_chapter(now).replace(incidents=(*told, *news)[:INCIDENTS_MOST])
        return self._history.replace(chapters=(*self._history.chapters[:-1], current))

    def note_written(self, history: History, *, now: float) -> None:
        """Record that this history, which a method returned, is now in the store."""
        chapters = self._history.chapters
        if not chapters or chapters[-1].number != history.chapters[-1].number:
            self._began, self._stopped, self._short, self._short_since = now, None, 0.0, None
        self._history = history

    def _last_chapter(self, now: float) -> Chapter:
        chapter = self._history.chapters[-1]
        if self._stopped is None:
            return chapter
        stopped = chapter.stopped
        if stopped is None and self._began is not None:
            stopped = max(self._stopped - self._began, 0.0)
        return chapter.replace(stopped=stopped, short=self._seconds_with_too_few(now))

    def _seconds_with_too_few(self, now: float) -> float:
        return self._short + (0.0 if self._short_since is None else max(now - self._short_since, 0.0))

    def _since_round_completed(self, now: float) -> float | None:
        return None if self._began is None else max(now - self._began, 0.0)
