"""Pure: how a run stands and what it has cost, also as plain data, for `rdzv status --json` and the HTTP server.

Every fact is a field of its own, so that nothing has to be parsed out of sentences. `docs/status.schema.json` describes
the fields. `VERSION` steps when one of them goes or changes its meaning; new ones may come at any time.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from rdzv.core.history import Spent, seconds_between, spent
from rdzv.core.state import WITH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rdzv.core.absent import Missing
    from rdzv.core.history import Chapter, History, Incident
    from rdzv.core.round import Participant
    from rdzv.core.state import Ban, Phase
    from rdzv.core.stopping import Resized

__all__ = [
    "VERSION",
    "Account",
    "RunStatus",
    "StepOf",
    "account",
    "closing_of",
    "lengths_of",
    "long_duration",
    "report",
]

VERSION: Final = 1
WORST_NAMED: Final = 1  # nodes in the closing line, if they were lost more than once


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOf:
    """How far a member has come.

    Attributes:
        step: The last step that it has begun; None before the first.
        age: Seconds since then.
        rate: Steps a second, lately.
        busy: What it is busy with, as it has said; empty if it is not.
    """

    step: int | None
    age: float
    rate: float
    busy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as it stands in the store.

    Attributes:
        run_id: Which run.
        round: The number of the last completed round; None if there was none.
        phase: Where it is.
        reason: What it waits for, in words.
        members: The live members of the last round, by rank.
        waiting: Nodes that have arrived for the next round, in order of arrival.
        spares: Those among them for whom there is no room.
        coordinator: The node that decides now, or None.
        world_size: The size of the last round; 0 if there was none.
        bans: The nodes that are banned: by whom, and why.
        bans_where: The attributes with a value, "rack=17", whose nodes are banned, also those that come later.
        settings: What all nodes of the run have agreed on, by name; empty before the first one has come.
        bootstrap_address: Rank 0's host and port, or None.
        closed: Why it was closed, or None.
        refused: Nodes that may not join, and why: those that are banned, and those whose health check failed.
        releases: How many of the nodes that are here are of which release.
        missing: Nodes that are not here, the first of them by name, and what is known of each: "lost 41 s ago".
        addresses: Where each node is reached, or was, of those that are here and those that are missing.
        accused: Members of whom another one says that they do not answer: who, by whom, and why.
        draining: Nodes that are to leave, and what was said of it: within how many seconds, and why.
        resized: The last resize of the run, as long as no round has begun with it; else None.
        absent: The same nodes, as data: how, since when, and why.
        absent_count: How many they are, also beyond those that are named.
        waited: Seconds for which too few nodes have waited for a round; None if nobody waits, or there are enough.
        since: The hour at which each node that is here arrived, by its own clock, in seconds since 1970.
        steps: How far each member has come that has said so, as of now.
    """

    run_id: str
    round: int | None
    phase: Phase
    reason: str
    members: tuple[Participant, ...]
    waiting: tuple[str, ...]
    spares: tuple[str, ...]
    coordinator: str | None
    world_size: int = 0
    bans: Mapping[str, Ban] = field(default_factory=lambda: MappingProxyType({}))
    bans_where: Mapping[str, Ban] = field(default_factory=lambda: MappingProxyType({}))
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    bootstrap_address: tuple[str, int] | None = None
    closed: str | None = None
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    releases: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    missing: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    accused: tuple[tuple[str, str, str], ...] = ()
    draining: Mapping[str, tuple[float, str]] = field(default_factory=lambda: MappingProxyType({}))
    resized: Resized | None = None
    absent: tuple[Missing, ...] = ()
    absent_count: int = 0
    waited: float | None = None
    since: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    steps: Mapping[str, StepOf] = field(default_factory=lambda: MappingProxyType({}))


def report(status: RunStatus) -> dict[str, Any]:
    """Return a status as what JSON knows: dictionaries, lists, strings, numbers, booleans, None."""
    bootstrap, resized = status.bootstrap_address, status.resized
    return {
        "version": VERSION,
        "run_id": status.run_id,
        "phase": status.phase.value,
        "reason": status.reason,
        "round": status.round,
        "world_size": status.world_size,
        "bootstrap": None if bootstrap is None else {"host": bootstrap[0], "port": bootstrap[1]},
        "coordinator": status.coordinator,
        "closed": status.closed,
        "members": [_member(member, status.steps.get(member.node_id)) for member in status.members],
        "waiting": [node_id for node_id in status.waiting if node_id not in status.spares],
        "spares": list(status.spares),
        "missing": [
            {
                "node_id": one.node_id,
                "how": status.missing[one.node_id],
                "kind": one.how,
                "seconds_ago": one.ago,
                "address": status.addresses.get(one.node_id),
                "why": one.why,
            }
            for one in status.absent
        ],
        "missing_count": status.absent_count,
        "waited": status.waited,
        "since": dict(status.since),
        "addresses": dict(status.addresses),
        "banned": [{"node_id": node_id, **_ban(ban)} for node_id, ban in status.bans.items()],
        "banned_where": [{"where": where, **_ban(ban)} for where, ban in status.bans_where.items()],
        "unfit": [
            {"node_id": node_id, "reason": reason}
            for node_id, reason in status.refused.items()
            if node_id not in status.bans and node_id.removeprefix(WITH) not in status.bans_where
        ],
        "accused": [{"node_id": node_id, "by": by, "why": why} for node_id, by, why in status.accused],
        "draining": [
            {"node_id": node_id, "seconds_left": round(seconds_left, 1), "reason": reason}
            for node_id, (seconds_left, reason) in status.draining.items()
        ],
        "resized": None
        if resized is None
        else {name: getattr(resized, name) for name in ("min_nodes", "max_nodes", "reason", "by")},
        "releases": dict(status.releases),
        "settings": {name: _plain(value) for name, value in status.settings.items()},
    }


def _ban(ban: Ban) -> dict[str, Any]:
    return {"reason": ban.reason, "by": ban.by, "at_once": ban.now, "ends_in": ban.left}


def _member(member: Participant, steps: StepOf | None) -> dict[str, Any]:
    return {
        "node_id": member.node_id,
        "rank": member.rank,
        "address": member.address,
        "payload": _plain(member.payload),
        "attributes": {name: _plain(value) for name, value in member.attributes.items()},
        "step": None if steps is None else steps.step,
        "step_age": None if steps is None else steps.age,
        "step_rate": None if steps is None else steps.rate,
        "busy": "" if steps is None else steps.busy,
    }


def _plain(value: Any) -> Any:
    """Return a value of the user's as JSON knows it: bytes as text, and what else there is as Python shows it."""
    match value:
        case float() if not math.isfinite(value):  # a page reads none of them
            return repr(value)
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            return {str(name): _plain(each) for name, each in value.items()}
        case _:
            return repr(value)


# ------------------------------------------------------------------------------------------------ what it has cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What the time of a run went by with, and who was lost.

    Attributes:
        run_id: Which run.
        seconds: From its beginning until it was closed, or until now.
        spent: What they went by with.
        rounds: How many rounds have completed.
        reasons: How many members were lost, by why; "other" counts the rare reasons of rounds that are forgotten.
        lost: How often each was, the most often first, as far as it is remembered by name.
    """

    run_id: str
    seconds: float
    spent: Spent
    rounds: int
    reasons: Mapping[str, int]
    lost: Mapping[str, int]

    @property
    def losses(self) -> int:
        """How many members were lost."""
        return sum(self.reasons.values())

    def __str__(self) -> str:
        """The closing line of a run."""
        if not self.rounds:
            return f"{self.run_id}: no round has completed"
        parts = (
            ("training", self.spent.trained),
            ("regrouping", self.spent.regrouped),
            ("waiting for nodes", self.spent.waited),
        )
        shares = ", ".join(f"{name} {100 * part / self.seconds if self.seconds else 0:.1f} %" for name, part in parts)
        losses = f"{self.losses} {'loss' if self.losses == 1 else 'losses'}" if self.losses else "no losses"
        worst = [(node_id, count) for node_id, count in self.lost.items() if count > 1][:WORST_NAMED]
        named = "".join(f", {count} of {node_id}" for node_id, count in worst)
        if self.losses == 1:
            named = "".join(f", of {node_id}" for node_id in self.lost)
        return f"{self.run_id}: {long_duration(self.seconds)}; {shares}; {losses}{named}"

    def plain(self) -> dict[str, Any]:
        """Return it as what JSON knows, and in words."""
        return {
            "seconds": self.seconds,
            "training": self.spent.trained,
            "regrouping": self.spent.regrouped,
            "waiting": self.spent.waited,
            "rounds": self.rounds,
            "losses": self.losses,
            "lost": dict(self.lost),
            "in_words": str(self),
        }


def account(run_id: str, history: History, *, now: float | None = None, waited: float | None = None) -> Account:
    """Return what a run has cost so far.

    Args:
        run_id: Which run.
        history: What is remembered of it.
        now: The hour, in seconds since 1970, for a run that goes on; None to count to what is known.
        waited: For how long it has been waiting for nodes, if it is.
    """
    total, lost, reasons = history.past.spent, Counter(history.past.lost), Counter(history.past.reasons)
    if other := history.past.losses - reasons.total():
        reasons["other"] = other
    lengths = lengths_of(history.chapters, now)
    for chapter, length in zip(history.chapters, lengths, strict=True):
        if chapter is history.chapters[-1] and waited is not None and closing_of(chapter) is None:
            chapter = chapter.replace(short=max(chapter.short, waited))  # noqa: PLW2901
        total += spent(chapter, length)
        for one in chapter.incidents:
            if one.kind == "lost":
                reasons[one.reason] += one.count
                lost.update(one.node_ids)
    return Account(
        run_id=run_id,
        seconds=total.trained + total.regrouped + total.waited,
        spent=total,
        rounds=history.past.rounds + len(history.chapters),
        reasons=dict(reasons),
        lost=dict(lost.most_common()),
    )


def closing_of(chapter: Chapter) -> Incident | None:
    """Return how the run was closed in a round, if it was."""
    return next((one for one in chapter.incidents if one.kind == "closed"), None)


def lengths_of(chapters: Sequence[Chapter], now: float | None) -> list[float]:
    """Return for how long each round was the last one: until the next, until the closing, or until now."""
    lengths = [seconds_between(*pair) for pair in pairwise(chapters)]
    if chapters:
        last = chapters[-1]
        known = [one.after for one in last.incidents if one.after is not None]
        closing = closing_of(last)
        if closing is not None and closing.after is not None:
            length = closing.after
        else:
            until = now if closing is None else closing.at
            length = max([0.0, last.stopped or 0.0, *known, *([] if None in (until, last.at) else [until - last.at])])  # type: ignore[operator]
        lengths.append(length)
    return lengths


def long_duration(seconds: float) -> str:
    """Show a duration to its two largest units: "14 h 3 min", "2 d 4 h", "41 s"."""
    whole = round(seconds)
    units = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    first = next((at for at, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2] if count) or "0 s"
