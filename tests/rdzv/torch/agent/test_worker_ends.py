"""How a worker has failed is known at once, is told to the other agents, and is left to the agent to reap."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

import rdzv.sync
from tests.support.processes import require

if TYPE_CHECKING:
    from collections.abc import Iterator

require("torch")  # what follows cannot be imported without

from torch.distributed.elastic.multiprocessing.api import PContext  # noqa: E402

from rdzv.torch.agent.screen import Screen  # noqa: E402
from rdzv.torch.agent.worker_ends import WorkerEnds, hear_of_failure, tell_of_failure  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")

WITHIN = 60  # seconds; only a defect takes so long


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its standard input does, with status 7."""
    command = (sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read(); sys.exit(7)")
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_how_the_first_one_fails_is_told_and_its_status_is_left_to_the_agent(
    sleeper: subprocess.Popen[bytes],
) -> None:
    told: queue.Queue[str] = queue.Queue()
    ends = WorkerEnds(told.put)
    with subprocess.Popen((sys.executable, "-I", "-S", "-c", "")) as good:
        ends.follow(lambda: {0: good.pid, 1: sleeper.pid})
        sleeper.kill()
        assert told.get(timeout=WITHIN) == "worker 1 was killed by signal 9"
        assert (sleeper.wait(WITHIN), good.wait(WITHIN)) == (-signal.SIGKILL, 0)
    ends.forget()
    assert told.empty()


def test_an_exit_status_is_told_too(sleeper: subprocess.Popen[bytes]) -> None:
    told: queue.Queue[str] = queue.Queue()
    ends = WorkerEnds(told.put)
    ends.follow(lambda: {3: sleeper.pid})
    assert sleeper.stdin is not None
    sleeper.stdin.close()
    assert told.get(timeout=WITHIN) == "worker 3 ended with status 7"


def until_ended(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        thread.join(WITHIN)
        assert not thread.is_alive()


def test_what_the_agent_does_to_its_workers_is_not_told(sleeper: subprocess.Popen[bytes]) -> None:
    """Neither after `forget`, nor while PyTorch stops them: then the thread that waits sees it in the agent's stack."""
    told: queue.Queue[str] = queue.Queue()
    ends = WorkerEnds(told.put)
    before = set(threading.enumerate())
    ends.follow(lambda: {0: sleeper.pid})
    ends.forget()
    until_ended(before)

    class Stopping(PContext):  # type: ignore[misc]
        """Ends a process as PyTorch does, and goes on until nobody waits for its end any more."""

        def __init__(self) -> None:
            self._tail_logs: list[object] = []
            self.filtered_stdout = self.filtered_stderr = None

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:  # noqa: ARG002
            sleeper.send_signal(death_sig)
            until_ended(before)

        def _start(self) -> None: ...
        def _poll(self) -> None: ...
        def pids(self) -> dict[int, int]:
            return {}

    ends.follow(lambda: {0: sleeper.pid})
    Stopping().close()
    assert told.empty()


def test_who_has_been_reaped_already_is_left_to_the_agent(sleeper: subprocess.Popen[bytes]) -> None:
    told: queue.Queue[str] = queue.Queue()
    ends = WorkerEnds(told.put)
    sleeper.kill()
    sleeper.wait()
    before = set(threading.enumerate())
    ends.follow(lambda: {0: sleeper.pid})
    until_ended(before)
    assert told.empty()


def test_the_first_failure_of_a_round_is_told_to_all_others(
    url: str, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="rdzv.torch")
    where = f"{url}/{run_id}?min_nodes=2"
    with rdzv.sync.connect(where, node_id="a") as a, rdzv.sync.connect(where, node_id="b") as b:
        joining = threading.Thread(target=b.next_rendezvous)
        joining.start()
        a.next_rendezvous()
        joining.join()
        screen = Screen(run_id)
        first, second = a.node, b.node
        assert first is not None and first.membership is not None
        assert second is not None and second.membership is not None
        hearing = first.loop.start(hear_of_failure(first, first.membership, screen.failed))
        deaf = second.loop.start(hear_of_failure(second, second.membership, screen.failed))
        for how in ("worker 1 was killed by signal 9", "worker 0 ended with status 1"):
            second.loop.start(tell_of_failure(second, second.membership, how)).wait(WITHIN)
        hearing.wait(WITHIN)
        deaf.wait(WITHIN)  # it hears what it has told itself, and says nothing
        waits = first.loop.start(hear_of_failure(second, second.membership, screen.failed))
        b.leave()
        waits.wait(WITHIN)  # its round is over, and so it ends
    assert [record.getMessage() for record in caplog.records if record.name == "rdzv.torch"] == [
        f"run {run_id}: b: worker 1 was killed by signal 9"
    ]
