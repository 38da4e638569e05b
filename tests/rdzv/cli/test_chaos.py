"""`rdzv chaos` with real launchers: failures are injected only where a launcher allows it and the operator confirms."""

import argparse
import sys

import pytest

from rdzv.cli import main as command
from rdzv.cli.operate import to_rate
from rdzv.testing import processes


def test_a_rate_is_parsed() -> None:
    assert (to_rate("2/10m"), to_rate("1/30")) == (1 / 300, 1 / 30)
    for wrong in ("1", "0/10m", "x/10m", "1/0", "1/never"):
        with pytest.raises(argparse.ArgumentTypeError):
            to_rate(wrong)


def test_a_launcher_that_allows_it_is_killed_and_another_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    launch = [sys.executable, "-m", "rdzv", "run", "--no-stacks", "--no-remote-stacks"]
    sleep = ["--", "sh", "-c", "echo up; sleep 600"]
    with processes(1, [*launch, *sleep]) as refusing:
        refusing.wait_for(0, "up")
        assert command.main(["chaos", refusing.url, "--kill", "100/1s", "--for", "1", "--seed", "1", "--yes"]) == 1
        assert "node-0: refused: this launcher was not started with --allow-chaos" in capsys.readouterr().out
        assert command.main(["stacks", refusing.url, "node-0"]) == 0
        assert "refused: this launcher runs with --no-remote-stacks" in capsys.readouterr().out
    with processes(1, [*launch, "--allow-chaos", *sleep]) as allowing:
        allowing.wait_for(0, "up")
        assert command.main(["chaos", allowing.url, "--kill", "100/1s", "--for", "2", "--seed", "1", "--yes"]) == 0
        assert "node-0: killed" in capsys.readouterr().out
        assert allowing.wait(within=60) == [-9]
