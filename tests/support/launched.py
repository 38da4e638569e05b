"""Launchers to test: real ones, over a real store, with commands that do as they are told by signals."""

import contextlib
import json
import os
import signal
import sys
from typing import Any

from tests.support.processes import ROOT, Child, start_python

WORKER = str(ROOT / "tests/support/obedient.py")
SUCCEED, FAIL = signal.SIGUSR1, signal.SIGUSR2

TAKES_MASTER_PORT = """
import os, socket
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    socket.create_server(("", int(os.environ["MASTER_PORT"])))

main()
"""

TWO = "min_nodes=2&last_call_timeout=0&disconnect_ttl=0.3"
TWO_OR_THREE = "min_nodes=2&max_nodes=3&last_call_timeout=0&disconnect_ttl=0.3"


def node(
    url: str, name: str, *options: str, does: tuple[str, ...] = (), command: tuple[str, ...] | None = None
) -> contextlib.AbstractAsyncContextManager[Child]:
    """A launcher whose command is the obedient worker, or this one."""
    command = command or (sys.executable, WORKER, *does)
    return start_python("-W", "error", "-m", "rdzv", "run", f"{url}&node_id={name}", *options, "--", *command)


async def started(launcher: Child) -> dict[str, Any]:
    """Return the environment of the next process that starts, by the names of the variables."""
    line = await launcher.line(containing='"RANK"', timeout=20)
    told: dict[str, Any] = json.loads(line[line.index("{") :])
    return told


def tell(process: dict[str, Any], number: signal.Signals) -> None:
    os.kill(process["pid"], number)


def places(*processes: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(process["RDZV_ROUND"], process["RANK"], process["WORLD_SIZE"]) for process in processes]
