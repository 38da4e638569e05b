"""Make a release: golden bytes, the same wheel twice, a bill of materials, a tag, and signatures where a key is given.

    python -m tools.release                  builds into dist/, and tags nothing
    python -m tools.release --tag --key ID   tags the commit and signs the tag and each file with this GPG key

The version is that of `rdzv/_version.py`; CHANGELOG.md must name it. The build is made twice, with the commit's time as
SOURCE_DATE_EPOCH, and refused if the two differ: so anybody can build the same bytes from the tag.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rdzv._version import __version__
from tools import golden

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / __version__


def main() -> None:
    """Make it."""
    parser = argparse.ArgumentParser(description="Make a release of this tree.")
    parser.add_argument("--tag", action="store_true", help="tag the commit")
    parser.add_argument("--key", metavar="ID", help="sign the tag and the files with this GPG key")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to (default: dist)")
    options = parser.parse_args()
    if __version__ not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        sys.exit(f"CHANGELOG.md does not name {__version__}: say there what has changed")
    if not GOLDEN.exists():
        golden.write(GOLDEN)
        sys.exit(f"the bytes of {__version__} were written to {GOLDEN}: commit them, and run this again")
    if _git("status", "--porcelain"):
        sys.exit("the tree differs from its commit: commit first, so that the tag says what was built")
    files = build(options.out)
    bill = options.out / f"rdzv-{__version__}.cdx.json"
    bill.write_text(json.dumps(bill_of_materials(files), indent=1) + "\n", encoding="utf-8")
    if options.tag:
        signing = ["-s", "-u", options.key] if options.key else ["-a"]
        _git("tag", *signing, f"v{__version__}", "-m", f"rdzv {__version__}")
    if options.key:
        for path in (*files, bill):
            subprocess.run(["gpg", "--local-user", options.key, "--armor", "--detach-sign", path], check=True)  # noqa: S603, S607
    for path in (*files, bill):
        print(f"{_digest(path)}  {path.name}")


def build(out: Path) -> list[Path]:
    """Build the wheel and the source archive twice; they must be the same."""
    out.mkdir(exist_ok=True)
    epoch = {**os.environ, "SOURCE_DATE_EPOCH": _git("log", "-1", "--format=%ct")}
    with tempfile.TemporaryDirectory() as again:
        for directory in (str(out), again):
            command = [sys.executable, "-m", "hatchling", "build", "-d", directory]
            subprocess.run(command, cwd=ROOT, env=epoch, check=True)  # noqa: S603 - our own words
        files = [out / path.name for path in sorted(Path(again).iterdir())]
        differing = [path.name for path in files if _digest(path) != _digest(Path(again) / path.name)]
    if differing:
        sys.exit(f"two builds of the same commit differ: {', '.join(differing)}")
    return files


def bill_of_materials(files: list[Path]) -> dict[str, Any]:
    """Say in CycloneDX what was built, and what it needs: https://cyclonedx.org/docs/1.5/json/."""
    requirements = importlib.metadata.requires("rdzv") or []
    components: list[dict[str, str]] = []
    for requirement in requirements:
        name, _, marker = requirement.partition(";")
        bare = re.split(r"[<>=!~ ]", name, maxsplit=1)[0]
        component = {
            "type": "library",
            "name": bare,
            "version": name.strip()[len(bare) :],
            "scope": "optional" if "extra" in marker else "required",
            "purl": f"pkg:pypi/{bare}",
        }
        if component not in components:  # several extras may need one and the same; the format wants each once
            components.append(component)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "name": "rdzv",
                "version": __version__,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": f"pkg:pypi/rdzv@{__version__}",
            },
            "properties": [{"name": f"sha256:{path.name}", "value": _digest(path)} for path in files],
        },
        "components": components,
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603, S607


if __name__ == "__main__":
    main()
