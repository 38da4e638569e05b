"""Real processes of a run: they are started, killed and waited for, and none is left behind."""

import signal
from pathlib import Path

import pytest

from rdzv.testing import ProcessesError, processes

SCRIPT = """
import os, rdzv.sync
with rdzv.sync.connect(os.environ["RDZV_URL"]) as handler:
    while not handler.is_closed():
        info = handler.next_rendezvous()
        print(handler.node_id, "is one of", info.world_size, flush=True)
        if info.world_size == 1:
            handler.set_closed("alone")
        with handler.changes() as changes:
            next(iter(changes))
"""


def test_one_is_killed_and_the_other_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with processes(2, script, min_nodes=1, max_nodes=2) as started:
        for index in (0, 1):
            started.wait_for(index, f"node-{index} is one of 2")
        started.kill(0)
        assert started.wait() == [-signal.SIGKILL, 0]
        assert "node-1 is one of 1" in started.output(1)


async def test_a_process_that_does_not_end_is_reported_with_its_output_and_killed() -> None:
    async with processes(1, ["sh", "-c", "echo $RDZV_MIN_NODES $WORD; sleep 1000"], env={"WORD": "hello"}) as started:
        started.wait_for(0, "1 hello")
        with pytest.raises(RuntimeError, match="process 0 runs"):
            started.start(0)
        started.pause(0)
        started.resume(0)
        with pytest.raises(ProcessesError, match=r"(?s)\[0\] have not ended within 0.1 s.*1 hello"):
            started.wait(within=0.1)
        started.terminate(0)
        assert started.wait() == [-signal.SIGTERM]
        with pytest.raises(ProcessesError, match="has not written 'goodbye'"):
            started.wait_for(0, "goodbye")
        started.start(0)
        assert started.pid(0) > 0
    with pytest.raises(ValueError, match="at least one"):
        processes(0, "script.py")
