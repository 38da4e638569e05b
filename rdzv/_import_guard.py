"""At import: is the package `store` ours?

Another distribution on PyPI installs a package of that name, and many a script has a `store.py` beside it. Whichever
comes first on the path is imported; if that is not ours, nothing here works, and the reason should not be guessed from
an AttributeError.
"""

from importlib.util import find_spec
from pathlib import Path

__all__: list[str] = []

_found = find_spec("store")
_folders = (_found.submodule_search_locations if _found is not None else None) or ()
if not any(Path(folder, "protocol", "wire.py").is_file() for folder in _folders):
    _where = getattr(_found, "origin", None) or "nothing"
    raise ImportError(
        f"rdzv needs its own package `store`, but {_where} shadows it: rename that file, or take its folder off the "
        f"path, or uninstall the distribution it came with (`pip uninstall store`) and install rdzv again"
    )
