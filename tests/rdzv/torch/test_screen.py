"""An agent's screen: one line for each thing that happens, with PyTorch's prefix, and LOGLEVEL obeyed."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

import rdzv
import rdzv.sync
from rdzv.core.state import NodesLost
from tests.support.processes import require

if TYPE_CHECKING:
    from collections.abc import Iterator

require("torch")  # what follows cannot be imported without

from rdzv.torch.agent.screen import Screen, configure_logging, end_with  # noqa: E402
from rdzv.torch.pytorch import SignalException  # noqa: E402
from rdzv.torch.store import unconnected_handler  # noqa: E402


@contextlib.contextmanager
def unconfigured() -> Iterator[None]:
    """Loggers as in a process in which nobody has touched them, and as they were afterwards."""
    loggers = [logging.getLogger(name) for name in (None, "rdzv", "rdzv.torch", "store")]
    before = [(logger, logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    for logger in loggers:
        logger.handlers.clear()
    for logger in loggers[1:]:
        logger.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        for logger, level, propagate, handlers in before:
            logger.setLevel(level)
            logger.propagate = propagate
            logger.handlers[:] = handlers


@pytest.mark.parametrize(
    ("chosen", "shown"),
    [("", "story, warning"), ("WARNING", "warning"), ("INFO", "story, detail, warning"), ("error", "")],
)
def test_loglevel_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chosen: str, shown: str
) -> None:
    monkeypatch.setenv("LOGLEVEL", chosen)
    with unconfigured():
        configure_logging()
        configure_logging()
        logging.getLogger("rdzv.torch").info("story")
        logging.getLogger("rdzv.node").info("detail")
        logging.getLogger("store.client").warning("warning")
    lines = capsys.readouterr().err.splitlines()
    assert ", ".join(line.partition("] ")[2] for line in lines) == shown
    assert all(re.fullmatch(r"[IW]\d{4} \d\d:\d\d:\d\d\.\d{3} \d+ (rdzv|store)\] \w+", line) for line in lines)


def test_who_has_configured_logging_is_left_alone() -> None:
    with unconfigured():
        logging.getLogger().addHandler(logging.NullHandler())
        configure_logging()
        assert not logging.getLogger("rdzv").handlers


def test_a_round_is_told_with_who_is_gone_and_new(url: str, run_id: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    where = f"{url}/{run_id}?min_nodes=1&max_nodes=2&last_call_timeout=0&attributes=workers:2"
    with rdzv.sync.connect(where, node_id="a") as handler:
        screen = Screen(run_id)
        screen.met(handler.next_rendezvous(), 0.1)
        with rdzv.sync.connect(where, node_id="b") as other:
            others = Screen(run_id)
            joining = threading.Thread(target=lambda: others.met(other.next_rendezvous(), 0.0))
            joining.start()
            while not handler.num_nodes_changed():
                pass
            screen.met(handler.next_rendezvous(), 0.2)
            joining.join()
            others.explain("b", "worker 0 was killed by signal 9")
            screen.listen(handler)
        while "has left" not in caplog.text:
            pass
        screen.met(handler.next_rendezvous(), 0.3)
    screen.stop()
    told = [
        record.getMessage().removeprefix(f"run {run_id}")
        for record in caplog.records
        if record.name == "rdzv.torch" and "this one, b" not in record.getMessage()
    ]
    assert told == [
        ", round 0: 1 node, world size 2; this one, a, has rank 0; met within 0.1 s",
        ", round 1: 2 nodes, world size 4; new: b; this one, a, has rank 0; met within 0.2 s",
        ": b has left: worker 0 was killed by signal 9; meeting again",
        ", round 2: 1 node, world size 2; gone: b; this one, a, has rank 0; met within 0.3 s",
    ]


def test_a_loss_is_told_with_its_reason_and_after_the_next_round_with_what_it_has_cost(
    url: str, run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rank 0 alone: the others would only repeat it."""
    monkeypatch.setattr("rdzv.torch.agent.screen.COST_AFTER", 0.0)
    caplog.set_level(logging.INFO)
    where = f"{url}/{run_id}?min_nodes=1&last_call_timeout=0"
    with rdzv.sync.connect(where, node_id="a") as handler:
        info = handler.next_rendezvous()
        for rank, screen in enumerate((Screen(run_id), Screen(run_id))):
            screen.listen(handler)
            screen.met(replace(info, rank=rank, world_size=3), 0.1)
            reasons = {"b": "its process ended", "c": "nothing was heard of it for its ttl"}
            screen._say(NodesLost(2, ("b", "c"), reasons=reasons))
            screen._told_of.clear()
            screen._say(NodesLost(1, ("b",), reasons=reasons))
            screen.met(replace(info, rank=rank, world_size=1), 0.2)
            while rank == 0 and "so far" not in caplog.text:
                time.sleep(0.01)  # nothing announces a line of a log
            assert (screen._cost is not None) == (rank == 0)
    screen.stop()
    told = [record.getMessage() for record in caplog.records if record.name == "rdzv.torch"]
    both = "b: its process ended, c: nothing was heard of it for its ttl"
    assert f"run {run_id}: b, c are lost: {both}; meeting again, 1 of 3 are left" in told
    assert f"run {run_id}: b is lost: its process ended; meeting again, 2 of 3 are left" in told
    (cost,) = [line for line in told if "so far" in line]
    assert re.fullmatch(rf"run {run_id} so far: \d+ s; training [\d.]+ %, .*; no losses", cost)


@pytest.mark.parametrize("held_for", [0.0, 1000.0])
def test_a_member_that_comes_again_says_why(
    url: str, run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, held_for: float
) -> None:
    """In a line of its own if the next round does not come at once, else in that round's."""
    monkeypatch.setattr("rdzv.torch.agent.screen.HELD_FOR", held_for)
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    where = f"{url}/{run_id}?min_nodes=2"
    with rdzv.sync.connect(where, node_id="a") as handler, rdzv.sync.connect(where, node_id="b") as other:
        screen, others = Screen(run_id), Screen(run_id)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(other.next_rendezvous)
            screen.met(handler.next_rendezvous(), 0.0)
            others.met(joining.result(30), 0.0)
            others.explain("b", "worker 0 was killed by signal 9")
            again = pool.submit(other.next_rendezvous)
            screen.listen(handler)
            line = "1 node waits to come in; b again: worker 0 was killed by signal 9; meeting again"
            while line not in caplog.text if not held_for else screen._held is None:
                time.sleep(0.01)  # nothing announces a line of a log
            screen.met(handler.next_rendezvous(), 0.0)
            again.result(30)
            in_round = "2 nodes; b again: worker 0 was killed by signal 9; this one, a"
            assert [line in caplog.text, in_round in caplog.text] == [not held_for, bool(held_for)]
    screen.stop()


def test_what_is_waited_for_is_told(
    url: str, run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdzv.torch.agent.screen.WAITS_SILENTLY", 0.01)
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    reasons: list[str] = []

    def status() -> rdzv.RunStatus:
        """As of the handler, which is asked again and again."""
        found = handler.status()
        reasons.append(found.reason)
        return found

    where = f"{url}/{run_id}?min_nodes=2"
    with (
        rdzv.sync.connect(where, node_id="a") as handler,
        rdzv.sync.connect(where, node_id="b") as other,
        ThreadPoolExecutor(1) as pool,
        Screen(run_id).meeting(cast("rdzv.sync.Handler", SimpleNamespace(status=status))),
    ):
        joining = pool.submit(handler.next_rendezvous)
        while sum("1 of at least 2 nodes" in reason for reason in reasons) < 5:
            time.sleep(0.01)  # it is looked at by itself
        other.next_rendezvous()
        joining.result(30)
    told = [record.getMessage() for record in caplog.records if record.name == "rdzv.torch"]
    assert sum("waiting: 1 of at least 2 nodes" in line for line in told) == 1, "the seconds that run down are no news"


def test_an_error_ends_the_process_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        end_with(ValueError("this is wrong; do that"))
    assert ended.value.code == 1
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("this is wrong; do that", None)


def test_why_one_leaves_is_told_only_where_the_store_is_in_reach() -> None:
    """An agent whose store's host was killed waited until its lease had run out, before it said anything."""
    told: list[tuple[str, str]] = []
    screen = Screen("job")
    screen._store = cast("Any", SimpleNamespace(set=lambda *said: told.append(said)))
    screen.explain("a", "worker 0 was killed by signal 9", in_reach=False)
    assert not told
    screen.explain("a", "worker 0 was killed by signal 9")
    assert told == [("rdzv/torch/why/a", "worker 0 was killed by signal 9")]


def test_an_agent_that_a_signal_ends_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    others: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: others.append(kind.__name__))
    Screen("job").end_quietly(lambda: False)
    for error in (SignalException("got signal: 15", sigval=signal.SIGTERM), ValueError("mine")):
        sys.excepthook(type(error), error, None)
    assert others == ["ValueError"]
    (record,) = caplog.records
    assert record.getMessage() == (
        "run job: this agent ends, since it was told to end by SIGTERM; the run goes on without it"
    )
    caplog.set_level(logging.DEBUG, logger="rdzv.torch")
    sys.excepthook(SignalException, SignalException("got signal: 15", sigval=signal.SIGTERM), None)
    assert others == ["ValueError", "SignalException"]


def test_it_is_told_where_the_others_are_to_be_met(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    for nodes, said in (("min_nodes=2&max_nodes=4", "2 to 4 nodes"), ("min_nodes=1", "1 node")):
        settings = unconnected_handler(f"{url}/job?{nodes}", {}).settings
        Screen("job").begins(settings, "a", 2, hosts=True)
        assert caplog.records[-1].getMessage() == (
            f"run job: joining at {url}, {said}; this one is a, with 2 workers, and serves the store"
        )
