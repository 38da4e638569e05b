"""Writing to standard error, and to a stream that another process has made non-blocking."""

import os
import resource
import subprocess
import sys
import threading

import pytest

from rdzv.display.standard_error import write_all

HIGH = 1100  # `select.select` accepts no file number above 1023


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= HIGH, reason="too few files may be open")
def test_all_is_written_to_a_full_non_blocking_pipe_of_a_high_number() -> None:
    """Regression: the wait for room raised ValueError, as in a program with a thousand open files."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.dup2(writing, HIGH)
    os.close(writing)
    data, read = bytes(300_000), bytearray()

    def drain() -> None:
        while piece := os.read(reading, 10_000):
            read.extend(piece)

    reader = threading.Thread(target=drain)
    timer = threading.Timer(0.1, reader.start)  # the pipe is full by then, or the write only waits less
    timer.start()
    try:
        write_all(HIGH, data)
    finally:
        os.close(HIGH)
        timer.join()
        reader.join()
        os.close(reading)
    assert bytes(read) == data


def test_the_last_lines_of_other_handlers_are_written_at_exit() -> None:
    """Regression: the line by which an agent says why it ends was lost under PyTorch 2.4."""
    program = """
import logging
from rdzv.display.standard_error import unblock_stderr_logging
logging.basicConfig()
unblock_stderr_logging()
for number in range(9000):
    logging.warning("line %d", number)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert len(done.stderr.splitlines()) == 9000
