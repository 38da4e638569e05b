"""Writes lines to standard error in a thread, so that a stopped reader (Ctrl-S) does not block the program."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import select
import sys
import threading
import time
from typing import Final

BYTES_MOST: Final = 2**20  # pending bytes, at most; further lines are counted and dropped
AT_EXIT: Final = 2.0  # seconds at exit to write the pending lines


class _NonBlockingWriter:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._lost = 0
        self._is_writing = self._is_stuck = False
        self._thread: threading.Thread | None = None
        self._file = 2

    def put(self, line: str, file: int) -> None:
        data = f"{line}\n".encode(errors="backslashreplace")
        with self._changed:
            if len(self._waiting) + len(data) > BYTES_MOST:
                self._lost += 1
                return
            self._waiting += data
            self._file = file
            if self._thread is None:
                thread = threading.Thread(target=self._write_forever, name="rdzv standard error", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:  # no further thread can start: write in the calling thread
                    self._write_pending()
            self._changed.notify_all()

    def wait_until_written(self, within: float) -> None:
        until = time.monotonic() + within
        with self._changed:
            while (self._waiting or self._is_writing) and not self._is_stuck:  # after one timeout, return at once
                self._is_stuck = not self._changed.wait(max(until - time.monotonic(), 0.0))

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._is_writing = self._is_stuck = False
                self._changed.notify_all()
                while not self._waiting:
                    self._changed.wait()
                self._is_writing = True
            self._write_pending()

    def _write_pending(self) -> None:
        with self._changed:
            data, lost = bytes(self._waiting), self._lost
            self._waiting.clear()
            self._lost = 0
        if lost:
            data += f"rdzv: {lost} lines are lost here: nothing read standard error\n".encode()
        with contextlib.suppress(OSError):  # standard error is closed
            # Do not use `sys.stderr`: Python aborts at exit if a thread holds the lock of that file.
            write_all(self._file, data)


def write_all(file: int, data: bytes) -> None:
    """Write all data, also to a stream that another process has made non-blocking; raise OSError on an error."""
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            writable = select.poll()  # `select.select` accepts no file number above 1023
            writable.register(file, select.POLLOUT)
            writable.poll()


_lines = _NonBlockingWriter()


def _renew_line_writer() -> None:
    global _lines
    _lines = _NonBlockingWriter()


os.register_at_fork(after_in_child=_renew_line_writer)


def say_error(line: str) -> None:
    """Write a line to standard error without waiting for its reader."""
    try:
        file = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # standard error is missing, or in memory, where no write blocks
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(f"{line}\n")
    else:
        _lines.put(line, file)


def flush_standard_error(within: float = AT_EXIT) -> None:
    """Wait until all lines of `say_error` are written, at most `within` seconds."""
    _lines.wait_until_written(within)


atexit.register(flush_standard_error)


class _LogStream(io.TextIOBase):
    def write(self, text: str) -> int:
        say_error(text.removesuffix("\n"))
        return len(text)


def unblock_stderr_logging() -> None:
    """Let all handlers of `logging` that write to standard error do so without waiting for its reader."""
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    for handler in {one for logger in loggers for one in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setStream(_LogStream())


class NonBlockingStderrHandler(logging.Handler):
    """Logs to standard error without waiting for its reader."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record."""
        try:
            say_error(self.format(record))
        except Exception:  # noqa: BLE001  as all handlers of the standard library do
            self.handleError(record)

    def flush(self) -> None:
        """Write the pending lines; `logging` calls this at exit."""
        flush_standard_error()
