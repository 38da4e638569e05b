"""Make a release: golden bytes, the same wheel twice, a bill of materials, a tag, and signatures with a key.

    python -m tools.release                  builds into dist/, and tags nothing
    python -m tools.release --tag --key ID   tags the commit and signs the tag and each file with this GPG key

The version is that of `rdzv/_version.py`, which CHANGELOG.md must name. The build is made twice, with the commit's time
as SOURCE_DATE_EPOCH, and rejected if the two differ, so that the tag reproduces the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from rdzv._version import __version__
from tools import golden

ROOT = Path(__file__).parents[1]
EXTRAS = "etcd,fast,http,live"  # for users; they choose PyTorch themselves
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
    built_at = datetime.fromtimestamp(int(_git("log", "-1", "--format=%ct")), UTC)
    bill.write_text(
        json.dumps(bill_of_materials(files, resolve(), built_at=built_at), indent=1) + "\n", encoding="utf-8"
    )
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


def resolve() -> list[dict[str, Any]]:
    """Return the packages of an installation with every user's extra, as pip reports them, without installing."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    report = subprocess.run([*command, f"{ROOT}[{EXTRAS}]"], check=True, capture_output=True, text=True)  # noqa: S603
    installed: list[dict[str, Any]] = json.loads(report.stdout)["install"]
    return installed


def bill_of_materials(files: list[Path], resolved: list[dict[str, Any]], *, built_at: datetime) -> dict[str, Any]:
    """Return a bill of materials in CycloneDX: https://cyclonedx.org/docs/1.6/json/.

    Args:
        files: The built files.
        resolved: Their dependencies, as pip reports them.
        built_at: The time of the commit; with the same files it makes the same bill.
    """
    metadata = {_bare(each["metadata"]["name"]): each["metadata"] for each in resolved}
    required, wanted = set[str](), {"rdzv"}
    while wanted:
        required |= wanted
        lines = [line for name in wanted for line in metadata.get(name, {}).get("requires_dist", ())]
        needed = [Requirement(line) for line in lines]
        wanted = {_bare(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
        wanted -= required
    built = [
        {"type": "file", "name": path.name, "hashes": [{"alg": "SHA-256", "content": _digest(path)}]} for path in files
    ]
    needed_by = [
        {
            **_component(each["metadata"]),
            "scope": "required" if _bare(each["metadata"]["name"]) in required else "optional",
            "hashes": [{"alg": "SHA-256", "content": each["download_info"]["archive_info"]["hashes"]["sha256"]}],
        }
        for each in resolved
        if each["metadata"]["name"] != "rdzv"
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, " ".join(map(_digest, files))).urn,
        "version": 1,
        "metadata": {
            "timestamp": built_at.isoformat(),
            "component": {
                **_component({"name": "rdzv", "version": __version__, "license_expression": "Apache-2.0"}),
                "components": built,
            },
        },
        "components": needed_by,
    }


def _component(metadata: dict[str, Any]) -> dict[str, Any]:
    name, version = metadata["name"], metadata["version"]
    purl = f"pkg:pypi/{_bare(name)}@{version}"
    named = [line.rpartition(" :: ")[2] for line in metadata.get("classifier", ()) if line.startswith("License ::")]
    licenses: list[dict[str, Any]] = [{"license": {"name": each}} for each in named]
    if expression := metadata.get("license_expression"):
        licenses = [{"expression": expression}]
    elif not licenses:
        licenses = [{"license": {"name": metadata.get("license", "not said").partition("\n")[0]}}]
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "licenses": licenses, "purl": purl}


def _bare(name: str) -> str:
    """Return a name as an index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603, S607


if __name__ == "__main__":
    main()
