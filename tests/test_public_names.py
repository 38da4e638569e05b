"""Every public name has a page with the members that callers need, no public signature names an unimportable type."""

import ast
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rdzv.testing
import store
from tests.support.processes import start

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8").split()
MODULES = ("rdzv", "rdzv.sync", "rdzv.testing", "rdzv.torch", "store", "store.recipes", "store.sync", "store.when")
OF_THE_INSIDE = {
    *("Account", "Call", "AnnouncedDrain", "Membership"),  # of a handler, for the drivers of its rounds
    *("Calls", "Request", "Node", "_ConditionBuilder"),  # bases and parts of public classes, which callers never name
    *("Engine", "Peer", "EndWhenAlone"),  # of a `Server`, for code in its own process
    *("ClientContext", "Serving"),  # an `ssl.SSLContext`; the context of a server in a thread
    *("AwaitableResult", "Keys", "LeaseLike"),  # names of plain types
    *("Connection", "HandlerToEnter"),  # a client's, for other rooms; what `connect` returns: callers enter or await it
    *("InFlight", "OperatorQuestion"),  # of a client and a handler, for other rooms
}


def test_each_public_module_has_a_page_with_all_its_names() -> None:
    assert set(MODULES) <= set(PAGES)
    for path in [*(ROOT / "rdzv").glob("*.py"), *(ROOT / "store").glob("*.py")]:
        name = f"{path.parent.name}.{path.stem}"
        says_public = path.read_text(encoding="utf-8").startswith('"""Façade')
        assert not says_public or name in MODULES, f"{name} has no page"


def public() -> dict[str, Any]:
    """Return all public objects by name, without those of PyTorch."""
    modules = [importlib.import_module(name) for name in MODULES if name != "rdzv.torch"]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def signatures(thing: Any) -> Iterator[tuple[str, inspect.Signature]]:
    """Yield the signature of a function, or those of a class's public members."""
    if inspect.isfunction(thing):
        yield thing.__name__, inspect.signature(thing)
    elif inspect.isclass(thing):
        for name, member in inspect.getmembers(thing):
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function) and not name.startswith("_"):
                yield f"{thing.__name__}.{name}", inspect.signature(function)


def test_a_pickled_error_is_the_same_error() -> None:
    """Regression: a `ConnectionLost` could not be unpickled: a `multiprocessing.Pool` hung if a worker raised it."""
    kinds = [thing for thing in public().values() if inspect.isclass(thing) and issubclass(thing, Exception)]
    assert store.ConnectionLost in kinds
    for kind in kinds:
        # Without a signature it takes any arguments, as `Exception` does.
        takes = inspect.signature(kind).parameters if "__init__" in vars(kind) else {}
        values = {"maybe_applied": False, "node_ids": ("a", "b"), "status": 3, "timeout": 0.5}
        story = [["one line"]] if issubclass(kind, rdzv.testing.ClusterError) else []
        error = kind("why", *story, **{name: value for name, value in values.items() if name in takes})
        same = pickle.loads(pickle.dumps(error))
        assert (type(same), str(same), vars(same)) == (kind, str(error), vars(error))


def test_types_in_public_signatures_can_be_imported() -> None:
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
    things = [
        getattr(module, name)
        for module in map(importlib.import_module, set(MODULES) - {"rdzv.torch"})
        for name in module.__all__
    ]
    for thing in things:
        for where, signature in signatures(thing):
            annotations = [*(it.annotation for it in signature.parameters.values()), signature.return_annotation]
            for word in re.findall(r"[A-Za-z_]\w*", " ".join(it for it in annotations if isinstance(it, str))):
                if word in defined and word not in {*names, *OF_THE_INSIDE}:
                    found = getattr(importlib.import_module(defined[word]), word)
                    if id(found) not in exported:
                        hidden[word] = where
    assert hidden == {}


ONE_TWIN_ONLY = {
    "Handler": "aclose close connect open_blocking_store questions open_blocking_shared_store",  # no `async with`
    "RendezvousHandler": "aclose close",
    "SharedStore": "close keys_max blocking end_calls reopened",  # `keys_max` is for PyTorch's clones
    "Client": (
        "aclose close interrupt connected durable lease_ttl_max "  # a blocking client connects at its first call
        "abandon_request start_request send_ping is_pending cap_retry_pauses send_and_forget check_usable "
        "socket_addresses fail fail_over last_problem set_writable has_met_store on_connection_change "
        "handle_bytes observed_address server notify_connection_change tells_causes end_waits"
    ),
    "Watch": "close",  # from another thread; the awaited twin's task is cancelled
}
"""What one twin has and the other lacks."""


@pytest.mark.parametrize("package", ["rdzv", "store"])
def test_each_class_has_what_its_twin_has(package: str) -> None:
    awaited, blocking = importlib.import_module(package), importlib.import_module(f"{package}.sync")
    differ = {}
    for name in blocking.__all__:
        twins = getattr(awaited, name, None), getattr(blocking, name)
        if all(map(inspect.isclass, twins)):
            differ[name] = {each for each in set(dir(twins[0])) ^ set(dir(twins[1])) if not each.startswith("_")}
    assert differ == {name: set(ONE_TWIN_ONLY.get(name, "").split()) for name in differ}


SHOWN = {
    "rdzv.Round": "newest previous bootstrap_address ending check keep restore beat busy accuse participants",
    "rdzv.sync.Round": "newest previous bootstrap_address ending check keep restore beat busy accuse participants",
    "rdzv.Handler": "next_rendezvous changes drain resize ban unban keep restore status leave aclose set_closed",
    "rdzv.sync.Handler": "next_rendezvous changes drain resize ban unban keep restore status leave close set_closed",
    "rdzv.sync.SharedStore": "set get add append wait compare_set multi_get queue_push barrier clone",
    "rdzv.Changes": "poll",
    "store.Put": "key value ttl lease",
    "store.Client": "put get compare_and_set transact watch kept_lease grant wait",
    "store.Server": "url port",
}
HIDDEN = {"all_here", "require_left", "gate", "read_in_steps", "open_blocking_store", "so_far", "Node", "send_ping"}


async def test_a_page_shows_inherited_members_and_no_internals(tmp_path: Path) -> None:
    """Regression: pages of Round and of handlers lacked their inherited methods, and showed internal constructors."""
    pytest.importorskip("sphinx")
    template = (ROOT / "docs" / "_templates" / "autosummary" / "class.rst").read_text(encoding="utf-8")
    (options,) = re.findall(r"^   :members:\n.*\n", template, re.MULTILINE)
    pages = []
    for name in SHOWN:
        module, _, kind = name.rpartition(".")
        (tmp_path / f"{name}.rst").write_text(
            f"{kind}\n{'=' * 20}\n\n.. currentmodule:: {module}\n\n.. autoclass:: {kind}\n{options}"
        )
        pages.append(f"   {name}\n")
    (tmp_path / "index.rst").write_text("All\n===\n\n.. toctree::\n\n" + "".join(pages))
    built = ("-m", "sphinx", "-q", "-b", "text", "-c", str(ROOT / "docs"), str(tmp_path), str(tmp_path / "out"))
    async with start(sys.executable, *built, cwd=ROOT) as sphinx:
        assert await sphinx.wait(timeout=100) == 0, sphinx.written()
    for name, wanted in SHOWN.items():
        words = set(re.findall(r"\w+", (tmp_path / "out" / f"{name}.txt").read_text(encoding="utf-8")))
        assert set(wanted.split()) - words == set(), name
        assert words & HIDDEN == set(), name
