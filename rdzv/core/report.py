"""A run's state and cost, as data for `rdzv status --json` and the HTTP server.

`docs/status.schema.json` has the fields. `VERSION` increases if a field is removed or changes, not if one is added.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import dropwhile, islice, pairwise
from typing import TYPE_CHECKING, Any, Final

from rdzv.core.history import TimeSpent, seconds_between_rounds, time_spent
from rdzv.core.state import WITH, Phase
from rdzv.core.stuck.pace import StepOf, StepsOverview, steps_overview

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rdzv.core.absent import Missing
    from rdzv.core.history import Chapter, History, Incident
    from rdzv.core.round import Participant
    from rdzv.core.state import Ban, Closed
    from rdzv.core.stopping import Resized

VERSION: Final = 1
WORST_NAMED: Final = 1  # of the nodes lost more than once, the line about a run's cost names this many


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run's state in the store."""

    run_id: str
    round: int | None  #: the number of the last completed round
    phase: Phase
    reason: str  #: why the run waits, in words
    members: tuple[Participant, ...]  #: the live members of the last round, by rank
    waiting: tuple[str, ...]  #: nodes that have arrived for the next round, by arrival
    spares: tuple[str, ...]  #: the waiting nodes for which there is no room
    coordinator: str | None  #: the coordinator's node
    world_size: int = 0  #: the last round's size; 0 without one
    banned: Mapping[str, Ban] = field(default_factory=dict)  #: the banned nodes: by whose command, and why
    banned_where: Mapping[str, Ban] = field(default_factory=dict)  #: bans of all nodes with an attribute, by "rack=17"
    settings: Mapping[str, Any] = field(default_factory=dict)  #: the run's settings; empty until a node has joined
    bootstrap: tuple[str, int] | None = None  #: rank 0's host and port
    closed: str | None = None  #: why the run was closed
    unfit: Mapping[str, str] = field(default_factory=dict)  #: nodes with a failed health check, and why
    releases: Mapping[str, int] = field(default_factory=dict)  #: the number of present nodes by release
    missing: tuple[Missing, ...] = ()  #: the first missing nodes: how, since when, and why
    missing_count: int = 0  #: all missing nodes, named or not
    addresses: Mapping[str, str] = field(default_factory=dict)  #: the last address of each present or missing node
    accused: tuple[tuple[str, str, str], ...] = ()  #: accusations of members that do not answer: accused, accuser, why
    draining: Mapping[str, tuple[float, str]] = field(default_factory=dict)  #: by node: seconds it may stay, and why
    resized: Resized | None = None  #: the last resize, if no round has begun with it yet
    waited: float | None = None  #: seconds that too few nodes have waited; None if enough or no nodes wait
    since: Mapping[str, float] = field(default_factory=dict)  #: when each node arrived, by its own clock, as Unix time
    steps: Mapping[str, StepOf] = field(default_factory=dict)  #: the progress of each member that reports it, as of now
    #: The keys of the round's store for which members wait, by member, with the seconds so far
    awaits: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    now: float = 0.0  #: when this was read, by the run's time of day (`rdzv.core.history`), as Unix time
    phase_for: float | None = None  #: seconds in `phase`; None if unknown
    last_call_left: float | None = None  #: seconds left of the last call
    closing: Closed | None = None  #: how the run was closed
    closed_at: float | None = None  #: when the run was closed, as Unix time; None if not recorded
    standstill: str = ""  #: the coordinator's sentence that no member makes progress; empty if one does
    waits_for: str = ""  #: `reason` without durations, so that the text does not change with time alone
    #: The attributes of nodes outside of the round: waiting ones, and missing ones of the last round
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    last_members: tuple[Participant, ...] = ()  #: the members of a closed run's last round

    @property
    def refused(self) -> dict[str, str]:
        """The banned and the unfit nodes, and why they may not join."""
        banned = {node_id: str(ban) for node_id, ban in self.banned.items()}
        where = {f"{WITH}{where}": str(ban.replace(where="")) for where, ban in self.banned_where.items()}
        return {**self.unfit, **banned, **where}


def run_steps_overview(status: RunStatus) -> StepsOverview:
    """Return the pace of a run's members."""
    timeout = status.settings.get("stall_timeout")
    return steps_overview(status.steps, stall_timeout=timeout if isinstance(timeout, (int, float)) else None)


def node_states(status: RunStatus, pace: StepsOverview) -> dict[str, str]:
    """Return each named node's most urgent state of `NODE_STATES`."""
    states = {
        **dict.fromkeys((member.node_id for member in status.members), "in the round"),
        **{node_id: "busy" for node_id, one in status.steps.items() if one.busy},
        **dict.fromkeys(status.waiting, "waiting"),
        **dict.fromkeys(status.spares, "spare"),
        **dict.fromkeys(status.draining, "draining"),
        **dict.fromkeys(pace.slow, "slow"),
        **dict.fromkeys((one[0] for one in status.accused), "accused"),
        **dict.fromkeys(pace.stuck, "stuck"),
        **dict.fromkeys(status.banned, "banned"),
        **dict.fromkeys(status.unfit, "unfit"),
    }
    states.update((one.node_id, one.how) for one in status.missing)
    return states


def count_states(status: RunStatus, states: Mapping[str, str]) -> dict[str, int]:
    """Return the number of nodes in each state; the key `here` counts members and waiting nodes."""
    found = Counter(states.values())
    return {
        "here": len(status.members) + len(status.waiting),
        "members": len(status.members),
        "missing": status.missing_count,
        **{name: found[name] for name in ("unfit", "banned", "stuck", "accused", "slow", "draining", "busy")},
        "waiting": len(status.waiting) - len(status.spares),
        "spares": len(status.spares),
    }


def run_state(status: RunStatus, pace: StepsOverview, counts: Mapping[str, int]) -> tuple[str, str]:
    """Return a run's state: its kind ("ok", "wait", "drain", "warn", "bad", "over"), and a description."""
    least, most = status.settings.get("min_nodes"), status.settings.get("max_nodes")
    if status.phase is Phase.CLOSED:
        closing, members = status.closing, {one.node_id for one in status.last_members}
        if closing is None or closing.given_up:
            return ("over", "Closed") if closing is None else ("bad", "Given up")
        return "over", "Closed: done" if closing.by in members else "Closed"
    if not status.members and not status.waiting:
        return "bad", "No node is here"
    if status.phase is Phase.LAST_CALL:
        return "wait", f"Last call: {counts['waiting']:,}{f' of up to {most:,}' if most else ''}"
    if status.phase is Phase.GATHERING:
        return "wait", f"Waiting: {counts['waiting']:,}{f' of {least:,}' if least else ''} here"
    if pace.stands or status.standstill:
        return "bad", "Training: all stand still"
    wrong = [name for name in ("stuck", "missing", "accused", "slow", "draining") if counts[name]]
    words = ", ".join(f"{counts[name]:,} {name}" for name in wrong)
    meant = "bad" if "stuck" in wrong else "drain" if wrong == ["draining"] else "warn" if wrong else "ok"
    return meant, f"Training: {words}" if wrong else "Training"


def status_json(status: RunStatus) -> dict[str, Any]:
    """Return a status as JSON's types."""
    bootstrap, closing, resized, now = status.bootstrap, status.closing, status.resized, status.now
    pace = run_steps_overview(status)
    states = node_states(status, pace)
    meant, words = run_state(status, pace, counts := count_states(status, states))

    stands = f"no member has begun a step for {pace.limit:.0f} s" if pace.stands else ""

    def age_to_unix(away: float | None, *, ahead: bool = False) -> float | None:
        return None if away is None else round(now + away if ahead else now - away, 1)

    def member_report(one: Participant) -> dict[str, Any]:
        waits_for, waited = status.awaits.get(one.node_id, ("", None))
        told = {"since": status.since.get(one.node_id), "waits_for": waits_for, "waited": waited}
        return _member_as_json(one, status.steps.get(one.node_id), states.get(one.node_id, "left"), age_to_unix) | told

    def ban_as_dict(one: Ban) -> dict[str, Any]:
        return _pick_fields(one, ("reason", "by", "now", "ends_in")) | {"ends_at": age_to_unix(one.ends_in, ahead=True)}

    return {
        "version": VERSION,
        **_pick_fields(status, UNCHANGED),
        "phase": status.phase.value,
        "phase_since": age_to_unix(status.phase_for),
        "last_call_until": age_to_unix(status.last_call_left, ahead=True),
        "state": {"meant": meant, "words": words},
        "bootstrap": None if bootstrap is None else {"host": bootstrap[0], "port": bootstrap[1]},
        "closing": None
        if closing is None
        else _pick_fields(closing, ("given_up", "status", "by", "reason")) | {"at": status.closed_at},
        "counts": counts,
        "pace": {
            "told": pace.told,
            "step": pace.step,
            "step_at": None if pace.step is None else age_to_unix(pace.age),
            "rate": round(pace.rate, 3),
            "limit": round(pace.limit, 1),
        },
        "standstill": status.standstill or stands,
        "stuck": _node_reason_rows(pace.stuck, "why"),
        "slow": _node_reason_rows(pace.slow, "why"),
        "members": [member_report(one) for one in status.members],
        "last_members": [_member_as_json(one, None, "left", age_to_unix) for one in status.last_members],
        "waiting": [node_id for node_id in status.waiting if node_id not in status.spares],
        "spares": list(status.spares),
        "missing": [
            {
                "node_id": one.node_id,
                "how": one.describe(),
                "kind": one.how,
                "seconds_ago": one.ago,
                "at": age_to_unix(one.ago),
                "address": status.addresses.get(one.node_id),
                "why": one.why,
            }
            for one in status.missing
        ],
        "waiting_since": age_to_unix(status.waited),
        "since": dict(status.since),
        "addresses": dict(status.addresses),
        "attributes": {node_id: _as_json(dict(each)) for node_id, each in status.attributes.items()},
        "banned": [{"node_id": node_id, **ban_as_dict(one)} for node_id, one in status.banned.items()],
        "banned_where": [{"where": where, **ban_as_dict(one)} for where, one in status.banned_where.items()],
        "unfit": _node_reason_rows(status.unfit, "reason"),
        "accused": [{"node_id": node_id, "by": by, "why": why} for node_id, by, why in status.accused],
        "draining": [
            {"node_id": node_id, "seconds_left": round(left, 1), "until": age_to_unix(-left), "reason": reason}
            for node_id, (left, reason) in status.draining.items()
        ],
        "resized": None if resized is None else _pick_fields(resized, ("min_nodes", "max_nodes", "reason", "by")),
        "releases": dict(status.releases),
        "settings": {name: _as_json(value) for name, value in status.settings.items()},
    }


UNCHANGED: Final = (
    *("now", "run_id", "phase_for", "last_call_left", "reason", "waits_for", "round", "world_size", "coordinator"),
    *("closed", "waited", "missing_count"),
)
"""The fields that a report copies from the status."""


def _pick_fields(noun: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(noun, name) for name in names}


def _node_reason_rows(reasons: Mapping[str, str], called: str) -> list[dict[str, str]]:
    return [{"node_id": node_id, called: reason} for node_id, reason in reasons.items()]


def _member_as_json(
    member: Participant, steps: StepOf | None, state: str, age_to_unix: Callable[[float], float | None]
) -> dict[str, Any]:
    one = NO_STEPS if steps is None else steps
    return {
        **_pick_fields(member, ("node_id", "rank", "address")),
        "payload": _as_json(member.payload),
        "attributes": {name: _as_json(value) for name, value in member.attributes.items()},
        "state": state,
        "step": one.step,
        "step_age": None if steps is None else one.age,
        "step_at": None if one.step is None else age_to_unix(one.age),
        "report_age": None if steps is None else one.report_age,
        "step_rate": None if steps is None else one.rate,
        "busy": one.busy,
    }


NO_STEPS: Final = StepOf(step=None, age=0.0, rate=0.0)


def _as_json(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):  # invalid in JSON
            return repr(value)
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case list() | tuple():
            return [_as_json(each) for each in value]
        case dict():
            return {str(name): _as_json(each) for name, each in value.items()}
        case _:
            return repr(value)


def status_as_of(status: RunStatus, seconds: float, *, reason: str) -> RunStatus:
    """Return the status `seconds` later, if nothing has happened since."""

    def add_seconds(age: float | None) -> float | None:
        return None if age is None else age + seconds

    def reduce_ban_times(bans: Mapping[str, Ban]) -> dict[str, Ban]:
        return {
            name: one if one.ends_in is None else one.replace(ends_in=one.ends_in - seconds)
            for name, one in bans.items()
        }

    left = status.last_call_left
    return replace(
        status,
        reason=reason,
        now=status.now + seconds,
        phase_for=add_seconds(status.phase_for),
        last_call_left=None if left is None else max(left - seconds, 0.0),
        missing=tuple(one.replace(ago=add_seconds(one.ago)) for one in status.missing),
        waited=add_seconds(status.waited),
        banned=reduce_ban_times(status.banned),
        banned_where=reduce_ban_times(status.banned_where),
        draining={name: (max(left - seconds, 0.0), why) for name, (left, why) in status.draining.items()},
        steps={
            name: replace(one, age=one.age + seconds, report_age=one.report_age + seconds)
            for name, one in status.steps.items()
        },
        awaits={name: (key, age + seconds) for name, (key, age) in status.awaits.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A run's cost: the use of its time, and its losses."""

    run_id: str
    seconds: float  # from the run's beginning until its closing, or now
    spent: TimeSpent  # the seconds by use
    rounds: int  # how many have completed
    reasons: Mapping[str, int]  # losses by reason; "": unknown; "other": rare reasons of dropped chapters
    lost: Mapping[str, int]  # losses by node id, largest first; not all are remembered

    @property
    def loss_count(self) -> int:
        """The number of losses."""
        return sum(self.reasons.values())

    def __str__(self) -> str:
        if not self.rounds:
            return f"{self.run_id}: no round has completed"
        parts = (
            ("training", self.spent.trained),
            ("regrouping", self.spent.regrouped),
            ("waiting for nodes", self.spent.waited),
        )
        shares = ", ".join(f"{name} {100 * part / self.seconds if self.seconds else 0:.1f} %" for name, part in parts)
        losses = f"{self.loss_count} {'loss' if self.loss_count == 1 else 'losses'}" if self.loss_count else "no losses"
        worst = [(node_id, count) for node_id, count in self.lost.items() if count > 1][:WORST_NAMED]
        named = "".join(f", {count} of {node_id}" for node_id, count in worst)
        if self.loss_count == 1:
            named = "".join(f", of {node_id}" for node_id in self.lost)
        return f"{self.run_id}: {long_duration(self.seconds)}; {shares}; {losses}{named}"

    def as_json(self) -> dict[str, Any]:
        """Return the cost as JSON's types, and in words."""
        return {
            "seconds": self.seconds,
            "training": self.spent.trained,
            "regrouping": self.spent.regrouped,
            "waiting": self.spent.waited,
            "rounds": self.rounds,
            "losses": self.loss_count,
            "lost": dict(self.lost),
            "in_words": str(self),
        }


def run_cost(run_id: str, history: History, *, now: float | None = None, waited: float | None = None) -> Account:
    """Return a run's cost until `now` (None: the last known time); `waited`: seconds of the run's current wait."""
    total, lost, reasons = history.past.spent, Counter(history.past.lost), Counter(history.past.reasons)
    if other := history.past.losses - reasons.total():
        reasons["other"] = other
    for chapter, length in zip(history.chapters, round_lengths(history.chapters, now), strict=True):
        if chapter is history.chapters[-1] and waited is not None and find_closing_incident(chapter) is None:
            chapter = chapter.replace(short=max(chapter.short, waited))  # noqa: PLW2901
        total += time_spent(chapter, length)
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


def find_closing_incident(chapter: Chapter) -> Incident | None:
    """Return the incident by which the run was closed, if any."""
    return next((one for one in chapter.incidents if one.kind == "closed"), None)


def round_lengths(chapters: Sequence[Chapter], now: float | None) -> list[float]:
    """Return each round's seconds until the next round, the closing, or `now`."""
    lengths = [seconds_between_rounds(*pair) for pair in pairwise(chapters)]
    if chapters:
        last = chapters[-1]
        known = [one.after for one in last.incidents if one.after is not None]
        closing = find_closing_incident(last)
        if closing is not None and closing.after is not None:
            length = closing.after
        else:
            until = now if closing is None else closing.at
            length = max([0.0, last.stopped or 0.0, *known, *([] if None in (until, last.at) else [until - last.at])])  # type: ignore[operator]
        lengths.append(length)
    return lengths


def long_duration(seconds: float) -> str:
    """Return a duration in its two largest units: "14 h 3 min", "2 d 4 h", "41 s"."""
    whole = round(seconds)
    units = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    largest = islice(dropwhile(lambda one: not one[0], units), 2)
    return " ".join(f"{count} {unit}" for count, unit in largest if count) or "0 s"
