"""Make the blocking half of what is written for those who await.

    python -m tools.blocking

What has two halves, one that awaits and one that blocks, is written once, as the one that awaits: the other is made
from it by taking `async` and `await` away and giving some names their blocking twins. What was made is checked in, and
a test compares it, so that nobody edits it by hand.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["HALVES", "made_from", "ruff"]

ROOT: Final = Path(__file__).parents[1]

HALVES: Final = {
    "rdzv/shared_store/calls.py": "rdzv/shared_store/blocking_calls.py",
}
"""The half that is written, and the one that is made from it."""

WORDS: Final = {
    r"async (def|with|for)": r"\1",
    r"await ": "",
    "for those who await": "for those who block",
    "AsyncIterator": "Iterator",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "asynccontextmanager": "contextmanager",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclose": "close",
    "Calls": "BlockingCalls",
    "Lease": "BlockingLease",
    "SharedCalls": "BlockingSharedCalls",
    "Store": "BlockingStore",
}
"""What becomes what; whole words."""

UNTIDY: Final = "F401,I,TC,UP034"
"""What is tidied up: names that are not needed any more, their order, and brackets around what was awaited."""


def ruff() -> str | None:
    """The path of ruff, if there is one."""
    beside = Path(sys.executable).with_name("ruff")
    return str(beside) if beside.exists() else shutil.which("ruff")


def made_from(source: str) -> str:
    """Return the blocking half of a file, by its path from the root."""
    tool = ruff()
    assert tool is not None, "ruff is needed to tidy up what is made"
    text = (ROOT / source).read_text(encoding="utf-8")
    for word, twin in WORDS.items():
        text = re.sub(rf"(?<!\w){word}" + ("" if word.endswith(" ") else r"(?!\w)"), twin, text)
    text = f"# Made from {source} by tools/blocking.py: change that file, and run `python -m tools.blocking`.\n{text}"
    target = HALVES[source]
    for command in (["check", "--quiet", "--fix", "--exit-zero", "--select", UNTIDY], ["format", "--quiet"]):
        done = subprocess.run(  # noqa: S603 - our own words
            [tool, *command, "--stdin-filename", target, "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        text = done.stdout
    return text


def main() -> None:
    """Write what is made."""
    for source, target in HALVES.items():
        (ROOT / target).write_text(made_from(source), encoding="utf-8")


if __name__ == "__main__":
    main()
