"""The configuration of the documentation: sphinx-build -W docs OUT; needs the extra `docs`."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))

from rdzv import __version__

ROOT = Path(__file__).parents[1]

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

autodoc_default_options = {"members": True}
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

COLON = "\ue000"  # in the first line of an attribute, where napoleon takes one for the end of a type
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
    """Name the target of a docstring's link; docstrings of parameters are also rows of a page in Markdown."""
    lines[:] = re.sub(r"\[([^\]]+)\]\([\w./#-]+\)", r"\1", "\n".join(lines)).replace(COLON, ":").split("\n")


# ------------------------------------------------------------------------------------------ classes

OF_THE_INSIDE = {
    *("prepare", "require_left", "has_progressed", "gate", "life", "lags"),  # of a round
    *("all_here", "answer_operator", "call", "change_counts", "check_usable", "leaves_because", "node", "usable_node"),
    *("note_failure", "num_nodes_changed", "open_blocking_store", "questions", "roster", "status_and_cost"),
    *(
        "describe_gone_node",
        "draining",
        "draining_members",
        "hosts_store",
        "is_draining",
        "own_node",
        "open_blocking_shared_store",
        "store_loss",
    ),
    *("Handler.run_closing", "Handler.membership", "Handler.spawn"),
    *("blocking", "end_calls", "end_waits", "without_wait_reports", "reopened"),
    *("ignoring_losses", "Lent.lease", "Lent.fence", "prefix", "of_round", "TorchStore.end"),
    *(
        "abandon_request",
        "start_request",
        "send_ping",
        "awaits_answer",
        "cap_retry_pauses",
        "socket_addresses",
        "fail",
        "fail_over",
        "failure",
    ),
    *(
        "interrupt",
        "last_problem",
        "may_write",
        "has_met_store",
        "send_and_forget",
        "on_connection_change",
        "handle_bytes",
        "seek_successor",
    ),
    *("observed_address", "server", "notify_connection_change", "tells_causes", "figure_by_limit", "memory_reserve"),
    *("Server.start", "Server.shut_down", "figures", "protocol", "add_request_callback", "end_when_alone", "table"),
    *("HeldLease.keep", "HeldLease.release", "renew_now", "kept", "valid_until", "task"),
    *("Cluster.end", "joined", "say", "has_let_go", "sources", "ClusterNode.start"),
}
"""What public classes have for other rooms: callers do not need it, and the pages do not show it."""


def public() -> set[str]:
    """The names that can be imported, without PyTorch."""
    modules = ("rdzv", "rdzv.sync", "rdzv.testing", "store", "store.recipes", "store.sync")
    return {name for module in modules for name in importlib.import_module(module).__all__}


def ours() -> set[str]:
    """The names of all our classes."""
    files = [path for package in ("rdzv", "store") for path in (ROOT / package).rglob("*.py")]
    return {name for path in files for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.MULTILINE)}


INSIDE = ours() - public()


def is_made_by_us(kind: type) -> bool:
    """Return True if only this library can make one: its constructor takes private types."""
    of_init = getattr(kind.__init__, "__annotations__", {})  # type: ignore[misc]
    return any(set(re.findall(r"\w+", str(each))) & INSIDE for each in of_init.values())


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: object) -> bool | None:  # noqa: ARG001
    """Leave out private members."""
    defined = getattr(getattr(obj, "fget", obj), "__qualname__", "")
    return True if {name, defined} & OF_THE_INSIDE else None


def sign(app: Sphinx, what: str, name: str, obj: Any, options: object, *_: object) -> tuple[str, None] | None:  # noqa: ARG001
    """Leave out the signature of a constructor that users do not call."""
    return ("", None) if what == "class" and is_made_by_us(obj) else None


def complete(app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:  # noqa: ARG001
    """Complete the docstring of a class before napoleon reads it; escape colons that would end a type."""
    if what in {"attribute", "property", "data"}:
        of_its_class = inspect.getdoc(type(obj)) or ""  # `__doc__` may be a slot
        if lines and (lines[0].startswith("Alias for field") or lines[0] in of_its_class):
            lines.clear()
        lines[:1] = [line.replace(":", COLON) for line in lines[:1]]
    elif what == "method":
        lines[:] = [line for line in lines if not line.startswith("    node: ")]  # a verb's first argument
    elif what == "class":
        if is_made_by_us(obj):
            drop(lines, "Args:")
        for base in obj.__mro__[1:]:
            inherited = (inspect.getdoc(base) or "").splitlines() if base.__name__ in INSIDE else []
            if "Attributes:" in inherited and "Attributes:" not in lines:
                lines += ["", *inherited[inherited.index("Attributes:") :]]
        lines[:] = [line for line in lines if line.strip().partition(":")[0] not in OF_THE_INSIDE]


def drop(lines: list[str], section: str) -> None:
    """Take a section out of a docstring."""
    if section in lines:
        begin = lines.index(section)
        end = next((at for at in range(begin + 1, len(lines)) if lines[at][:1].strip()), len(lines))
        del lines[begin:end]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", name_what_is_not_here)
    app.connect("autodoc-process-docstring", complete, priority=400)
    app.connect("autodoc-process-docstring", name_links)
    app.connect("autodoc-process-signature", sign)
    app.connect("autodoc-skip-member", skip)
    for name in importlib.import_module("rdzv.sync").__all__:  # classes there have longer names in the rooms
        twin = getattr(importlib.import_module("rdzv.sync"), name)
        if inspect.isclass(twin):
            twin.__name__ = name
