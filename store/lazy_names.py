"""Names of a package that are loaded at first use (PEP 562).

Loading them all takes some 120 ms of CPU; commands, process pools, and scripts that only catch an error need few.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(
    package: str, homes: Mapping[str, str], *, explain: Callable[[Exception], Exception] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are loaded at first use.

    `homes` has the names of each module, separated by spaces; without names, the module itself. `explain` makes the
    error of a failed import.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    home_of |= {module.rpartition(".")[2]: module for module, names in homes.items() if not names}

    def get(name: str) -> object:
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

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return get, names
