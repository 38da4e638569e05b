"""Relative paths in the settings of a program that changes its working directory later."""

from pathlib import Path

import pytest

import store.sync
from rdzv.backends.credentials import PATHS, Credentials, with_full_paths
from rdzv.config.settings import Settings, parse
from rdzv.errors import RendezvousSettingsError


def settings_of(**paths: str) -> Settings:
    scheme = "etcds" if "password_file" in paths else "tcps"
    user = {"user": "me"} if "password_file" in paths else {}
    return with_full_paths(parse(f"{scheme}://head/job", {**paths, **user}, {}))


def test_relative_paths_in_settings_are_those_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {field for field in Settings.__dataclass_fields__ if field.endswith(("_file", "_dir"))}
    assert fields - {"expected_file"} <= set(PATHS), "that one is read at the start, and never again"
    monkeypatch.chdir(tmp_path)
    for name in PATHS:
        more = {"cert": "c"} if name == "key" else {"key": "k"} if name == "cert" else {}
        assert getattr(settings_of(**{name: f"folder/{name}", **more}), name) == str(tmp_path / "folder" / name)


def test_a_file_is_read_again_at_its_first_path_and_named_as_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("a token of 16 bytes")
    credentials = Credentials(settings_of(token_file="token"))
    monkeypatch.chdir("/")
    assert credentials.renew is not None
    credentials.renew()
    assert credentials.token == b"a token of 16 bytes"
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("")
    with pytest.raises(RendezvousSettingsError, match=r"^token_file='token' is empty"):
        Credentials(settings_of(token_file="token"))


def test_a_store_stays_in_the_directory_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the store wrote its mark at a path that did not exist, and ended at the first write."""
    monkeypatch.chdir(tmp_path)
    with store.sync.serve(data_dir="data") as server:
        with pytest.raises(store.StoreUsageError, match=r"^data_dir data is in use"):
            store.sync.serve(data_dir="data").__enter__()
        monkeypatch.chdir("/")
        with store.sync.connect(server.url) as client:
            client.put("a", b"")
    assert (tmp_path / "data" / "durable").exists()
