"""Promise S12: every release reads the data of all earlier ones. `tools.release` puts their bytes into tests/golden."""

from pathlib import Path

from tools import golden

RELEASED = sorted((Path(__file__).parents[1] / "golden").glob("*"))


def test_s12_this_release_reads_its_own_data(tmp_path: Path) -> None:
    golden.write(tmp_path / "now")
    assert golden.read(tmp_path / "now") == []


def test_s12_a_record_that_is_read_otherwise_is_found(tmp_path: Path) -> None:
    """Otherwise the test below might pass with any content."""
    golden.write(tmp_path / "now")
    records = tmp_path / "now" / "records.json"
    records.write_text(records.read_text().replace(b"slow disk".hex(), b"slow dusk".hex()))
    frames = tmp_path / "now" / "frames"
    frames.write_text(frames.read_text().replace("0701", "0702"))
    assert "now: the record ban" in golden.read(tmp_path / "now")


def test_s12_data_of_earlier_releases_is_read() -> None:
    assert [wrong for directory in RELEASED for wrong in golden.read(directory)] == []
