"""Each command in each unusual environment: it works, or prints one sentence with a remedy."""

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import store.sync
from rdzv.cli.main import ROOMS
from tests.support.processes import ROOT, free_port

WITHIN = 1.0  # seconds until the sentence, besides the start of a Python with our modules
START = 3.0  # seconds for that start, on a busy machine
ENDS_BY_ITSELF = {"serve", "demo"}  # these run until they are stopped, or take long

LINES: dict[str, str] = {
    "run": "run {url}?min_nodes=1 -- true",
    "status": "status {url}",
    "history": "history {url}",
    "timeline": "timeline {url} -o {folder}/page.html",
    "doctor": "doctor {url}",
    "close": "close {url}",
    "reopen": "reopen {url}",
    "ban": "ban {url} a",
    "unban": "unban {url} a",
    "drain": "drain {url} a",
    "resize": "resize {url} --max 3",
    "lost": "lost {url} a",
    "stacks": "stacks {url} a",
    "chaos": "chaos {url} --kill 1/10m --for 1s --yes",
    "ping": "ping {server}",
    "runs": "runs {server}",
    "forget": "forget {url} --force",
    "stats": "stats {server}",
    "check": "check {folder}/none",
    "backup": "backup {folder}/none {folder}/copy",
    "restore": "restore {folder}/none {folder}/data",
    "token": "token",
}
MAIN = "import runpy; runpy.run_module('rdzv', run_name='__main__')"
# in a process of another user that cannot read our modules
NO_ENTRY = f"import pwd; pwd.getpwuid = {{}}.__getitem__; {MAIN}"
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "LANG=C": {"env": {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}},
    "TERM=dumb": {"env": {"TERM": "dumb", "COLUMNS": "1"}},
    "no TMPDIR": {"env": {"TMPDIR": "/nowhere", "HOME": "/nowhere"}},
    "no passwd entry": {"code": NO_ENTRY, "env": {"HOME": ""}},
    "input and output closed": {"preexec_fn": functools.partial(os.closerange, 0, 2)},
    "nobody reads": {"stdout": "broken"},
}


def test_each_command_has_a_command_line_here() -> None:
    assert set(ROOMS) - ENDS_BY_ITSELF == set(LINES)


@pytest.fixture(scope="module")
def server() -> Iterator[store.Server]:
    with store.sync.serve() as serving:
        yield serving


@pytest.mark.some_of(4)
@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("command", LINES)
def test_commands(command: str, environment: str, server: store.Server) -> None:
    more = dict(ENVIRONMENTS[environment])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        url = f"{server.url}/job-{free_port()}"
        words = LINES[command].format(url=url, server=server.url, folder=folder).split()
        env = {**os.environ, "PYTHONPATH": str(ROOT), **more.pop("env", {})}
        if more.pop("stdout", None):
            reading, more["stdout"] = os.pipe()
            os.close(reading)
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", more.pop("code", MAIN), *words],
            env=env,
            cwd=folder,
            check=False,
            timeout=60,
            stderr=subprocess.PIPE,
            **{"stdout": subprocess.DEVNULL, **more},
        )
        took = time.monotonic() - began
        if isinstance(more.get("stdout"), int):
            os.close(more["stdout"])
    said = done.stderr.decode()
    assert "Traceback" not in said, said
    assert done.returncode in {0, 1, 2, 3, 4, 5, *range(120, 125)}, (done.returncode, said)
    if done.returncode:
        assert len(said.strip().splitlines()) == 1 or command == "doctor", said
        assert took < START + WITHIN, said
