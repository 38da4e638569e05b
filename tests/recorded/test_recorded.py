"""What is played again is as it was recorded."""

from __future__ import annotations

import pytest

from tests.recorded import FOLDER, compare, recordings, write

RECORDINGS = recordings()
BYTES_MOST = 900_000


@pytest.mark.parametrize("name", RECORDINGS)
def test_behaviour_is_as_recorded(name: str) -> None:
    if difference := compare(name, RECORDINGS[name]()):
        pytest.fail(difference, pytrace=False)


def test_each_text_is_played_and_a_reviewer_can_read_them_all() -> None:
    texts = list(FOLDER.glob("*.txt"))
    assert {text.stem for text in texts} == RECORDINGS.keys()
    assert sum(text.stat().st_size for text in texts) < BYTES_MOST


def test_a_difference_is_shown_where_it_begins(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.recorded.FOLDER", tmp_path)
    write("a", ["same", "old", "end"])
    assert compare("a", ["same", "old", "end"]) == ""
    said = compare("a", ["same", "new", "end"])
    assert "line 2" in said
    assert said.index("- old") < said.index("+ new") < said.index("python -m tests.recorded a")
    assert "line 4" in compare("a", ["same", "old", "end", "more"])
