"""What hatchling asks while it builds: the README as a package index is to show it.

An index shows the README away from the files it names: a relative link leads nowhere there. If `[project.urls]` in
pyproject.toml has a `Source`, such links lead to the release's tag below it. While there is none, they become plain
text that names the file, which the source archive holds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link or a picture whose address is neither absolute nor on this page.
RELATIVE = re.compile(r"(!?)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")


def for_an_index(readme: str, *, source: str | None, tag: str) -> str:
    """Return a README without relative links.

    Args:
        readme: In Markdown.
        source: Where the files are shown, without the tag; None if they are shown nowhere.
        tag: Of the release.
    """

    def changed(link: re.Match[str]) -> str:
        mark, text, path = link.groups()
        if source is not None:
            shown = "raw" if mark else "blob"  # a picture's own bytes, and not a page about it
            return f"{mark}[{text}]({source.rstrip('/')}/{shown}/{tag}/{path})"
        file = path.partition("#")[0]
        return text if file in text else f"{text} ({file})"

    return RELATIVE.sub(changed, readme)


class Readme(MetadataHookInterface):  # type: ignore[misc]  # the linters have no hatchling
    """Fills in `readme`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put it there; called by hatchling."""
        version = re.search(r'"(.+)"', (Path(self.root) / "rdzv" / "_version.py").read_text(encoding="utf-8"))
        text = for_an_index(
            (Path(self.root) / "README.md").read_text(encoding="utf-8"),
            source=metadata.get("urls", {}).get("Source"),
            tag=f"v{version[1]}" if version else "HEAD",
        )
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
