"""An agent's screen: one line for each thing that happens, with PyTorch's prefix, and LOGLEVEL obeyed."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from typing import TYPE_CHECKING

import pytest

import rdzv
import rdzv.sync
from rdzv.errors import RendezvousConnectionError
from rdzv.torch.memory_store import MemoryStore
from rdzv.torch.screen import Screen, configure_logging, end_with
from tests.support.processes import free_port, require

if TYPE_CHECKING:
    from collections.abc import Iterator

require("torch")


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
    where = f"{url}/{run_id}?min_nodes=1&max_nodes=2&last_call_timeout=0"
    with rdzv.sync.connect(where, node_id="a") as handler:
        screen = Screen(run_id)
        screen.met(handler.next_rendezvous(), 0.1)
        with rdzv.sync.connect(where, node_id="b") as other:
            joining = threading.Thread(target=other.next_rendezvous)
            joining.start()
            while not handler.num_nodes_changed():
                pass
            screen.met(handler.next_rendezvous(), 0.2)
            joining.join()
            listening = screen
            listening.listen(handler)
        while "has left" not in caplog.text:
            pass
        screen.met(handler.next_rendezvous(), 0.3)
    screen.stop()
    told = [
        record.getMessage().removeprefix(f"run {run_id}") for record in caplog.records if record.name == "rdzv.torch"
    ]
    assert told == [
        ", round 0: 1 node; this one, a, has rank 0; met within 0.1 s",
        ", round 1: 2 nodes; new: b; this one, a, has rank 0; met within 0.2 s",
        ": b has left; meeting again",
        ", round 2: 1 node; gone: b; this one, a, has rank 0; met within 0.3 s",
    ]


def test_what_is_waited_for_is_told(
    url: str, run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdzv.torch.screen.WAITS_SILENTLY", 0.1)
    caplog.set_level(logging.INFO)
    with (
        rdzv.sync.connect(f"{url}/{run_id}?min_nodes=2&join_timeout=1") as handler,
        pytest.raises(rdzv.RendezvousTimeoutError),
        Screen(run_id).meeting(handler),
    ):
        handler.next_rendezvous()
    waiting = [record for record in caplog.records if record.name == "rdzv.torch"]
    assert len(waiting) == 1, "the seconds that run down are no news"
    assert "waiting: 1 of at least 2 nodes" in waiting[0].getMessage()


def test_an_error_ends_the_process_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        end_with(ValueError("this is wrong; do that"))
    assert ended.value.code == 1
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("this is wrong; do that", None)


def test_a_memory_store_whose_process_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.torch.memory_store.COMES_BACK_WITHIN", 0.3)
    from rdzv.torch.store import unconnected_handler

    settings = unconnected_handler(f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1", {}).settings
    assert MemoryStore.of(settings, {"commits": 3}) is None
    store = MemoryStore.of(settings, {"commits": 0})
    assert store is not None
    with pytest.raises(RendezvousConnectionError, match=r"was in memory only, and its process is gone.*--data-dir"):
        store.raise_if_gone()
