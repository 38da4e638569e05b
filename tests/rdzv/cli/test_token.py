"""`rdzv token`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rdzv.cli.main import main

if TYPE_CHECKING:
    import pytest


def test_a_token_is_long_enough_and_another_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token"]) == main(["token"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first != second
    assert re.fullmatch("[A-Za-z0-9_-]{43}", first), "32 random bytes, which pass a shell and a file unharmed"
