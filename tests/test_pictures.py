"""Each picture of the documentation is made by `tools/pictures.py` from the present files."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import stamps
from tools.pictures import FOLDER, SUBJECTS

NAMES = sorted(path.name for path in FOLDER.iterdir())


def subject_of(name: str) -> str:
    (subject,) = [subject for subject, each in SUBJECTS.items() if Path(name).match(each.pattern)]
    return subject


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_shows_the_files_as_they_are_now(name: str) -> None:
    subject = subject_of(name)
    shows = SUBJECTS[subject].shows
    assert stamps.read(FOLDER / name) == stamps.digest(shows), (
        f"docs/pictures/{name} is out of date: {', '.join(shows)} changed. "
        f"Make it again, and look at it: python -m tools.pictures {subject}"
    )


def test_every_subject_has_pictures() -> None:
    assert {subject_of(name) for name in NAMES} == set(SUBJECTS)


@pytest.mark.parametrize(
    ("kind", "picture"),
    [
        (".svg", b"<svg></svg>\n"),
        (".cast", b'{"version": 2, "width": 80}\n[0.1, "o", "x"]\n'),
        (".png", (FOLDER / "page-4.png").read_bytes()),
    ],
)
def test_a_picture_with_a_digest_is_still_a_picture(kind: str, picture: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"picture{kind}"
    path.write_bytes(picture)
    assert kind == ".png" or stamps.read(path) == ""
    stamp = stamps.digest(["README.md"])
    path.write_bytes(stamps.stamped(kind, picture, stamp))
    assert stamps.read(path) == stamp
    match kind:
        case ".svg":
            ElementTree.fromstring(path.read_bytes())
        case ".cast":
            header, event = map(json.loads, path.read_text().splitlines())
            assert (header["width"], event) == (80, [0.1, "o", "x"])
        case _:
            assert picture[:33] == path.read_bytes()[:33], "the signature and the header come first"


def test_the_digest_depends_on_the_text_and_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "ROOT", tmp_path)
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    before = stamps.digest(["a"])
    assert before != stamps.digest(["b"])
    (tmp_path / "a").write_text("y")
    assert before != stamps.digest(["a"])
