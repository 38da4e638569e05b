"""How the documentation is built: sphinx-build -W docs OUT; needs the extra `docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))

from rdzv import __version__

project = "rdzv"
author = "The rdzv authors"
copyright = "The rdzv authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
templates_path = ["_templates"]
myst_heading_anchors = 4
suppress_warnings = ["ref.python"]  # `Round` is the name of a class in three public modules
html_theme = "furo"
html_title = f"rdzv {version}"
html_copy_source = False
html_extra_path = ["status.schema.json", "history.schema.json", "benchmarks.schema.json", "benchmarks.json"]

autodoc_default_options = {"members": True, "inherited-members": False}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autosummary_ignore_module_all = False  # a page for each name of `__all__`, made as the pages are built
autosummary_imported_members = True
autosummary_context = {
    # Modules, which have pages of their own, and what another module has a page for.
    "elsewhere": {
        "rdzv": ("StoreError", "sync", "testing"),
        "store": ("recipes", "sync", "when"),
        "store.sync": ("recipes",),
    }
}
autodoc_mock_imports = ["torch"]
napoleon_google_docstring = True
napoleon_use_ivar = True

OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)]*|[\w./-]+\.json)\)")


def name_what_is_not_here(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001  Sphinx's signature
    """Name files of the repository that are no page, instead of linking to them; schemas lie beside the pages."""

    def named(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if target.endswith(".json"):
            return f'<a href="{target}">{text}</a>'
        return text

    source[0] = OUTSIDE.sub(named, source[0])


def name_links(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:  # noqa: ARG001
    """Name what a docstring links to: those of parameters are also rows of a page in Markdown."""
    lines[:] = re.sub(r"\[([^\]]+)\]\([\w./#-]+\)", r"\1", "\n".join(lines)).split("\n")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", name_what_is_not_here)
    app.connect("autodoc-process-docstring", name_links)
