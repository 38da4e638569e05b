"""The unit in `examples/systemd`: systemd finds no fault in it, and `rdzv serve` accepts its options."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from rdzv.cli import main

UNIT = Path(__file__).parents[2] / "examples" / "systemd" / "rdzv.service"
PROGRAM = "/usr/local/bin/rdzv"


def test_serve_takes_the_options_of_the_unit() -> None:
    (line,) = [line for line in UNIT.read_text(encoding="utf-8").splitlines() if line.startswith("ExecStart=")]
    program, command, *arguments = shlex.split(line.removeprefix("ExecStart="))
    assert (program, command) == (PROGRAM, "serve")
    options = main.parser_of(main.command_named(command)).parse_args(arguments)
    assert (options.data_dir, options.token_file, options.insecure) == ("%S/rdzv", "%d/token", False)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    there = tmp_path / UNIT.name  # systemd wants the program to exist, and here it is not installed at the unit's path
    there.write_text(UNIT.read_text(encoding="utf-8").replace(PROGRAM, "/bin/true"), encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", str(there)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert UNIT.name not in done.stderr, done.stderr
    broken = there.read_text(encoding="utf-8").replace("Type=notify", "Type=notifies")
    there.write_text(broken, encoding="utf-8")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert UNIT.name in done.stderr, "the check above must be able to fail"
