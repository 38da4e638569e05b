"""Each promise has tests of its number, and each test in `tests/guarantees` has the number of a promise."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests" / "guarantees").glob("test_*.py"))
NUMBER = re.compile(r"test_([rs]\d+)_")


PUBLIC = {"rdzv", "rdzv.sync", "rdzv.testing", "rdzv.torch", "store", "store.sync", "store.when"}
"""The modules that tests of guarantees may import. All others are for the tests of their rooms."""


def promised_in(page: str) -> set[str]:
    """Return the numbers of the promises that a page lists: `- **S4 Watches** are ...`."""
    numbers: list[str] = re.findall(r"^- \*\*([RS]\d+)\b", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(numbers) == len(set(numbers)) > 0, f"{page} numbers two promises alike, or none"
    return {number.lower() for number in numbers}


PROMISED = promised_in("docs/promises.md")


def functions_of(path: Path) -> list[str]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, functions) and node.name.startswith("test_")]


def test_the_readme_lists_six_of_them() -> None:
    """The whole list is in docs/promises.md."""
    assert promised_in("README.md") < PROMISED
    assert len(promised_in("README.md")) == 6


@pytest.mark.parametrize("number", sorted(PROMISED))
def test_a_promise_has_tests_in_a_file_of_its_number(number: str) -> None:
    assert [path for path in FILES if path.name.startswith(f"test_{number}_") and functions_of(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_guarantee_is_tested_under_the_number_of_its_promise(path: Path) -> None:
    files_own = NUMBER.match(path.name)
    for name in functions_of(path):
        number = NUMBER.match(name)
        assert number is not None, f"{name} names no promise"
        assert number[1] in PROMISED
        assert files_own is None or files_own[1] == number[1], f"{name} belongs to another file"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_guarantee_uses_public_names_only(path: Path) -> None:
    """So the tests of guarantees survive a redesign."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {each for each in modules if each.partition(".")[0] in ("rdzv", "store")} <= PUBLIC
