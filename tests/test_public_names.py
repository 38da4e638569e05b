"""Every public name has a page, and no public signature speaks of a class that nobody can import."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8").split()
MODULES = ("rdzv", "rdzv.sync", "rdzv.testing", "rdzv.torch", "store", "store.recipes", "store.sync", "store.when")
OF_THE_INSIDE = {
    *("Calls", "Request", "Node", "_Term"),  # what public classes are made of, which callers never name
    *("Engine", "Peer", "TlsLayer", "WayOut"),  # of a `Server`, for what is in its own process
    *("ClientContext", "Serving"),  # an `ssl.SSLContext`; the context of a server in a thread
    *("Done", "Keys", "LeaseLike"),  # names of types that are plain
}


def test_each_public_module_has_a_page_of_all_its_names() -> None:
    assert set(MODULES) <= set(PAGES)
    for path in [*(ROOT / "rdzv").glob("*.py"), *(ROOT / "store").glob("*.py")]:
        name = f"{path.parent.name}.{path.stem}"
        says_public = path.read_text(encoding="utf-8").startswith('"""Façade')
        assert not says_public or name in MODULES, f"{name} has no page"


def public() -> dict[str, Any]:
    """What can be imported by name, without PyTorch."""
    modules = [importlib.import_module(name) for name in MODULES if name != "rdzv.torch"]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def signatures(thing: Any) -> Iterator[tuple[str, inspect.Signature]]:
    """Those of a function, or of what a class offers."""
    if inspect.isfunction(thing):
        yield thing.__name__, inspect.signature(thing)
    elif inspect.isclass(thing):
        for name, member in inspect.getmembers(thing):
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function) and not name.startswith("_"):
                yield f"{thing.__name__}.{name}", inspect.signature(function)


def test_no_public_signature_speaks_of_what_cannot_be_imported() -> None:
    names, exported = public(), {id(thing) for thing in public().values()}
    defined = {
        node.name: f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
        for folder in ("rdzv", "store")
        for path in (ROOT / folder).rglob("*.py")
        if "torch" not in path.parts
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    hidden = {}
    for thing in names.values():
        for where, signature in signatures(thing):
            annotations = [*(it.annotation for it in signature.parameters.values()), signature.return_annotation]
            for word in re.findall(r"[A-Za-z_]\w*", " ".join(it for it in annotations if isinstance(it, str))):
                if word in defined and word not in {*names, *OF_THE_INSIDE}:
                    found = getattr(importlib.import_module(defined[word]), word)
                    if id(found) not in exported:
                        hidden[word] = where
    assert hidden == {}
