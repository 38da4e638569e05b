"""Shell: the subcommand that prints a token: what servers, nodes and clients of one store share as their secret."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from rdzv.cli.command import DONE, Command

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMANDS"]

TOKEN_BYTES = 32  # as many as the HMAC-SHA256 that proves it has


async def _token(_: argparse.Namespace) -> int:
    print(secrets.token_urlsafe(TOKEN_BYTES))
    return DONE


COMMANDS = (Command(name="token", help="print a new token, to be kept in a file for --token-file", run=_token),)
