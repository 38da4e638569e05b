"""The failure of a worker is noticed at once and reported to the other agents. Its own agent still reaps it."""

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

from rdzv.node.link.node_loop import NodeThread
from store.net.threads import Call
from tests.support.processes import require

require("torch")  # the imports below need it

from torch.distributed.elastic.multiprocessing.api import PContext  # noqa: E402

from rdzv.torch.agent.worker_ends import WorkerEnds  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")

WITHIN = 60  # seconds; only a defect takes that long


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that exits with status 7 when its standard input is closed."""
    command = (sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read(); sys.exit(7)")
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


class Told:
    """The failures reported for an agent's workers. Stands for the agent in this thread."""

    def __init__(self) -> None:
        self.loop = NodeThread()
        self.ends = WorkerEnds(self.loop.spawn, self._hear)
        self.heard: list[str] = []
        self.raised: defaultdict[int, str] = defaultdict(str)  # contents of the error file, by local rank

    async def _hear(self, how: str) -> None:
        self.heard.append(how)

    def follow(self, workers: dict[int, int]) -> Call[None]:
        self.ends.watch_workers(lambda: workers, self.raised.__getitem__)
        assert self.ends._waiting is not None
        return self.ends._waiting


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.ends.stop_watching()
    told.loop.stop_using()


def test_the_first_failure_is_reported_and_its_status_is_left_to_the_agent(
    sleeper: subprocess.Popen[bytes], told: Told
) -> None:
    with subprocess.Popen((sys.executable, "-I", "-S", "-c", "")) as good:
        waiting = told.follow({0: good.pid, 1: sleeper.pid})
        sleeper.kill()
        waiting.wait(WITHIN)
        assert told.heard == ["worker 1 was killed by signal 9"]
        assert (sleeper.wait(WITHIN), good.wait(WITHIN)) == (-signal.SIGKILL, 0)


def test_an_exit_status_and_an_exception_are_reported_too(sleeper: subprocess.Popen[bytes], told: Told) -> None:
    told.raised[3] = "ValueError: no batch 7"
    waiting = told.follow({3: sleeper.pid})
    assert sleeper.stdin is not None
    sleeper.stdin.close()
    waiting.wait(WITHIN)
    assert told.heard == ["worker 3 ended with status 7: ValueError: no batch 7"]


def test_workers_that_the_agent_stops_are_not_reported(sleeper: subprocess.Popen[bytes], told: Told) -> None:
    """Neither after `forget`, nor while PyTorch stops them, which the watcher sees from the agent's stack."""
    waiting = told.follow({0: sleeper.pid})
    told.ends.stop_watching()
    assert waiting.over.wait(WITHIN)
    waiting = told.follow({0: sleeper.pid})

    class Stopping(PContext):  # type: ignore[misc]
        """Ends a process as PyTorch does, and blocks until the watcher has stopped."""

        def __init__(self) -> None:
            self._tail_logs: list[object] = []
            self.filtered_stdout = self.filtered_stderr = None
            self._stdout_tail = self._stderr_tail = None  # in releases before there was a list of them

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:  # noqa: ARG002
            sleeper.send_signal(death_sig)
            waiting.wait(WITHIN)

        def _start(self) -> None: ...
        def _poll(self) -> None: ...
        def pids(self) -> dict[int, int]:
            return {}

    Stopping().close()
    assert not told.heard


def test_a_worker_that_was_already_reaped_is_left_to_the_agent(sleeper: subprocess.Popen[bytes], told: Told) -> None:
    sleeper.kill()
    sleeper.wait()
    told.follow({0: sleeper.pid}).wait(WITHIN)
    assert not told.heard
