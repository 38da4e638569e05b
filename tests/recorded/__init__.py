"""Recordings of behaviour: each is a text beside this file, and a test plays it again and compares.

Assertions say what must hold; a recording shows whatever changes: another moment, one more request, one more field.
Each module of `MODULES` has `RECORDINGS`: by name, a function that plays it and returns its lines, which depend neither
on the Python, the folder, the machine, the date, nor on what ran before.

    python -m tests.recorded [NAME ...]     record anew; then read the differences as a reviewer does
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

__all__ = ["compare", "recordings", "write"]

MODULES: Final = ("coordinator", "core", "rounds", "store_client", "store_engine", "store_protocol", "store_server")
FOLDER: Final = Path(__file__).parent
CONTEXT: Final = 5  # equal lines before the first difference
SHOWN: Final = 15  # lines from there, of either
KEPT_WIDTH: Final = 160  # characters of a line in a failure
FIXED_DATE: Final[Any] = mock.patch("time.time", return_value=1.79e9)


def recordings() -> dict[str, Callable[[], Iterable[str]]]:
    """Return what is recorded, by name."""
    found: dict[str, Callable[[], Iterable[str]]] = {}
    for module in MODULES:
        for name, play in importlib.import_module(f"{__name__}.{module}").RECORDINGS.items():
            found[f"{module}.{name}"] = FIXED_DATE(lambda _, play=play, **options: [*play(**options)])
    return found


def write(name: str, lines: Iterable[str]) -> None:
    """Record anew."""
    (FOLDER / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def compare(name: str, lines: Iterable[str]) -> str:
    """Return "" if the lines are as recorded, or else where they begin to differ, and how to record anew."""
    path = FOLDER / f"{name}.txt"
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    after = "\n".join(lines).splitlines()
    if before == after:
        return ""
    pairs = zip(before, after, strict=False)
    at = next((index for index, (old, new) in enumerate(pairs) if old != new), min(len(before), len(after)))
    begin = max(at - CONTEXT, 0)
    return "\n".join(
        (
            f"{path.name} differs from line {at + 1} on:",
            *_marked(" ", before[begin:at]),
            *_marked("-", before[at : at + SHOWN]),
            *_marked("+", after[at : at + SHOWN]),
            f"If this is meant to change: python -m tests.recorded {name}, and read the difference.",
        )
    )


def _marked(mark: str, lines: Sequence[str]) -> list[str]:
    return [f"{mark} {line[:KEPT_WIDTH]}" for line in lines]
