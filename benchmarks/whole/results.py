"""The measurements: one JSON file, written anew after each row, and medians.

docs/benchmarks.schema.json describes the file. Each part has rows, one per measurement, as flat objects; the keys of a
row (`who`, `nodes`, `run` and the like) stand beside its figures. Seconds, bytes and shares of a core are plain numbers
in these units; null is a value that could not be measured.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from benchmarks import support

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1

Row = dict[str, Any]


class Results:
    """The measurements so far; `data` is the file's content."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {"format": FORMAT, "machine": "", "left_out": {}, "parts": {}}

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file; a missing one is empty."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT:
            raise SystemExit(f"{path} has the format {data.get('format')}, and not {FORMAT}: move it out of the way")
        return cls(data)

    def save(self, path: Path) -> None:
        """Replace the file at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(new, path)

    def begin(self, part: str) -> None:
        """Drop an earlier run's rows of this part."""
        self.data["parts"][part] = {"status": "begun", "seconds": 0.0, "errors": [], "rows": []}

    def add(self, part: str, row: Row) -> None:
        """Keep one measurement."""
        plain = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        self.data["parts"][part]["rows"].append(plain)

    def rows(self, part: str, **what: object) -> list[Row]:
        """Return the rows of a part with these values."""
        found: list[Row] = self.data["parts"].get(part, {}).get("rows", [])
        return [row for row in found if all(row.get(name) == value for name, value in what.items())]

    def value(self, part: str, figure: str, **what: object) -> float:
        """Return the median of a figure over the rows with these values; not a number if there is none."""
        return support.median([row[figure] for row in self.rows(part, **what) if row.get(figure) is not None])

    def points(self, part: str, across: str, figure: str, **what: object) -> list[tuple[float, float]]:
        """Return the medians of a figure, by size."""
        sizes = sorted({row[across] for row in self.rows(part, **what) if row.get(figure) is not None})
        return [(size, self.value(part, figure, **{**what, across: size})) for size in sizes]

    def totals(self, part: str, figure: str, **what: object) -> list[tuple[float, float]]:
        """Return the medians of a figure per node, multiplied by the nodes."""
        return [(nodes, value * nodes) for nodes, value in self.points(part, "nodes", figure, **what)]
