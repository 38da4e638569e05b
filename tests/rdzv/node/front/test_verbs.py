"""The operations of a node: both fronts have each of them, with the same name, arguments and documentation."""

import inspect

import pytest

import rdzv.sync
from rdzv.node.front import verbs
from rdzv.node.handler import Handler

NAMES = sorted(
    name
    for name, verb in vars(verbs).items()
    if inspect.isfunction(verb) and verb.__module__ == verbs.__name__
    if "node" in inspect.signature(verb).parameters and name != "roster" and not name.startswith("_")
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("front", [Handler, rdzv.sync.Handler])
def test_both_fronts_have_each_operation_with_its_signature_and_docstring(name: str, front: type) -> None:
    verb, method = getattr(verbs, name), getattr(front, name)
    _, *arguments = inspect.signature(verb).parameters.values()
    assert [*inspect.signature(method).parameters.values()][1:] == arguments
    assert method.__doc__ == verb.__doc__
    assert method.__name__ == name
    assert inspect.iscoroutinefunction(method) == (front is Handler and inspect.iscoroutinefunction(verb))
