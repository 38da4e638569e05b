"""Print the lowest versions that `pyproject.toml` allows, as constraints for pip: they are declared there alone.

python .ci/lowest.py [EXTRA ...] > constraints.txt    # of the core, and of these extras
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
FLOOR = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[a-z,]+\])?>=(?P<version>[0-9.]+)$")
OWN = re.compile(r"rdzv\[(?P<extras>[a-z,]+)\]$")


def lowest(project: dict[str, object], extras: list[str]) -> dict[str, str]:
    """Return the floor of each requirement of the core and of these extras, and of the extras that they name."""
    optional = project["optional-dependencies"]
    assert isinstance(optional, dict)
    asked = project["dependencies"]
    assert isinstance(asked, list)
    wanted, floors = list(extras), {}
    for requirement in asked:
        floors |= _floor(requirement)
    for extra in wanted:  # it grows meanwhile
        for requirement in optional[extra]:
            own = OWN.match(requirement)
            if own is None:
                floors |= _floor(requirement)
            else:
                wanted.extend(name for name in own["extras"].split(",") if name not in wanted)
    return floors


def _floor(requirement: str) -> dict[str, str]:
    match = FLOOR.match(requirement)
    if match is None:
        raise SystemExit(f"pyproject.toml: {requirement!r} has no floor of the form NAME>=VERSION")
    return {match["name"]: match["version"]}


if __name__ == "__main__":
    declared = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in lowest(declared, sys.argv[1:]).items())
