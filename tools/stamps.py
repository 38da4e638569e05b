"""The digest of the files that a picture shows, inside the picture; a test finds pictures that are out of date."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["digest", "read", "stamped"]

ROOT: Final = Path(__file__).resolve().parents[1]
STAMP: Final = re.compile(rb"shows\W+(sha256:[0-9a-f]{64})")
"""One pattern for all three formats: a comment in SVG, a text chunk in PNG, a field of a recording's header."""

PNG_HEADER: Final = 33  # bytes: the signature and the first chunk; a text chunk may follow


def digest(files: Iterable[str]) -> str:
    """Return the digest of these files of the repository, with their names."""
    found = hashlib.sha256()
    for name in sorted(files):
        found.update(f"{name}\0".encode() + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return f"sha256:{found.hexdigest()}"


def read(picture: Path) -> str:
    """Return the digest in a picture, or ""."""
    match = STAMP.search(picture.read_bytes())
    return match[1].decode() if match else ""


def stamped(kind: str, picture: bytes, mark: str) -> bytes:
    """Return a picture with a digest in it.

    Args:
        kind: The suffix of its file: `.svg`, `.png` or `.cast`.
        picture: The bytes of a picture without a digest.
        mark: The digest.
    """
    if kind == ".svg":
        return picture.rstrip() + f"\n<!-- shows {mark} -->\n".encode()
    if kind == ".png":
        chunk = b"tEXt" + f"shows\0{mark}".encode()
        chunk = (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
        return picture[:PNG_HEADER] + chunk + picture[PNG_HEADER:]
    header, rest = picture.split(b"\n", 1)
    return json.dumps(json.loads(header) | {"shows": mark}).encode() + b"\n" + rest
