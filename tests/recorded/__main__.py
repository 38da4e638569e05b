"""Record behaviour anew: `python -m tests.recorded [NAME ...]`; without names, all of it.

`python -m tests.recorded --whole rounds.NAME` prints a recording with what it tells by a checksum only.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.recorded import FOLDER, recordings, write

if __name__ == "__main__":
    known: dict[str, Any] = recordings()
    if sys.argv[1:2] == ["--whole"]:
        sys.exit("\n".join(known[sys.argv[2]](whole=True)))
    asked = sys.argv[1:] or list(known)
    if unknown := [name for name in asked if name not in known]:
        sys.exit(f"there is no {', '.join(unknown)}, but: {', '.join(known)}")
    for name in asked:
        write(name, known[name]())
    for path in FOLDER.glob("*.txt"):
        if path.stem not in known:
            path.unlink()
