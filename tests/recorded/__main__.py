"""Record behaviour anew: `python -m tests.recorded [NAME ...]`; without names, all of it."""

from __future__ import annotations

import sys

from tests.recorded import FOLDER, recordings, write

if __name__ == "__main__":
    known = recordings()
    asked = sys.argv[1:] or list(known)
    if unknown := [name for name in asked if name not in known]:
        sys.exit(f"there is no {', '.join(unknown)}, but: {', '.join(known)}")
    for name in asked:
        write(name, known[name]())
    for path in FOLDER.glob("*.txt"):
        if path.stem not in known:
            path.unlink()
