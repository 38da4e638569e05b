"""The status as plain data: every fact is a field, as in the schema in the docs."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest

from rdzv.core.absent import Missing
from rdzv.core.report import VERSION, RunStatus, status_json
from rdzv.core.round import Participant
from rdzv.core.state import Ban, Phase
from rdzv.core.stuck.pace import StepOf
from rdzv.display.status import member_lines
from tests.support.runs import VirtualRun

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "status.schema.json").read_text(encoding="utf-8"))


def check(plain: dict[str, Any]) -> None:
    """Validate against the schema. The schema must also name every field."""
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(plain)))
    assert set(plain) == set(SCHEMA["required"]) == set(SCHEMA["properties"]) - {"store", "cost", "history"}


def test_every_fact_is_a_field() -> None:
    status = RunStatus(
        run_id="job",
        round=7,
        phase=Phase.TRAINING,
        reason="round 7 stands with 2 nodes",
        members=(
            Participant(
                node_id="a", rank=0, address="10.0.0.1", payload=[b"\xff", math.nan, {1}], attributes={"rack": "r1"}
            ),
        ),
        waiting=("c", "d"),
        spares=("d",),
        coordinator="a",
        world_size=2,
        bootstrap=("10.0.0.1", 29500),
        banned={"e": Ban(reason="slow disk", by="admin", now=True)},
        unfit={"f": "no GPU"},
        missing=(Missing(node_id="b", how="lost", ago=3.0, address="10.0.0.2", why="its process ended"),),
        missing_count=1,
        since={"a": 1.8e9},
        addresses={"b": "10.0.0.2", "c": "10.0.0.3"},
        settings={"min_nodes": 2, "rank_order": object},
        steps={"a": StepOf(step=1204, age=2.5, report_age=1.5, rate=2.0, busy="checkpoint")},
        awaits={"a": ("key 'a'", 41.0)},
        now=1.8e9 + 100,
        phase_for=40.0,
    )
    plain = status_json(status)
    assert "waits 41 s in the round's store, for key 'a'" in member_lines(status)[0]
    assert status.refused == {"e": "banned by admin: slow disk", "f": "no GPU"}
    check(plain)
    assert plain["members"] == [
        {
            "node_id": "a",
            "rank": 0,
            "address": "10.0.0.1",
            "payload": ["\\xff", "nan", "{1}"],
            "attributes": {"rack": "r1"},
            "state": "busy",
            "since": 1.8e9,
            "waits_for": "key 'a'",
            "waited": 41.0,
            "step": 1204,
            "step_age": 2.5,
            "step_at": 1.8e9 + 97.5,
            "report_age": 1.5,
            "step_rate": 2.0,
            "busy": "checkpoint",
        }
    ]
    assert plain["bootstrap"] == {"host": "10.0.0.1", "port": 29500}
    assert (plain["waiting"], plain["spares"]) == (["c"], ["d"])
    assert plain["banned"] == [
        {"node_id": "e", "reason": "slow disk", "by": "admin", "now": True, "ends_in": None, "ends_at": None}
    ]
    assert plain["state"] == {"meant": "warn", "words": "Training: 1 missing"}
    assert (plain["phase_since"], plain["pace"]["step"]) == (1.8e9 + 60, 1204)
    assert plain["unfit"] == [{"node_id": "f", "reason": "no GPU"}]
    assert plain["missing"] == [
        {
            "node_id": "b",
            "how": "lost 3 s ago: its process ended",
            "kind": "lost",
            "seconds_ago": 3.0,
            "at": 1.8e9 + 97,
            "address": "10.0.0.2",
            "why": "its process ended",
        }
    ]
    assert (plain["missing_count"], plain["since"]) == (1, {"a": 1.8e9})
    assert plain["settings"]["min_nodes"] == 2


def test_the_status_and_its_json_call_the_same_things_by_the_same_names() -> None:
    """Those of the status that are not in the JSON stand in its members, and in `closing`."""
    only_in_status = {one.name for one in dataclasses.fields(RunStatus)} - set(SCHEMA["properties"])
    assert only_in_status == {"steps", "awaits", "closed_at"}


def test_the_schema_allows_unknown_fields_but_no_missing_ones() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["version"]["const"] == VERSION
    assert SCHEMA["properties"]["phase"]["enum"] == [phase.value for phase in Phase]
    nobody: dict[str, Any] = {"members": (), "waiting": (), "spares": (), "coordinator": None, "round": None}
    plain = status_json(RunStatus(run_id="job", phase=Phase.GATHERING, reason="no node is here", **nobody))
    check(plain)
    jsonschema.validate({**plain, "of a later release": 1}, SCHEMA)
    del plain["settings"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plain, SCHEMA)


@pytest.mark.virtual_time
async def test_a_run_is_reported_in_each_of_its_phases() -> None:
    seen = []
    async with VirtualRun(min_nodes=2, max_nodes=3, last_call_timeout=5, early_last_call=False) as run:
        looks, first, second = (run.handler(name) for name in ("looks", "first", "second"))

        async def look() -> dict[str, Any]:
            plain = status_json(await looks.status())
            check(plain)
            seen.append(plain["phase"])
            return plain

        await look()
        async with anyio.create_task_group() as joining:
            joining.start_soon(first.next_rendezvous)
            await anyio.sleep(1)
            assert (await look())["waiting"] == ["first"]
            joining.start_soon(second.next_rendezvous)
            await anyio.sleep(1)
            await look()
        await anyio.sleep(0.1)  # observers get the status a moment after the members
        await look()
        await second.leave()
        await anyio.sleep(1)
        (missing,) = (await look())["missing"]
        assert (missing["node_id"], missing["kind"]) == ("second", "left")
        await first.set_closed("enough")
        over = await look()
        assert (over["closed"], over["state"]["words"]) == ("enough", "Closed: done")
        assert {name: over["closing"][name] for name in ("given_up", "status", "by")} == {
            "given_up": False,
            "status": 0,
            "by": "first",
        }
        assert [one["node_id"] for one in over["last_members"]] == ["first", "second"]
    assert seen == ["gathering", "gathering", "last call", "training", "training", "closed"]
