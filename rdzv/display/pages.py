"""Shell: pages for a browser, made of the files beside this one: each is one file that loads nothing else."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdzv.core.report import Account

__all__ = ["timeline_page", "timeline_script"]


def timeline_script() -> str:
    """Return the script that draws a timeline: it defines the function `drawTimeline`."""
    return _read("timeline.js")


def timeline_page(shown: dict[str, Any], cost: Account) -> str:
    """Return a page with a timeline, as one file."""
    data = json.dumps({"timeline": shown, "cost": str(cost)})
    # Within a script element nothing but its end has a meaning, and that begins with "<".
    data = data.replace("<", "\\u003c")
    return _read("timeline.html").replace("/*TIMELINE*/", timeline_script()).replace("/*DATA*/", data)


def _read(name: str) -> str:
    return resources.files("rdzv.display").joinpath(name).read_text(encoding="utf-8")
