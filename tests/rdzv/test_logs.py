"""What a log line is about is in fields of its record, and a line of JSON has them all."""

from __future__ import annotations

import json
import logging

import pytest

import store
from rdzv.logs import Fields, JsonFormatter
from tests.support.processes import start_python


def record_of(message: str, *arguments: object, name: str = "rdzv.node.coordinator") -> logging.LogRecord:
    record = logging.LogRecord(name, logging.WARNING, "file.py", 1, message, arguments, None)
    assert Fields().filter(record)
    return record


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("run job-7: node gpu-1 coordinates", ("job-7", None, "gpu-1")),
        ("run job-7, round 3: rank 2 exited with status 1; restart 1 of 3", ("job-7", 3, None)),
        ("run job-7, node gpu-1: it joins the run in the new one", ("job-7", None, "gpu-1")),
        ("run job, round 1: 2 nodes; gone: c; this one, node-a, has rank 0", ("job", 1, "node-a")),
        ("store 4d7f listens", (None, None, None)),
    ],
)
def test_run_round_and_node_are_fields(message: str, fields: tuple[object, ...]) -> None:
    record = record_of(message)
    assert (record.run, record.round, record.node) == fields  # type: ignore[attr-defined]


def test_lines_of_others_are_left_alone() -> None:
    assert record_of("run job-7: mine", name="mine").run is None  # type: ignore[attr-defined]


def test_a_line_of_json_has_the_fields_and_the_exception_and_is_one_line() -> None:
    record = record_of("run %s, round %d: two\nlines", "job", 3)
    record.exc_info = (ValueError, ValueError("why"), None)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    plain = json.loads(line)
    assert (plain["run"], plain["round"], plain["node"], plain["level"]) == ("job", 3, None, "WARNING")
    assert plain["message"] == "run job, round 3: two\nlines"
    assert plain["exception"].endswith("ValueError: why")
    assert plain["time"].endswith("Z")


async def test_a_command_logs_json_if_it_is_told_to() -> None:
    arguments = ("-m", "rdzv", "-v", "--log-format", "json", "run")
    async with (
        store.serve() as server,
        start_python(*arguments, f"{server.url}/job?min_nodes=1", "--", "true") as child,
    ):
        assert await child.wait(timeout=60) == 0
    lines = [json.loads(line) for line in child.output if line.startswith("{")]
    assert lines
    assert all({"time", "level", "logger", "message", "run", "round", "node"} <= line.keys() for line in lines)
