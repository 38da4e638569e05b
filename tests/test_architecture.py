"""The architecture of the code: pure rooms stay pure, imports point downwards, front doors only export.

All of it is read from the source (only the front doors are also imported), so an import in a branch that is never run
counts as well.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]

PURE_FOLDERS = ("store.protocol", "store.engine", "rdzv.core", "rdzv.config")
"""Folders with pure rooms only: time and randomness are passed in, and no room reads the world."""

PURE_ROOMS_ELSEWHERE = (
    "store.errors",
    "store.limits",
    "store.messages",
    "store.printable",
    "store.records",
    "store.watch_cursor",
    "store.server.log_lines",
    "store.server.outbox",
    "store.server.round_robin",
    "store.server.pending_commits",
    "store.when",
    "store.client.timeouts",
    "store.client.connection_health",
    "store.net.address",
    "store.etcd.member_choice",
    "store.etcd.codec",
    "store.etcd.transactions",
    "rdzv.errors",
    "rdzv.display.status",
    "rdzv.http.access_rules",
    "rdzv.listeners",
    "rdzv.membership",
    "rdzv.shared_store.arguments",
    "rdzv.shared_store.fencing",
    "rdzv.shared_store.operations",
)
"""Pure rooms in other folders."""

WORLD = frozenset(
    "anyio asyncio datetime os random selectors socket ssl threading time".split()  # noqa: SIM905 (reads better)
)
"""Packages that give access to time, randomness and the network."""

NOUNS = frozenset(
    {
        "store.calls",
        "store.errors",
        "store.interface",
        "store.keeping",
        "store.lazy_names",
        "store.limits",
        "store.messages",
        "store.printable",
        "store.records",
        "store.watch_cursor",
        "store.when",
    }
)
"""Modules that every room may import: the store's values, errors and abstract classes."""

STORE = NOUNS | {
    *("store.protocol", "store.engine", "store.net", "store.disk", "store.server", "store.client", "store.etcd"),
    *("store.connecting", "store.recipes", "store.sync", "store"),
}
BELOW_NODE = NOUNS | {
    *("rdzv.errors", "rdzv.core", "rdzv.config", "rdzv.shared_store", "rdzv.membership", "rdzv.interface"),
    *("rdzv.bootstrap_check", "rdzv.listeners"),
}
NODES_STORE = STORE - {"store.engine", "store.disk", "store.server", "store.etcd"}
INSIDE_A_NODE = {"rdzv.node.run", "rdzv.node.link", "rdzv.node.member", "rdzv.node.coordinator"}
HANDLERS = {"rdzv.node.front", "rdzv.node.handler", "rdzv.node.blocking_handler"}
NODE = {"rdzv.node.run", "rdzv.node.link", "rdzv.node", *HANDLERS}
"""The parts of a node that others may import. Only the node itself imports its coordinator; only it and its handlers
import its member.
"""
ROWS_OF_THEIR_OWN = INSIDE_A_NODE | HANDLERS | {"rdzv.cli.command", "rdzv.cli.launcher"}
"""Rooms inside a sub-package that have a row of their own in `MAY_IMPORT`."""
DRIVERS_NEED = {"rdzv", "rdzv.sync", "store", "rdzv.loop", "rdzv.display", "rdzv.config", "store.printable"}
"""What those that drive rounds themselves may import: nothing of a node; `rdzv.loop` lists what else they need."""
EVERYTHING_PUBLIC = STORE | BELOW_NODE | NODE | {"rdzv.backends", "rdzv.loop", "rdzv.sync", "rdzv"}

MAY_IMPORT: dict[str, frozenset[str] | set[str]] = {
    "store.errors": set(),
    "store._platform_guard": set(),
    "store.lazy_names": set(),
    "store.printable": set(),
    "store.records": set(),
    "store.limits": NOUNS,
    "store.messages": NOUNS,
    "store.when": NOUNS,
    "store.watch_cursor": NOUNS,
    "store.net": NOUNS,
    "store.keeping": NOUNS | {"store.net"},
    "store.calls": NOUNS,
    "store.interface": NOUNS | {"store.net"},
    "store.recipes": NOUNS,
    "store.protocol": NOUNS,
    "store.engine": NOUNS,
    "store.disk": NOUNS | {"store.engine", "store.protocol"},
    "store.server": NOUNS | {"store.engine", "store.protocol", "store.net", "store.disk"},
    "store.client": NOUNS | {"store.protocol", "store.net"},
    "store.etcd": NOUNS | {"store.net"},
    "store.connecting": NOUNS | {"store.client", "store.etcd", "store.net"},
    "store.sync": NOUNS
    | {"store.connecting", "store.recipes", "store.server", "store.client", "store.etcd", "store.net"},
    "store": STORE - {"store"} | {"store._platform_guard"},
    "rdzv._import_guard": {"store.lazy_names"},
    "rdzv._version": set(),
    "rdzv.errors": NOUNS,
    "rdzv.core": NOUNS | {"rdzv.errors"},
    "rdzv.config": NOUNS | {"rdzv.errors"},
    "rdzv.shared_store": NOUNS | {"rdzv.errors", "rdzv.config"},
    "rdzv.listeners": NOUNS,
    "rdzv.membership": NOUNS | {"rdzv.core", "rdzv.shared_store", "rdzv.listeners"},
    "rdzv.bootstrap_check": {"rdzv.core", "store.net"},
    "rdzv.interface": NOUNS | {"rdzv.errors", "rdzv.core", "rdzv.membership"},
    "rdzv.node.run": NODES_STORE | BELOW_NODE,
    "rdzv.node.link": NODES_STORE | BELOW_NODE | {"rdzv.node.run"},
    "rdzv.node.member": NODES_STORE | BELOW_NODE | {"rdzv.node.run", "rdzv.node.link", "rdzv._version"},
    "rdzv.node.coordinator": NODES_STORE | BELOW_NODE | {"rdzv.node.run", "rdzv.node.link", "rdzv.node.member"},
    "rdzv.node": NODES_STORE | BELOW_NODE | INSIDE_A_NODE,
    "rdzv.node.front": NODES_STORE | BELOW_NODE | {"rdzv.node.run", "rdzv.node.link", "rdzv.node"},
    "rdzv.node.handler": NODES_STORE
    | BELOW_NODE
    | {"rdzv.node.link", "rdzv.node.member", "rdzv.node", "rdzv.node.front"},
    "rdzv.node.blocking_handler": NODES_STORE
    | BELOW_NODE
    | {"rdzv.node.link", "rdzv.node.member", "rdzv.node", "rdzv.node.front", "rdzv.node.handler"},
    "rdzv.display": NOUNS | {"rdzv.core", "rdzv.config", "rdzv._version", "store.net"},
    "rdzv.http": STORE | BELOW_NODE | NODE | {"rdzv.display", "rdzv._version"},
    "rdzv.backends": STORE | BELOW_NODE | NODE | {"rdzv.display", "rdzv.http"},
    "rdzv.loop": STORE | BELOW_NODE | NODE | {"rdzv.backends"},
    "rdzv.sync": STORE | BELOW_NODE | NODE | {"rdzv.backends", "rdzv.loop"},
    "rdzv.testing": EVERYTHING_PUBLIC - {"rdzv"},
    "rdzv": EVERYTHING_PUBLIC - {"rdzv"} | {"rdzv.testing", "rdzv._import_guard", "rdzv._version"},
    "rdzv.cli.command": STORE | {"rdzv.errors", "rdzv.config", "rdzv.display"},
    "rdzv.torch": DRIVERS_NEED,
    "rdzv.cli.launcher": DRIVERS_NEED | {"store.net", "rdzv.cli.command", "rdzv.torch"},  # torch for --agent-store
    "rdzv.cli": EVERYTHING_PUBLIC
    | {"rdzv._version", "rdzv.display", "rdzv.http", "rdzv.cli.command", "rdzv.cli.launcher"},
    "rdzv.torchrun": EVERYTHING_PUBLIC | {"rdzv.torch"},
    "rdzv.__main__": {"rdzv.cli", "store.net"},
}
"""The layers: what each folder, and each room outside the folders, may import, type-checking imports included.

`docs/architecture.md` has the same table. A folder that is missing here fails the test: give it a row.
"""

FILES_IN_A_FOLDER_MOST = 15
LINES_OF_A_FILE_MOST = 600
LINES_OF_A_CLASS_MOST = 400

LONG_FILES: dict[str, str] = {}
"""Files of more than 600 lines, and the reason."""

LONG_CLASSES: dict[tuple[str, str], str] = {}
"""Classes of more than 400 lines, and the reason."""

CORE_DEPENDENCIES = frozenset({"anyio", "msgpack"})

EXTRA_ROOMS = (
    "rdzv.http.app",
    "rdzv.http.listening",
    "rdzv.http.metrics",
    "rdzv.http.node",
    "store.etcd.rpc.grpc_import",
    "store.etcd.rpc.etcd_pb2",
    "rdzv.torch.pytorch",
)
"""Rooms that cannot be imported without an extra. Elsewhere extras are imported inside functions."""

GENERATED_ROOMS = ("store.etcd.rpc.etcd_pb2",)
"""Rooms with generated code: compiled from `etcd.proto` by `.ci/compile_proto`."""

PACKAGES = ("store", "rdzv")


@dataclass(frozen=True)
class Import:
    """The target of one import statement, and when it is executed.

    Attributes:
        module: The module, or `module.name` if that is a module of ours.
        late: True inside a function.
        for_types: True under `if TYPE_CHECKING`, where it is never executed.
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
    """Return the folder of a room: its sub-package, or the room itself if it is directly in the package's folder."""
    parts = room.split(".")
    return ".".join(parts[:3] if ".".join(parts[:3]) in ROWS_OF_THEIR_OWN else parts[:2])


PURE_ROOMS = (*PURE_ROOMS_ELSEWHERE, *(room for room in FILES if folder_of(room) in PURE_FOLDERS))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def imports_of(room: str) -> tuple[Import, ...]:
    path = FILES[room]
    package = room if path.name == "__init__.py" else room.rpartition(".")[0]
    return tuple(imports_in(tree_of(path), package))


def imports_in(node: ast.AST, package: str, *, late: bool = False, for_types: bool = False) -> Iterator[Import]:
    """Yield every import below a node. Relative imports are resolved against the package."""
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


def arrows_of(room: str) -> set[str]:
    """Return the rooms that this one imports, also for types."""
    return {each.module for each in imports_of(room) if each.module in FILES} - {room}


def reached_from(room: str) -> set[str]:
    """Return the rooms that this one imports, directly or indirectly."""
    reached: set[str] = set()
    ahead = [room]
    while ahead:
        new = arrows_of(ahead.pop()) - reached
        reached |= new
        ahead.extend(new)
    return reached


def test_every_listed_pure_room_exists() -> None:
    assert set(PURE_ROOMS_ELSEWHERE) <= set(FILES)
    assert {folder_of(room) for room in PURE_ROOMS} >= set(PURE_FOLDERS)


def test_pure_rooms_import_no_time_randomness_or_network() -> None:
    worldly = {
        (room, imported.module)
        for room in PURE_ROOMS
        for imported in imports_of(room)
        # The types `random.Random` and `timedelta` may be named, since such objects are passed in; nothing else of the
        # world.
        if imported.top in WORLD and not (imported.module in {"random", "datetime"} and imported.for_types)
    }
    assert worldly == set(), "these rooms are pure and must not import that"


def test_layers_point_down() -> None:
    without_a_row = set(map(folder_of, FILES)) - set(MAY_IMPORT)
    assert without_a_row == set(), "these have no row in MAY_IMPORT, nor in the picture in docs/architecture.md"
    looked_up = {
        (room, each)
        for room in FILES
        for each in arrows_of(room)
        if folder_of(each) not in MAY_IMPORT[folder_of(room)] | {folder_of(room)}
    }
    assert looked_up == set(), "the first must not import the second: move the shared part down"


def test_the_table_of_layers_has_no_circle() -> None:
    """Each row names only rows above it, and nouns. So the table can be read from the top."""
    rows = list(MAY_IMPORT)
    wrong = {row: later for at, row in enumerate(rows) if (later := (MAY_IMPORT[row] - NOUNS).intersection(rows[at:]))}
    assert wrong == {}


def test_a_name_of_a_node_is_imported_from_where_it_is_defined() -> None:
    """Otherwise a room could import by way of another a name that its own row forbids: `start_candidacy` of `node`."""
    defined = {
        room: defined_in(tree_of(path))
        for room, path in FILES.items()
        if room.startswith("rdzv.node.") and path.name != "__init__.py"
    }
    wrong = {
        (room, f"{node.module}.{alias.name}")
        for room, path in FILES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module in defined
        for alias in node.names
        if alias.name not in defined[node.module]
    }
    assert wrong == set()


def test_only_the_rooms_of_a_node_use_its_part() -> None:
    looking = {
        room
        for room, path in FILES.items()
        if room.startswith("rdzv.") and not room.startswith("rdzv.node.")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in {"part", "_part"}
    }
    assert looking == set(), "ask the node"


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    reached = {room: reached_from(room) for room in FILES}
    circles = {frozenset(other for other in reached[room] if room in reached[other]) for room in FILES}
    assert circles - {frozenset()} == set(), (
        "move the shared part down, or give one a Protocol of the part that it needs"
    )


def test_folders_are_small() -> None:
    count = Counter(path.parent for path in FILES.values())
    assert {folder.name: files for folder, files in count.items() if files > FILES_IN_A_FOLDER_MOST} == {}


def test_long_files_have_a_reason() -> None:
    lines = {room: len(path.read_text(encoding="utf-8").splitlines()) for room, path in FILES.items()}
    long = {room for room in FILES if lines[room] > LINES_OF_A_FILE_MOST}
    assert long == set(LONG_FILES), "split new ones, and delete from LONG_FILES those that are short now"


def test_long_classes_have_a_reason() -> None:
    classes = {
        (room, node.name)
        for room, path in FILES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno + 1 > LINES_OF_A_CLASS_MOST
    }
    assert classes == set(LONG_CLASSES), "split new ones, and delete from LONG_CLASSES those that are short now"


def test_only_the_core_dependencies_are_imported_with_the_module() -> None:
    needed = {
        (room, imported.top)
        for room in FILES.keys() - EXTRA_ROOMS
        for imported in imports_of(room)
        if not imported.late and not imported.for_types
    }
    there = sys.stdlib_module_names | CORE_DEPENDENCIES | set(PACKAGES)
    assert {each for each in needed if each[1] not in there} == set()


def test_a_room_uses_no_private_names_of_another() -> None:
    """As far as the source shows: a private name that the room itself defines may be read from any object."""
    private = {room: foreign_privates(tree_of(FILES[room])) for room in FILES.keys() - GENERATED_ROOMS}
    assert {room: names for room, names in private.items() if names} == {}


def foreign_privates(tree: ast.Module) -> list[str]:
    """Return private names that are imported, or read from another object than `self`, not defined in this module."""
    own, modules = defined_in(tree), imported_modules(tree)
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names):
                # A private module may be used by its own package.
                inside = [alias.name for alias in names if is_private(alias.name) and module not in PACKAGES]
                found.extend(f"{module}.{name}" for name in inside)
            case ast.Attribute(value=value, attr=attr) if is_private(attr) and attr not in own:
                of_ours = ast.unparse(value) not in {"self", "cls", "super()"} | modules
                if of_ours and attr not in NAMED_TUPLES:
                    found.append(ast.unparse(node))
    return found


NAMED_TUPLES = frozenset({"_replace", "_asdict", "_fields"})
"""Public names of named tuples, in spite of their underscore."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.Module) -> set[str]:
    """Return the names that a module gives to functions, classes, variables and attributes of its own objects."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the names of imported modules that are not ours. Their privates are allowed: `os._exit` is documented."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] not in PACKAGES
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_front_door_lists_exactly_its_imports_in_all(package: str) -> None:
    tree, module = tree_of(FILES[package]), importlib.import_module(package)
    declared = module.__all__
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for statement in tree.body
        for node in (statement.body if is_lazy_import(statement) else [statement])
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", None) not in NO_EXPORTS
        for alias in node.names
    }
    assert set(declared) == {name for name in imported if not name.startswith("_")}
    assert len(declared) == len(set(declared))
    for statement in filter(is_lazy_import, tree.body):
        for node in statement.body:
            assert isinstance(node, ast.ImportFrom)
            home = importlib.import_module(node.module or "")
            # A name that is loaded lazily must be the object that a type checker sees.
            assert [one.name for one in node.names if getattr(module, one.name) is not getattr(home, one.name)] == []
    assert [name for name in declared if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_front_door_holds_no_logic(package: str) -> None:
    source = FILES[package].read_text(encoding="utf-8")
    logic = [node for node in ast.parse(source).body if not belongs_in_a_front_door(node, source)]
    assert [ast.unparse(node) for node in logic] == []


NO_EXPORTS = frozenset({"__future__", "typing"})


def is_lazy_import(node: ast.stmt) -> TypeGuard[ast.If]:
    """Return True for imports that only type checkers see. `__getattr__` loads these names when they are used."""
    return isinstance(node, ast.If) and is_type_checking(node.test)


def belongs_in_a_front_door(node: ast.stmt, source: str) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Assign():
            return is_all(node)
        case ast.If() if is_lazy_import(node):
            imports = all(isinstance(each, ast.Import | ast.ImportFrom) for each in node.body)
            return imports and all(loads_lazily(each) for each in node.orelse)
        case ast.If():
            # `store` is a common name. A front door may check that it is not shadowed by another package, if a comment
            # on or above the check says so.
            above = source.splitlines()[max(0, node.lineno - 4) : node.end_lineno]
            return any("#" in line and "shadow" in line for line in above)
        case _:
            return False


def loads_lazily(node: ast.stmt) -> bool:
    """Return True for the assignment that loads lazily the names that type checkers see."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "(__getattr__, __dir__, __all__)"


def is_all(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["__all__"]


def untyped(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the assignments of public names whose type must be inferred, as Pyright's --verifytypes counts them.

    Parameters have a type already, and constants have the type of their value.
    """
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name.islower() and not name.startswith("_") and not _makes_a_twin(statement.value):
                yield statement
        if not isinstance(statement, ast.ClassDef) or statement.name.startswith("_"):
            continue
        targets = [each.target for each in ast.walk(statement) if isinstance(each, ast.AnnAssign)]
        declared = {each.id if isinstance(each, ast.Name) else ast.unparse(each)[len("self.") :] for each in targets}
        for method in statement.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                yield from (each for each in ast.walk(method) if _makes_untyped(each, declared))


def _makes_a_twin(value: ast.expr) -> bool:
    """Return True if this makes a blocking function from an awaited one, whose signature it keeps."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) in {"_make_blocking", "run_method_as_verb"}


def _makes_untyped(node: ast.AST, declared: set[str]) -> TypeGuard[ast.Assign]:
    """Return True if this assigns anything but a plain name to a public attribute that is not declared."""
    if not isinstance(node, ast.Assign):
        return False
    for target in node.targets:
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        for each, value in pairs:
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                public = not each.attr.startswith("_") and each.attr not in declared
                if public and not isinstance(value, ast.Name):
                    return True
    return False


@pytest.mark.in_ci
def test_the_types_of_public_names_are_written_down() -> None:
    """Written as `self.rounds: int = 0`, `log: logging.Logger = ...`. `.ci/verify_types` checks the same, slowly."""
    found = [
        f"{path.relative_to(ROOT)}:{statement.lineno}: {ast.unparse(statement)}"
        for room, path in FILES.items()
        if room not in GENERATED_ROOMS and not any(part.startswith("_") for part in room.split(".")[1:])
        for statement in untyped(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "write the type beside the name:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("log = make()", 1),
        ("log: Logger = make()\n_log = make()\nLIMIT = 3", 0),
        ("class A:\n def __init__(self, a):\n  self.a = a; self.b: int = 0; self._c = 1", 0),
        ("class A:\n def __init__(self, a):\n  self.a, self.b = a, 1\n  self.c = self.d = 0\n  self.e = f()", 3),
        ("class A:\n b: int\n def __init__(self):\n  self.b = 0\nclass _B:\n def __init__(self):\n  self.c = 0", 0),
    ],
)
def test_names_without_a_type_are_found(source: str, count: int) -> None:
    assert len(list(untyped(ast.parse(source)))) == count


@pytest.mark.in_ci
def test_every_module_has_a_docstring() -> None:
    trees = {path: tree_of(path) for path in files_in(*PACKAGES, "examples", "benchmarks", "tests")}
    # A package of tests is a folder, not a room: its `__init__.py` may be empty.
    assert [str(path) for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


EVALUATES = frozenset("pickle cPickle dill cloudpickle marshal shelve code codeop runpy".split())  # noqa: SIM905
"""Modules that make code, or objects of any class, from bytes."""


RUNS_THE_USERS_COMMAND = "rdzv.cli.launcher.preload_server"
"""Its only input is the command line of the user, and it imports no store."""


MAKES_CONSTRUCTORS = {("store.records", "eval")}
"""It evaluates names of fields in our own sources while they are imported; `namedtuple` does the same."""


def test_s8_nothing_received_is_ever_unpickled_or_evaluated() -> None:
    """No module or function that could do so is imported or called. PyTorch's own use of a store is not checked."""
    rooms = [room for room in FILES if folder_of(room) != "rdzv.torch" and room != RUNS_THE_USERS_COMMAND]
    imported = {(room, each.top) for room in rooms for each in imports_of(room)}
    assert {each for each in imported if each[1] in EVALUATES} == set()
    calls = ((room, node.func) for room in rooms for node in ast.walk(tree_of(FILES[room])) if type(node) is ast.Call)
    called = {(room, function.id) for room, function in calls if isinstance(function, ast.Name)}
    assert {each for each in called if each[1] in {"eval", "exec", "compile", "__import__"}} == MAKES_CONSTRUCTORS


BEYOND_THE_QUICK_START = ("jax", "numpy", "rdzv.torch", "torch", "uvloop")
"""Packages that neither of the README's two commands installs, and modules that import them."""


@pytest.mark.in_ci
def test_tests_are_collected_with_only_the_packages_of_the_readme() -> None:
    """Otherwise a newcomer's second command fails: missing packages may be imported only after a call that skips the
    module.
    """
    files = files_in("tests")
    too_early = [
        (str(path), top) for path in files if path.name.startswith("test_") for top in unguarded(tree_of(path))
    ]
    assert too_early == []


def unguarded(tree: ast.Module) -> list[str]:
    """Return the imports beyond the quick start that come before the call that skips the module."""
    before = list(itertools.takewhile(lambda node: not skips(node), tree.body))
    names = [
        each.module for each in imports_in(ast.Module(before, []), "tests") if not each.late and not each.for_types
    ]
    return [name for name in names if any(f"{name}.".startswith(f"{one}.") for one in BEYOND_THE_QUICK_START)]


def skips(node: ast.stmt) -> bool:
    """Return True for a call of `require` or `pytest.importorskip`."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in {"require", "pytest.importorskip"}


# The reader of imports must itself be right, or the tests above would pass for the wrong reason.


def read(source: str) -> set[Import]:
    return set(imports_in(ast.parse(source), "store"))


def test_imports_are_found_everywhere() -> None:
    assert read("import os.path, time as t") == {Import("os.path"), Import("time")}
    assert read("def f():\n  if x:\n    from socket import AF_INET") == {Import("socket", late=True)}
    assert read("try:\n  import uvloop\nexcept ImportError:\n  import asyncio") == {Import("uvloop"), Import("asyncio")}


def test_imports_for_types_are_told_from_those_in_the_else_branch() -> None:
    assert read("if TYPE_CHECKING:\n  from random import Random\nelse:\n  import time") == {
        Import("random", for_types=True),
        Import("time"),
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from store.engine.sessions import _Forgotten", ["store.engine.sessions._Forgotten"]),
        ("from rdzv import _import_guard", []),
        ("def f(peer): peer._queue.clear()", ["peer._queue"]),
        ("def f(self): self.peer._queue = 1", ["self.peer._queue"]),
        ("class A:\n  def f(self): self._queue = self._inherited\ndef g(a): a._queue", []),
        ("import os\nos._exit(1)", []),
        ("import store\nstore._private()", ["store._private"]),
        ("tuple._replace(a=1).__class__", []),
    ],
)
def test_uses_of_foreign_private_names_are_found(source: str, found: list[str]) -> None:
    assert foreign_privates(ast.parse(source)) == found


def test_rooms_are_recognised_in_every_form_of_import() -> None:
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
def test_logic_in_a_front_door_is_found(source: str, belongs: bool) -> None:
    (node,) = ast.parse(source).body
    assert belongs_in_a_front_door(node, source) is belongs
