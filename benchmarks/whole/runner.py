"""Run one part in a process of its own, and take its rows as they come.

A part that hangs, crashes or leaves processes behind harms only itself: it has a session of its own, which is killed
when the part has ended, or is far beyond its time.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

GRACE = 120.0  # seconds beyond its time for a running step


def run(
    command: Sequence[str],
    *,
    seconds: float,
    row: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    log: Path,
) -> tuple[str, list[str]]:
    """Run a part; return its end ("done", "stopped" early, or "failed"), and its problems.

    Args:
        command: Prints rows, as `benchmarks.whole.parts` does.
        seconds: The limit within which it should end.
        row: Called with each row.
        say: Called with each other line.
        log: The file of its standard error.
    """
    deadline = time.monotonic() + seconds + GRACE
    status = "done"
    errors: list[str] = []
    with _started(command, log) as (process, lines):
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return "failed", [*errors, f"killed {GRACE:g} s after its time"]
            if line is None:
                break
            if line.startswith("ROW "):
                row(json.loads(line[4:]))
                continue
            if line.startswith("FAILED "):
                errors.append(line.removeprefix("FAILED "))
            elif line.startswith("SKIPPED "):
                status = "stopped"
            say(line)
        code = process.wait()
    if code != 0:
        errors.append(f"ended with exit status {code}")
    return "failed" if errors else status, errors


@contextlib.contextmanager
def _started(
    command: Sequence[str], log: Path
) -> Iterator[tuple[subprocess.Popen[str], queue.SimpleQueue[str | None]]]:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    with (
        open(log, "w", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True) as process,
    ):
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield process, lines
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def command_of(part: str, options: Sequence[str]) -> list[str]:
    """Return the command of a part."""
    return [sys.executable, "-u", "-m", "benchmarks.whole.parts", part, *options]
