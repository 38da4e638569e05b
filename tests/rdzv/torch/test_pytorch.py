"""What we use of PyTorch and it does not document is where the list says, in the release that is installed."""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import require

require("torch")  # what follows cannot be imported without

import torch  # noqa: E402

import rdzv.torch.pytorch as it  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALLED = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.mark.parametrize("private", it.PRIVATE, ids=lambda private: private.name)
def test_every_private_name_is_there_since_the_release_that_the_list_says(private: it.Private) -> None:
    present = True
    try:
        functools.reduce(getattr, private.name.split("."), importlib.import_module(private.module))
    except AttributeError:
        present = False
    assert present is (private.since <= INSTALLED), f"{private.module}.{private.name}: {private.used_for}"


def test_no_other_room_takes_a_private_name_of_pytorch() -> None:
    taken = {
        f"{path.name}: {name}"
        for path in Path(it.__file__).parent.glob("*.py")
        if path.name != "pytorch.py"
        for name in names_of_torch(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert taken == set()


def names_of_torch(tree: ast.AST) -> Iterator[str]:
    """What is imported of torch, and what of `dist` and `torch_api` begins with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch" and "." in alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("dist._", "dist.dist", "torch_api._")):
            yield ast.unparse(node)


def test_the_launcher_is_known_by_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import run as launcher

    seen: list[bool] = []

    def launch(*_: Any, **__: Any) -> Any:
        return lambda *_: seen.append(it.runs_under_torchrun())

    monkeypatch.setattr(launcher, "elastic_launch", launch)
    launcher.main(["--rdzv-backend=rdzv", "train.py"])
    launch()()
    assert seen == [True, False]
