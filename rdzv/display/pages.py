"""Builds pages for a browser from files of this folder; a page is one file that loads nothing else."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdzv.core.report import Account

SCRIPTS = ("text", "states", "data", "map", "rounds", "page")  # each script needs the scripts before it


def live_page() -> str:
    """Return the page that follows the runs of a store, as one file."""
    script = "\n".join(_read(f"page/{name}.js") for name in SCRIPTS)
    return _read("page/page.html").replace("/*page.css*/", _read("page/page.css")).replace("/*SCRIPT*/", script)


def timeline_page(shown: dict[str, Any], cost: Account) -> str:
    """Return a page with a timeline, as one file."""
    data = json.dumps({"timeline": shown, "cost": str(cost)})
    # Escape "<", so that no text in the data can end the script element.
    data = data.replace("<", "\\u003c")
    return _read("timeline.html").replace("/*TIMELINE*/", _read("timeline.js")).replace("/*DATA*/", data)


def _read(name: str) -> str:
    return resources.files("rdzv.display").joinpath(name).read_text(encoding="utf-8")
