"""What an agent says of the rendezvous is also an event of PyTorch's, for whoever collects those."""

from __future__ import annotations

import json
import logging

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic import events
from torch.distributed.elastic.events import api

from rdzv.torch.agent.events import EventHandler


class Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(record.getMessage()))


@pytest.mark.parametrize(
    ("level", "message", "state"),
    [
        (logging.INFO, "run job-7, round 1: 2 nodes; this one, node-a, has rank 0", "RUNNING"),
        (logging.INFO, "run job-7 is closed: done", "SUCCEEDED"),
        (logging.ERROR, "run job-7: no round within join_timeout", "FAILED"),
    ],
)
def test_each_line_is_an_event_with_its_run_and_state(
    monkeypatch: pytest.MonkeyPatch, level: int, message: str, state: str
) -> None:
    collected = Collected()
    monkeypatch.setattr(api, "_events_loggers", {}, raising=False)
    monkeypatch.setattr(events, "_events_loggers", {}, raising=False)
    monkeypatch.setattr(events, "get_logging_handler", lambda _="null": collected)
    logger = logging.getLogger("rdzv.torch")
    handler = EventHandler()
    monkeypatch.setattr(logger, "handlers", [handler])  # an agent of another test's has left its own there
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        logger.log(level, message)
    finally:
        logger.setLevel(before)
    (event,) = collected.events
    assert (event["run_id"], event["message"], event["node_state"]) == ("job-7", message, state)


def test_where_nobody_collects_events_nothing_happens() -> None:
    record = logging.LogRecord("rdzv.torch", logging.INFO, "file.py", 1, "run job: here", (), None)
    EventHandler().handle(record)
