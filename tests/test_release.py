"""The files of a release: the bill of materials, and the project's metadata."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, require
from tools import release

NOON = datetime(2027, 1, 15, 12, tzinfo=UTC)


def installed(name: str, *requires: str, **more: Any) -> dict[str, Any]:
    """Return one entry of pip's report."""
    metadata = {"name": name, "version": "1.2", "requires_dist": list(requires), **more}
    return {"metadata": metadata, "download_info": {"archive_info": {"hashes": {"sha256": "0" * 64}}}}


REPORT = [
    installed("rdzv", "anyio>=4", "msgpack>=1", 'aiohttp>=3; extra == "http"'),
    installed("anyio", "idna>=2", 'trio; extra == "trio"', license_expression="MIT"),
    installed("msgpack", license="Apache 2.0\nand more of it"),
    installed("idna", classifier=["License :: OSI Approved :: BSD License", "Topic :: Internet"]),
    installed("aiohttp", "typing_extensions; python_version >= '3'", license_expression="Apache-2.0 AND MIT"),
    installed("typing.extensions", license_expression="PSF-2.0"),
]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "rdzv.whl"
    path.write_bytes(b"what was built")
    return path


def test_the_bill_of_materials_has_versions_hashes_licences_a_serial_and_a_time(wheel: Path) -> None:
    bill = release.bill_of_materials([wheel], REPORT, built_at=NOON)
    assert [(each["name"], each["scope"], each["licenses"][0]) for each in bill["components"]] == [
        ("anyio", "required", {"expression": "MIT"}),
        ("msgpack", "required", {"license": {"name": "Apache 2.0"}}),
        ("idna", "required", {"license": {"name": "BSD License"}}),
        ("aiohttp", "optional", {"expression": "Apache-2.0 AND MIT"}),
        ("typing.extensions", "optional", {"expression": "PSF-2.0"}),
    ]
    assert bill["components"][4]["purl"] == "pkg:pypi/typing-extensions@1.2"
    assert all(len(each["hashes"][0]["content"]) == 64 for each in bill["components"])
    assert bill["metadata"]["timestamp"] == "2027-01-15T12:00:00+00:00"
    (built,) = bill["metadata"]["component"]["components"]
    assert built["name"] == "rdzv.whl"
    assert bill == release.bill_of_materials([wheel], REPORT, built_at=NOON), "the same build has the same bill"
    wheel.write_bytes(b"something else")
    assert bill["serialNumber"] != release.bill_of_materials([wheel], REPORT, built_at=NOON)["serialNumber"]


def test_the_bill_of_materials_conforms_to_cyclonedx(wheel: Path) -> None:
    require("cyclonedx")
    from cyclonedx.schema import SchemaVersion  # type: ignore[import-not-found, unused-ignore]
    from cyclonedx.validation.json import JsonStrictValidator  # type: ignore[import-not-found, unused-ignore]

    bill = release.bill_of_materials([wheel], REPORT, built_at=NOON)
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(bill)) is None
    assert validator.validate_str(json.dumps(bill | {"serialNumber": "7"})) is not None


def test_pictures_load_nothing_from_the_network() -> None:
    for picture in (ROOT / "docs" / "pictures").glob("*.svg"):
        text = picture.read_text(encoding="utf-8")
        assert "@font-face" not in text
        assert not re.search(r"""(?:url\(|href=)\s*["']?(?:https?:)?//""", text), picture.name


def test_the_tests_and_variables_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:(RDZV_\w+)=\S+ )?python -m pytest .*?(tests/\S+)", text, re.MULTILINE)
    assert len(commands) > 10
    for variable, path in commands:
        assert (ROOT / path).exists(), path
        files = [*([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))]
        files += [ROOT / "tests" / "conftest.py", *(ROOT / "tests" / "support").glob("*.py")]
        assert any(variable in file.read_text(encoding="utf-8") for file in files), (variable, path)
