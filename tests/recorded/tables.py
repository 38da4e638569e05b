"""Tables of inputs, as text in files beside the recordings, and values in short."""

from __future__ import annotations

import contextlib
import logging
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any
from unittest import mock

from store.records import Record

LONGEST = 190  # characters of a value that are written in full


def text(value: Any) -> str:
    """Return a value in short: records without their defaults, and long texts by their size and checksum."""
    if isinstance(value, Record):
        whole: Any = value
        fields = list(whole[1:] if type(value).code is not None else whole)
        defaults = list(type(value).defaults.values())
        while fields and defaults and fields[-1] == defaults.pop():
            fields.pop()
        told = f"{type(value).__name__}({', '.join(map(text, fields))})"
    elif isinstance(value, tuple | list | GeneratorType):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        told = f"{name}[{', '.join(map(text, value))}]"
    elif isinstance(value, dict):
        told = f"({', '.join(f'{text(key)}: {text(each)}' for key, each in value.items())})"
    elif isinstance(value, float):
        told = f"{round(value, 6):g}"
    elif isinstance(value, BaseException):
        doubt = " (maybe applied)" if getattr(value, "maybe_applied", False) else ""
        told = f"{type(value).__name__}: {value}{doubt}"
    elif isinstance(value, memoryview):
        told = repr(bytes(value))
    else:
        told = value if isinstance(value, str) and value.isidentifier() else getattr(value, "name", None) or repr(value)
    size = len(told)
    return told if size <= LONGEST else f"{told[: LONGEST // 2]}...({size}, {zlib.crc32(told.encode()):08x})"


def sections(module: str) -> dict[str, str]:
    """Return the tables of a module's file, by the first word of their titles."""
    whole = Path(module).with_suffix(".rows").read_text(encoding="utf-8").replace("\\\n", "")
    parts = re.split(r"^# (\w+).*\n\n", whole, flags=re.MULTILINE)
    return dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))


def constants(tables: dict[str, str], package: str) -> dict[str, float]:
    """Return the constants of a package's modules that a table names, and their values."""
    found: dict[str, float] = {}
    for module, *values in map(str.split, tables["constants"].splitlines()):
        pairs = [each.split("=") for each in values]
        found |= {f"{package}.{module}.{name}": float(most) if "." in most else int(most) for name, most in pairs}
    return found


def evaluated(rows: str, names: dict[str, Any]) -> Iterator[str]:
    """Yield each row, an expression or a statement of Python, with its value or its error."""
    for row in filter(None, re.split(r"\n+(?! )", rows)):
        try:
            code = compile(row, "row", "eval")
        except SyntaxError:
            exec(row, names)
            if "import" not in row.split():
                yield row.partition("\n")[0]
            continue
        try:
            told = text(eval(code, names))
        except Exception as error:  # noqa: BLE001 - it is recorded
            told = text(error)
        yield f"{row} -> {told}"


class LogLines(logging.Handler):
    """A handler that gives the lines of the store's loggers to a function."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        self._write(f"{record.name}: {record.levelname.lower()}: {text(ValueError(record.getMessage()))[12:]}")


@contextlib.contextmanager
def logged(write: Callable[[str], None]) -> Iterator[None]:
    """Write all that the store logs; in this thread, also what would be logged in another."""
    log, handler = logging.getLogger("store"), LogLines(write)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        with mock.patch("store.net.absence._log_in_thread", lambda log, level, *said: log.log(level, *said)):
            yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
