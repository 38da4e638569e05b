"""Excerpts of a report for metrics and for a page, and the changes between two excerpts.

A page gets times of day instead of ages: ages change with time alone, and a page is sent real changes only.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.core.history import Chapter
    from rdzv.core.report import Account

AGES: Final = frozenset(
    ("waited", "phase_for", "last_call_left", "step_age", "report_age", "seconds_ago", "how", "seconds_left", "ends_in")
)
"""The fields that change with time alone; for each, the report also has a stable field, mostly a time of day."""


def summary_of(full: dict[str, Any], cost: Account, chapters: Sequence[Chapter], now: float) -> dict[str, Any]:
    """Return a report's state, counts and members' steps, for metrics and the list of runs."""
    return {
        **{name: full[name] for name in SUMMED},
        **full["counts"],
        **{name: full["settings"].get(name) for name in ("min_nodes", "max_nodes")},
        "now": now,
        "reason": full["waits_for"],
        "waited": None if full["waiting_since"] is None else now - full["waiting_since"],
        "steps": {one["node_id"]: one for one in full["members"] if one["step"] is not None},
        "lost": cost.reasons,
        "spent": {name: cost.as_json()[name] for name in ("training", "regrouping", "waiting")},
        "met": chapters[-1].met if chapters else None,
    }


SUMMED: Final = (
    *("run_id", "phase", "phase_since", "state", "waits_for", "waiting_since", "round", "world_size", "closed"),
    *("closing", "pace"),
)


def report_for_page(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a report without ages and the fields that a page does not show."""
    outside = {*plain["waiting"], *plain["spares"], *(one["node_id"] for one in plain["missing"])}
    told = {
        name: _without_ages(value)
        for name, value in plain.items()
        if name not in (*AGES, *LARGE, "now", "version", "reason")
    }
    for name in ("members", "last_members"):
        told[name] = [{field: one.get(field) for field in MEMBER_TOLD} for one in plain[name]]
    for name in ("since", "addresses"):
        told[name] = {node_id: value for node_id, value in plain[name].items() if node_id in outside}
    return told


LARGE: Final = ("members", "last_members", "since", "addresses")
MEMBER_TOLD: Final = (
    *("node_id", "rank", "address", "attributes", "state", "step", "step_at", "step_rate", "busy", "waits_for"),
)


def _without_ages(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ages(one) for name, one in value.items() if name not in AGES}
    return [_without_ages(one) for one in value] if isinstance(value, list) else value


def without_jitter(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the report `now`, but keep times of `before` that differ by less than `WAVERS`, and unchanged members."""
    made = {name: _ignore_time_jitter(before.get(name), value) for name, value in now.items() if name != "members"}
    members = {one["node_id"]: one for one in before.get("members", ())}
    made["members"] = [_keep_member_times(members.get(one["node_id"]), one) for one in now["members"]]
    return made


def _ignore_time_jitter(before: Any, now: Any) -> Any:
    match now:
        case float() if now > HOURS_FROM and isinstance(before, float) and abs(now - before) < WAVERS:
            return before
        case dict() if isinstance(before, dict):
            return {name: _ignore_time_jitter(before.get(name), value) for name, value in now.items()}
        case list() if isinstance(before, list) and len(before) == len(now):
            return [_ignore_time_jitter(*pair) for pair in zip(before, now, strict=True)]
        case _:
            return now


HOURS_FROM: Final = 1e9  # larger numbers are Unix times
WAVERS: Final = 1.0  # seconds by which a time of day may vary, as it is computed from an age


def _keep_member_times(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    if before is not None and before["step"] == now["step"]:
        now["step_at"] = before["step_at"]
    return before if before is not None and before == now else now


def server_sent_event(before: dict[str, Any] | None, now: dict[str, Any]) -> bytes:
    """Return a page's next server-sent event: at first the state, then the changes, or a `beat` without changes."""
    at, told = round(now["now"], 2), now if before is None else web_page_changes(before, now)
    if not told:
        return f"event: beat\ndata: {at}\n\n".encode()
    kind = "" if before is None else "event: changed\n"
    return f"{kind}data: {json.dumps({**told, 'now': at}, separators=(',', ':'))}\n\n".encode()


def web_page_changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the changes for a page in the state `before`; empty if only time has passed.

    A state has the store, a summary of each run (`runs`), the `chosen` run's id, and its report (`run`).
    """
    known = {one["run_id"]: _without_times(one) for one in before["runs"]}
    runs = [one for one in now["runs"] if known.pop(one["run_id"], None) != _without_times(one)]
    told: dict[str, Any] = {**({"runs": runs} if runs else {}), **({"gone": list(known)} if known else {})}
    if before["chosen"] != now["chosen"]:
        told["chosen"] = now["chosen"]
    if before["run"] is None or now["run"] is None or "chosen" in told:
        if before["run"] is not now["run"]:
            told["run"] = now["run"]
    elif changed := _diff_run_reports(before["run"], now["run"]):
        told["changed"] = changed
    return told


def _without_times(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in ("now", "spent", "waited")}


def _diff_run_reports(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    if before is now:
        return {}
    told = {name: value for name, value in now.items() if name not in ("members", "cost") and before[name] != value}
    members = {one["node_id"]: one for one in before["members"]}
    changed: dict[str, Any] = {}
    come = []
    for one in now["members"]:
        old = members.pop(one["node_id"], None)
        if old is None:
            come.append(one)
        elif old is not one and (news := {name: value for name, value in one.items() if old[name] != value}):
            changed[one["node_id"]] = news
    if changed or come or members:
        told["members"] = {"changed": changed, "come": come, "gone": list(members)}
    if told and before["cost"] != now["cost"]:
        told["cost"] = now["cost"]
    return told
