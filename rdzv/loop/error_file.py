"""Shell: reads a process's exception from the file that PyTorch's `@record` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

CHARACTERS_MAX: Final = 200  # of a line that all nodes read


def raised_in(file: str | Path) -> str:
    """Return the first line of a process's exception; "" if its error file has none."""
    try:
        message = json.loads(Path(file).read_text(encoding="utf-8"))["message"]
        text = message["message"] if isinstance(message, dict) else message
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    lines = text.strip().splitlines() if isinstance(text, str) else []
    return lines[0][:CHARACTERS_MAX] if lines else ""
