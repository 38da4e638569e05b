"""Every example runs as a user would run it, exits with status 0, and prints the lines that show its point."""

import ast
from pathlib import Path

import pytest

from tests.support.processes import ROOT, require, start_python

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

TELLING = {
    "async_orchestrator": [
        "of 3, our sum is 6",
        "left: cleo",
        "1 node waiting to join",
        "the run is closed: all is done",
        "verified: 3 nodes, then 2, then 3 again",
    ],
    "blocking_script": [
        "meeting again: lost: ",
        "rank 1 of 2, 'greetings from 127.0.0.1', 2 are done",
        "verified: 3 processes met, one died, and 2 met again",
    ],
    "custom_backend": [
        "refused: node_id='mallory' must be one of nodes=ada,ben,cleo",
        "rank 2 of 3; all: b'ada ben cleo'",
        "verified: a backend of one's own",
    ],
    "elastic_training": [
        "round 0, rank 2 of 3, from step 0",
        "SIGKILL for",
        "lost: ",
        "round 1, rank 1 of 2, from step",
        "dan: round 2, rank 2 of 3, from step",
        "verified: 3.0000 x + -2.0000 is the line, after 250 steps and one death",
    ],
    "in_process_elastic": [
        "SIGKILL for ben",
        "lost: ben",
        "round 1, rank 2 of 3, from step 30",
        "1 node waiting to join",
        "erin: round 2, rank 3 of 4, from step",
        "cleo to leave: maintenance",
        "one killed, one replaced, one drained",
    ],
    "jax_distributed": [
        "process 0 of 2: the sum is 3.0",
        "process 1 of 2: the sum is 3.0",
        "verified: two processes were one cluster",
    ],
    "plain_script": [
        "rank 2 of 3 counts",
        "SIGKILL for cleo",
        "rank 0 of 2 counts",
        "verified: 2262 primes below 20000",
    ],
    "store_alone": [
        "5 clients counted to 100 together",
        "delete config/colour",
        "ben leads",
        "verified: no count was lost",
    ],
    "torchrun_train": ["SIGKILL for agent", "rank 0 of 1, pid", "third: rank 1 of 2, pid", "verified: resumed at step"],
}
"""The lines that each example must print, by its name. A new example needs an entry here."""

NEEDS = {"in_process_elastic": "torch", "jax_distributed": "jax", "torchrun_train": "torch"}
"""Packages that an example needs beside rdzv. Importing them takes seconds."""


@pytest.mark.some_of(6)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
async def test_an_example_prints_its_expected_lines(path: Path) -> None:
    if path.stem in NEEDS:
        require(NEEDS[path.stem])
    async with start_python("-W", "error", str(path)) as example:
        status = await example.wait(timeout=120 if path.stem in NEEDS else 40)
    assert status == 0, example.written()
    for telling in TELLING[path.stem]:
        assert any(telling in line for line in example.output), f"nothing says {telling!r}; {example.written()}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_how_to_run_it(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"python examples/{path.name}" in docstring


def test_every_example_is_expected_and_every_expectation_has_one() -> None:
    assert {path.stem for path in EXAMPLES} == TELLING.keys()
