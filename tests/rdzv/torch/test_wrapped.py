"""Wrappers of models, and helpers that run beside a training, survive the loss of a member in the same process."""

import re
from pathlib import Path

import pytest

from tests.support.processes import require, start_python

require("torch")  # the imports below need it

from rdzv.torch.pytorch import RELEASE  # noqa: E402

KINDS = ("ddp", "fully_shard", "compile", "mesh", "workers", "async_save", "monitored_barrier")
OF_OTHERS = {"fabric": "lightning_fabric", "accelerate": "accelerate"}  # and the modules that are needed


@pytest.mark.skipif(RELEASE < (2, 8), reason="fully_shard has its public name from 2.6 on; tried from 2.8 on")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", [KINDS, ("fabric",), ("accelerate",)], ids=["torch", "fabric", "accelerate"])
async def test_models_that_are_wrapped_again_in_each_round_survive_a_loss(url: str, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        if kind in OF_OTHERS:
            require(OF_OTHERS[kind])
    async with start_python("-m", "tests.rdzv.torch.wrapped_program", url, *kinds) as program:
        assert await program.wait(timeout=500) == 0, program.written()
        assert sum("ends with the others, 2 of 3, after 10 steps" in line for line in program.stdout) == 2 * len(kinds)


@pytest.mark.timeout(300)
async def test_the_sample_in_the_docs_trains_on_two_nodes(url: str, run_id: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "pytorch.md").read_text(encoding="utf-8")
    (sample,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "asyncio.run" in block)
    sample, changed = re.subn(r"tcp://127[^?]*", f"{url}/{run_id}", sample)
    assert changed == 1
    async with start_python("-c", sample) as first, start_python("-c", sample) as second:
        assert await first.wait(timeout=240) == 0, first.written()
        assert await second.wait(timeout=240) == 0, second.written()
