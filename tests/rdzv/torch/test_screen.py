"""An agent's screen: one line for each event, with PyTorch's prefix, and LOGLEVEL obeyed."""

import contextlib
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import pytest

import rdzv
import rdzv.sync
from rdzv.core.round_life import Ending, EndKind
from rdzv.core.state import Closed
from rdzv.display.standard_error import flush_standard_error
from tests.support.processes import require

require("torch")  # the imports below need it

from rdzv.loop.rounds import make_handler  # noqa: E402
from rdzv.torch.agent.screen import HandlerLogger, configure_logging, print_error_and_exit  # noqa: E402
from rdzv.torch.pytorch import SignalException  # noqa: E402


@contextlib.contextmanager
def unconfigured() -> Iterator[None]:
    """Unconfigure the loggers, and restore them afterwards."""
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
        flush_standard_error()
    lines = capsys.readouterr().err.splitlines()
    assert ", ".join(line.partition("] ")[2] for line in lines) == shown
    assert all(re.fullmatch(r"[IW]\d{4} \d\d:\d\d:\d\d\.\d{3} \d+ (rdzv|store)\] \w+", line) for line in lines)


def test_logging_that_the_user_configured_is_not_changed() -> None:
    with unconfigured():
        logging.getLogger().addHandler(logging.NullHandler())
        configure_logging()
        assert not logging.getLogger("rdzv").handlers


def test_a_rounds_line_has_lost_and_new_nodes_and_after_a_loss_the_cost_of_the_run(
    url: str, run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdzv.torch.agent.screen.COST_AFTER", 0.0)
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    where = f"{url}/{run_id}?min_nodes=1&max_nodes=2&last_call_timeout=0"
    with rdzv.sync.connect(where, node_id="a") as handler:
        screen = HandlerLogger(run_id)

        def meet(seconds: float) -> None:
            handler.next_rendezvous()
            screen.log_round(handler, again=bool(caplog.records), seconds=seconds)

        meet(0.1)
        with rdzv.sync.connect(where, node_id="b") as other:
            joining = threading.Thread(target=other.next_rendezvous)
            joining.start()
            while not handler.num_nodes_changed():
                pass
            meet(0.2)
            joining.join()
        while not handler.num_nodes_changed():
            pass
        meet(0.3)
        while "so far" not in caplog.text:
            time.sleep(0.01)  # there is no event for a line of the log
    screen.cancel_cost_line()
    *rounds, cost = [
        # if its name is known already
        re.sub(r" \(left \d s ago\)", "", record.getMessage().removeprefix(f"run {run_id}"))
        for record in caplog.records
    ]
    assert rounds == [
        ", round 0: 1 node; this one, a, has rank 0; met within 0.1 s",
        ", round 1: 2 nodes; new: b; this one, a, has rank 0; met within 0.2 s",
        ", round 2: 1 node; gone: b; this one, a, has rank 0; met within 0.3 s",
    ]
    assert re.fullmatch(r" so far: \d+ s; training [\d.]+ %, .*; no losses", cost)


def test_the_reason_of_a_rounds_end_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    screen = HandlerLogger("job")
    screen.log_round_end(Ending(kind=EndKind.LOST, reason="lost: b: its process ended"), None)
    screen.log_round_end(Ending(kind=EndKind.FAILED, reason="b: worker 0 ended with status 1"), None, done=True)
    screen.log_round_end(Ending(kind=EndKind.CLOSED, reason="the run is closed: done"), Closed(reason="done", by="b"))
    assert [record.getMessage() for record in caplog.records] == [
        "run job: lost: b: its process ended; meeting again",
        "run job: b: worker 0 ended with status 1; the workers here have succeeded, and this agent does not come again",
        "run job is closed by b: done",
    ]


def test_the_reason_of_a_wait_is_printed(
    url: str, run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdzv.torch.agent.screen.WAITS_SILENTLY", 0.01)
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    reasons: list[str] = []

    def status() -> rdzv.RunStatus:
        """Return the status, and record its reason. It is polled."""
        found = handler.status()
        reasons.append(found.reason)
        return found

    where = f"{url}/{run_id}?min_nodes=2"
    with (
        rdzv.sync.connect(where, node_id="a") as handler,
        rdzv.sync.connect(where, node_id="b") as other,
        ThreadPoolExecutor(1) as pool,
        HandlerLogger(run_id).log_waits(cast("rdzv.sync.Handler", SimpleNamespace(status=status))),
    ):
        joining = pool.submit(handler.next_rendezvous)
        while sum("1 of at least 2 nodes" in reason for reason in reasons) < 5:
            time.sleep(0.01)  # it is looked at alone
        other.next_rendezvous()
        joining.result(30)
    told = [record.getMessage() for record in caplog.records if record.name == "rdzv.torch"]
    assert sum("waiting: 1 of at least 2 nodes" in line for line in told) == 1, "the seconds that run down are no news"


def test_an_error_ends_the_process_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        print_error_and_exit(ValueError("this is wrong; do that"))
    assert ended.value.code == 1
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("this is wrong; do that", None)


def test_an_agent_that_a_signal_ends_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    others: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: others.append(kind.__name__))
    told: list[str] = []
    HandlerLogger("job").hide_signal_traceback(told.append)
    for error in (SignalException("got signal: 15", sigval=signal.SIGTERM), ValueError("mine"), KeyboardInterrupt()):
        sys.excepthook(type(error), error, None)
    assert (others, told) == (["ValueError"], ["SIGTERM", "SIGINT"])
    caplog.set_level(logging.DEBUG, logger="rdzv.torch")
    error = SignalException("got signal: 15", sigval=signal.SIGTERM)
    sys.excepthook(SignalException, error, None)
    assert caplog.records[-1].exc_info is not None
    assert caplog.records[-1].exc_info[1] is error
    assert others == ["ValueError"], "no traceback waits for a reader of standard error"


@pytest.mark.parametrize(
    ("serves_for", "what_then"),
    [
        (None, "the run goes on without it"),
        (30.0, "the store ends with it, once the others have gone; those of this run have 30 s for that; again after"),
    ],
)
def test_an_agent_that_a_signal_ends_says_so_in_one_line(
    serves_for: float | None, what_then: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    HandlerLogger("job").log_signal("SIGTERM", serves_for=serves_for)
    (record,) = caplog.records
    said = f"run job: this agent ends, since it was told to end by SIGTERM; {what_then}"
    assert record.getMessage().startswith(said)


def test_the_address_of_the_run_is_printed(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rdzv.torch")
    for nodes, said in (("min_nodes=2&max_nodes=4", "2 to 4 nodes"), ("min_nodes=1", "1 node")):
        settings = make_handler(f"{url}/job?{nodes}", {}).settings
        for host, serves in (
            (None, ", and serves the store"),
            ("run x, node b", "; run x, node b serves the store"),
            ("", ""),
        ):
            HandlerLogger("job").log_start(settings, "a", host=host)
            assert caplog.records[-1].getMessage() == f"run job: joining at {url}, {said}; this one is a{serves}"
