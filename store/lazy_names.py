"""Names of a package that are loaded at first use (PEP 562): loading all of them takes some 120 ms."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(
    package: str, homes: Mapping[str, str], *, explain: Callable[[Exception], Exception] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are loaded at first use.

    `homes` maps each module to its names, separated by spaces, or to "" for the module itself. `explain` returns the
    error to raise if an import fails.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    home_of |= {module.rpartition(".")[2]: module for module, names in homes.items() if not names}

    def load_name(name: str) -> object:
        module = home_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            loaded: object = importlib.import_module(module)
            if homes[module]:
                loaded = getattr(loaded, name)
        except (ImportError, AttributeError) as error:  # a name, or a whole module, is missing
            explained = error if explain is None else explain(error)
            if explained is error:
                raise
            raise explained from error
        vars(sys.modules[package])[name] = loaded
        return loaded

    return load_name, lambda: sorted({*vars(sys.modules[package]), *home_of}), sorted(home_of)
