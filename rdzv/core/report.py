"""Pure: how a run stands, as plain data: what `rdzv status --json` prints and the HTTP server sends.

Every fact is a field of its own, so that nothing has to be parsed out of sentences. `docs/status.schema.json` describes
the fields. `VERSION` steps when one of them goes or changes its meaning; new ones may come at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rdzv.core.state import WITH

if TYPE_CHECKING:
    from rdzv.core.state import Participant, RunStatus, StepOf

__all__ = ["VERSION", "report"]

VERSION: Final = 1


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
        "banned": [
            {"node_id": node_id, "reason": ban.reason, "by": ban.by, "at_once": ban.now, "ends_in": ban.left}
            for node_id, ban in status.bans.items()
        ],
        "banned_where": [
            {"where": where, "reason": ban.reason, "by": ban.by, "at_once": ban.now, "ends_in": ban.left}
            for where, ban in status.bans_where.items()
        ],
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
        else {
            "min_nodes": resized.min_nodes,
            "max_nodes": resized.max_nodes,
            "reason": resized.reason,
            "by": resized.by,
        },
        "releases": dict(status.releases),
        "settings": {name: _plain(value) for name, value in status.settings.items()},
    }


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
