"""The shape of the code is what it says it is: pure rooms stay pure, arrows point one way, doors say what is in.

All of it is read from the source (only the front doors are also imported), so an import in a branch that never
runs counts as well.
"""

from __future__ import annotations

import ast
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]

PURE_FOLDERS = ("store.protocol", "store.engine", "rdzv.core", "rdzv.config")
"""Folders whose every room is told the time, handed its dice, and reaches for nothing."""

PURE_ROOMS_ELSEWHERE = (
    "store.errors",
    "store.fast_init",
    "store.limits",
    "store.messages",
    "store.watch_cursor",
    "store.when",
    "store.net.address",
    "store.etcd.codec",
    "store.etcd.transactions",
    "rdzv.errors",
    "rdzv.membership",
    "rdzv.shared_store.operations",
)
"""Rooms that are as pure, in folders that are not."""

WORLD = frozenset(
    "anyio asyncio datetime os random selectors socket ssl threading time".split()  # noqa: SIM905 (reads better)
)
"""The packages through which time, chance and the network get in."""

NEVER_REACHES = {
    "store.engine.engine": ("store.protocol.wire", "store.server.server", "store.client.client"),
    "store.client.client": ("store.server.server",),
    "store.server.server": ("store.client.client",),
}
"""Arrows that must not exist, by however many steps."""

CORE_DEPENDENCIES = frozenset({"anyio", "msgpack"})

EXTRA_ROOMS = ("store.etcd.gateway", "rdzv.torch.pytorch")
"""Rooms that need an extra to be imported at all; elsewhere extras are imported inside the function."""

PACKAGES = ("store", "rdzv")


@dataclass(frozen=True)
class Import:
    """One import statement's target, and when it is carried out.

    Attributes:
        module: The module, or `module.name` where that is a module of ours.
        late: Inside a function.
        for_types: Under `if TYPE_CHECKING`, and so never carried out.
    """

    module: str
    late: bool = False
    for_types: bool = False

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files_in(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


FILES = {room_of(path): path for path in files_in(*PACKAGES)}


def folder_of(room: str) -> str:
    """The corridor a room is on: its sub-package, or itself where it stands in the package's own folder."""
    return ".".join(room.split(".")[:2])


PURE_ROOMS = (*PURE_ROOMS_ELSEWHERE, *(room for room in FILES if folder_of(room) in PURE_FOLDERS))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_of(room: str) -> list[Import]:
    path = FILES[room]
    package = room if path.name == "__init__.py" else room.rpartition(".")[0]
    return list(imports_in(tree_of(path), package))


def imports_in(node: ast.AST, package: str, *, late: bool = False, for_types: bool = False) -> Iterator[Import]:
    """Every import below a node; relative ones are resolved against the package."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, late, for_types)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            module = resolve(node, package)
            inner = f"{module}.{alias.name}"
            yield Import(inner if inner in FILES else module, late, for_types)
    elif isinstance(node, ast.If) and is_type_checking(node.test):
        for child in node.body:
            yield from imports_in(child, package, late=late, for_types=True)
        for child in node.orelse:
            yield from imports_in(child, package, late=late, for_types=for_types)
    else:
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inside in ast.iter_child_nodes(node):
            yield from imports_in(inside, package, late=late, for_types=for_types)


def resolve(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def reached_from(room: str) -> set[str]:
    """Every room of ours that this one imports, by however many steps; types count, being arrows too."""
    reached: set[str] = set()
    ahead = [room]
    while ahead:
        for imported in imports_of(ahead.pop()):
            if imported.module in FILES and imported.module not in reached:
                reached.add(imported.module)
                ahead.append(imported.module)
    return reached


def test_every_pure_room_is_there() -> None:
    assert set(PURE_ROOMS_ELSEWHERE) <= set(FILES)
    assert {folder_of(room) for room in PURE_ROOMS} >= set(PURE_FOLDERS)


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_pure_rooms_do_not_let_the_world_in(room: str) -> None:
    worldly = {
        imported.module
        for imported in imports_of(room)
        # A `random.Random` is handed in, so its type may be named; nothing else of the world is.
        if imported.top in WORLD and not (imported.module == "random" and imported.for_types)
    }
    assert worldly == set(), f"{room} is pure and must not import these"


def test_arrows_point_one_way() -> None:
    wrong = {
        room: reached
        for room, forbidden in NEVER_REACHES.items()
        if room in FILES and (reached := reached_from(room).intersection(forbidden))
    }
    assert wrong == {}


@pytest.mark.parametrize("room", [room for room in FILES if room.partition(".")[0] == "store"])
def test_the_store_knows_nothing_of_rendezvous(room: str) -> None:
    assert "rdzv" not in {imported.top for imported in imports_of(room)}


@pytest.mark.parametrize("room", [room for room in FILES if room not in EXTRA_ROOMS])
def test_only_the_core_dependencies_are_imported_with_the_module(room: str) -> None:
    needed = {imported.top for imported in imports_of(room) if not imported.late and not imported.for_types}
    assert needed <= sys.stdlib_module_names | CORE_DEPENDENCIES | set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_front_door_exports_what_it_imports_and_says_so(package: str) -> None:
    tree = tree_of(FILES[package])
    declared = [
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and is_all(node)
        for name in ast.literal_eval(node.value)
    ]
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", None) != "__future__"
        for alias in node.names
    }
    assert set(declared) == {name for name in imported if not name.startswith("_")}
    assert len(declared) == len(set(declared))
    module = importlib.import_module(package)
    assert [name for name in declared if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_front_door_holds_no_logic(package: str) -> None:
    source = FILES[package].read_text(encoding="utf-8")
    logic = [node for node in ast.parse(source).body if not belongs_in_a_front_door(node, source)]
    assert [ast.unparse(node) for node in logic] == []


def belongs_in_a_front_door(node: ast.stmt, source: str) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Assign():
            return is_all(node)
        case ast.If():
            # `store` is a common name: a front door may check that it is not another package in disguise, if a
            # comment on or above the check says that this is what it does.
            above = source.splitlines()[max(0, node.lineno - 4) : node.end_lineno]
            return any("#" in line and "shadow" in line for line in above)
        case _:
            return False


def is_all(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["__all__"]


@pytest.mark.parametrize(
    "path",
    files_in(*PACKAGES, "examples", "benchmarks", "tests"),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    tree = tree_of(path)
    # A package of tests is a folder, not a room: its `__init__.py` may be empty.
    assert ast.get_docstring(tree) or not tree.body


EVALUATES = frozenset("pickle cPickle dill cloudpickle marshal shelve code codeop runpy".split())  # noqa: SIM905
"""What makes code, or objects of any class, out of bytes."""


RUNS_THE_USERS_COMMAND = "rdzv.cli.preload_server"
"""It has no other input than the command line that the user typed, and imports no store."""


@pytest.mark.parametrize(
    "room", [room for room in FILES if folder_of(room) != "rdzv.torch" and room != RUNS_THE_USERS_COMMAND]
)
def test_s8_nothing_received_is_ever_unpickled_or_evaluated(room: str) -> None:
    """Nothing that could is imported or called. What PyTorch itself keeps in a store is its own affair."""
    assert not {imported.top for imported in imports_of(room)} & EVALUATES
    calls = (node.func for node in ast.walk(tree_of(FILES[room])) if isinstance(node, ast.Call))
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}


# The reader of imports must itself be right, or the tests above would pass for the wrong reason.


def read(source: str) -> set[Import]:
    return set(imports_in(ast.parse(source), "store"))


def test_imports_are_found_wherever_they_hide() -> None:
    assert read("import os.path, time as t") == {Import("os.path"), Import("time")}
    assert read("def f():\n  if x:\n    from socket import AF_INET") == {Import("socket", late=True)}
    assert read("try:\n  import uvloop\nexcept ImportError:\n  import asyncio") == {
        Import("uvloop"),
        Import("asyncio"),
    }


def test_imports_for_types_are_told_apart_from_their_else() -> None:
    assert read("if TYPE_CHECKING:\n  from random import Random\nelse:\n  import time") == {
        Import("random", for_types=True),
        Import("time"),
    }


def test_rooms_are_recognised_however_they_are_imported() -> None:
    room = {Import("store.errors")}
    assert read("import store.errors") == room
    assert read("from store import errors") == room
    assert read("from store.errors import StoreError") == room
    assert read("from . import errors") == room
    assert read("from .errors import StoreError") == room
    assert read("from store import Client") == {Import("store")}


@pytest.mark.parametrize(
    ("source", "belongs"),
    [
        ("from store.errors import StoreError", True),
        ("__all__ = []", True),
        ("answer = 42", False),
        ("def helper(): ...", False),
        ("if __name__ != 'store':\n    raise ImportError", False),
        ("# Another `store` may shadow this one.\nif __name__ != 'store':\n    raise ImportError", True),
    ],
)
def test_logic_is_told_from_what_belongs_in_a_front_door(source: str, belongs: bool) -> None:
    (node,) = ast.parse(source).body
    assert belongs_in_a_front_door(node, source) is belongs
