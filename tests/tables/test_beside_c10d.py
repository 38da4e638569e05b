"""Programs under torchrun with c10d's rendezvous and with ours: docs/pytorch.md has each difference."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.seeds import EVERYTHING

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not EVERYTHING, reason="each program starts PyTorch four times: in CI")

WORKER = """
import json, os, socket, sys
from datetime import timedelta
import torch.distributed as dist
what, out = sys.argv[1:]
rank = os.environ["RANK"]
found = {"environment": sorted(set(os.environ) - set(json.loads(os.environ["BEFORE"])))}
with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10):
    found["somebody listens at MASTER_PORT"] = True
if what == "group":
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    private = dist.new_group([0, 1])
    dist.barrier(private)
    dist.destroy_process_group()
with open(f"{out}/{rank}", "w") as file:
    json.dump(found, file)
print("out", rank)
if what == "fails" and rank == "1":
    sys.exit(7)
"""
PROGRAMS = "plain", "group", "fails"


def ran(backend: str, what: str, folder: Path) -> dict[str, Any]:
    """Run a program of two workers on one node. Return its output and the facts that its workers found."""
    folder.mkdir()
    (folder / "worker.py").write_text(WORKER)
    (folder / "out").mkdir()
    before = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before["BEFORE"] = json.dumps([*before, "BEFORE"])
    line = f"--rdzv-backend={backend} --rdzv-endpoint=localhost:0 --rdzv-id=job --nnodes=1 --nproc-per-node=2"
    logs = f"--redirects=3 --log-dir={folder}/logs"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *line.split(), *logs.split(), "worker.py", what, "out"],
        cwd=folder,
        env=before,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    workers = [json.loads(file.read_text()) for file in sorted((folder / "out").iterdir())]
    assert len(workers) == 2, done.stderr
    names = {str(path.relative_to(folder / "logs")) for path in (folder / "logs").rglob("*")}
    return {
        "status": done.returncode,
        "workers": workers,
        "logs": sorted({re.sub(r"^(job_)[^/]*", r"\1x", name) for name in names}),
    }


def in_the_page(word: str) -> bool:
    page = (ROOT / "docs" / "pytorch.md").read_text()
    return f"`{word}" in page[page.index("## Move from c10d") : page.index("## Beside c10d")]


@pytest.mark.parametrize("what", PROGRAMS)
def test_each_difference_is_on_the_page(what: str, tmp_path: Path) -> None:
    theirs, ours = (ran(backend, what, tmp_path / backend) for backend in ("c10d", "rdzv"))
    assert ours["status"] == theirs["status"]
    assert ours["logs"] == theirs["logs"]
    for their, our in zip(theirs["workers"], ours["workers"], strict=True):
        differ = _names(their) ^ _names(our)
        assert [name for name in sorted(differ) if not in_the_page(name)] == []
        assert {**our, "environment": None} == {**their, "environment": None}


def _names(worker: Mapping[str, Any]) -> set[str]:
    return set(worker["environment"])
