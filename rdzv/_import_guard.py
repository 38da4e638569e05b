"""Checks, at import, that the package `store` is this project's, and complete.

Many scripts have a file `store.py` beside them. A PyPI distribution called `store` overwrites `store/__init__.py` with
an empty file, and removes the file when it is uninstalled. The check reads a foreign `store`, but never runs it.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1] / "store"
_MARK = "from store.messages import"  # text that only this project's `store/__init__.py` has


def _shadowing_file() -> str | None:
    """Return the foreign file that Python imports as `store`, or words for none; None if it is ours."""
    loaded = sys.modules.get("store")
    if loaded is not None:
        found = getattr(loaded, "__file__", None)
    else:
        spec = importlib.util.find_spec("store")  # finds the package without running it
        found = None if spec is None or spec.origin is None else spec.origin
    if found is None:
        return f"no {_FOLDER / '__init__.py'}"
    file = Path(found).resolve()
    try:
        # a .pyc has no text to search for the mark: only its folder is checked
        is_whole = file.suffix == ".pyc" or _MARK in file.read_text(encoding="utf-8")
        is_ours = file.parent == _FOLDER and is_whole
    except (OSError, UnicodeDecodeError):
        is_ours = False
    return None if is_ours else str(file)


def _foreign_package_error(found: str) -> ImportError:
    return ImportError(
        f"rdzv needs its own package `store`, and found {found}. If that is a file of yours, rename that file, or take "
        f"its folder off the path. If another distribution was installed over ours: pip uninstall store; then "
        f"pip install --force-reinstall --no-deps rdzv"
    )


def _explain_foreign_store(error: Exception) -> Exception:
    where = error.name if isinstance(error, ImportError) else getattr(getattr(error, "obj", None), "__name__", "")
    if (where or "").partition(".")[0] != "store":
        return error  # a dependency is missing; the error names it
    return _foreign_package_error(f"a package in {_FOLDER} of which files were replaced or are missing ({error})")


if not Path(__file__).exists():
    raise ImportError(
        f"rdzv does not run from an archive ({_FOLDER.parent}): it starts processes from files; install it, or have "
        f"the archive unpacked (pex --layout loose, shiv; not zipapp, nor PyInstaller)"
    )
_found = _shadowing_file()
if _found is not None:
    raise _foreign_package_error(_found)
try:
    from store.lazy_names import lazy_names as _lazy_names
except ImportError as _error:
    raise _explain_foreign_store(_error) from _error
lazy_names = partial(_lazy_names, explain=_explain_foreign_store)
