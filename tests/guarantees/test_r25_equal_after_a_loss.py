"""R25 **Equal after a loss.** The state that `sync_state` restores is equal on all members and holds nothing of the
step that the loss ended. The docs list the state that it does not restore.

The cases combine each kind of optimizer, each change of the members, each place of a step, and both twins. Weights,
buffers and the state of the optimizer are bit for bit those of a run without the change. `RDZV_R25_EVERY=1` runs all
combinations.
"""

import itertools
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import store.sync
from tests.support.processes import require, start_python
from tests.support.seeds import EVERYTHING
from tests.support.twins import TWINS

KINDS = ("sgd", "adam", "scaler", "lbfgs", "shards")
PLACES = ("check", "batch", "backward", "stepped", "sync")
WAYS = [*(f"killed.{place}" for place in PLACES), "drained.", "resized.", "newcomer."]
EVERY = [".".join(parts) for parts in itertools.product(KINDS, WAYS, TWINS)]

NEWCOMERS_RUN = ["sgd.killed.batch.awaited", "lbfgs.killed.backward.blocking"]
"""The two in which survivors have something to take back; what each newcomer to the project runs."""

PAIRS = [
    *NEWCOMERS_RUN,
    "sgd.killed.stepped.blocking",
    "sgd.drained..blocking",
    "sgd.resized..awaited",
    "sgd.newcomer..awaited",
    "adam.killed.backward.awaited",
    "adam.resized..blocking",
    "scaler.killed.check.blocking",
    "scaler.killed.batch.awaited",
    "scaler.drained..awaited",
    "lbfgs.killed.sync.awaited",
    "lbfgs.newcomer..blocking",
    "shards.killed.batch.awaited",
    "shards.killed.sync.blocking",
    "shards.resized..awaited",
]
"""Each kind with each change that matters to it, and each place, once."""


def read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def difference(case: str, folder: Path) -> list[str]:
    """Describe where the state of the members differs from that of the undisturbed run at the same step."""
    kind, way = case.split(".")[:2]
    calm = "alone" if way in {"resized", "newcomer"} else "calm"
    ends = sorted(folder.glob(f"{case}.[a-d].*"))
    names = [path.name.split(".")[4] for path in ends]
    steps = {path.name.split(".")[5] for path in ends}
    if len(names) != 2 or names[0] != "a" or len(steps) != 1:
        return [f"{case}: {names} ended, at {steps}"]
    found = []
    for path, name in zip(ends, names, strict=True):
        own, wanted = read(path), read(folder / f"{kind}.{calm}..blocking.a.{steps.copy().pop()}")
        if name != "a":
            wanted["buffers"] = None
        found += [f"{case}: {what} of {name}" for what in wanted if own[what] != wanted[what]]
    return found


async def test_r25_nothing_of_an_interrupted_step_remains(tmp_path: Path) -> None:
    """Weights, buffers and optimizers are as if all members had stayed."""
    require("torch")
    cases = EVERY if os.environ.get("RDZV_R25_EVERY") == "1" else PAIRS if EVERYTHING else NEWCOMERS_RUN
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 6):  # without `fully_shard`
        cases = [case for case in cases if not case.startswith("shards")]
    with store.sync.serve() as server:
        program = ("-m", "tests.rdzv.torch.interrupted_program", server.url, str(tmp_path), *cases)
        async with start_python(*program) as child:
            assert await child.wait(timeout=90 + 5 * len(cases)) == 0
    assert [one for case in cases for one in difference(case, tmp_path)] == []
