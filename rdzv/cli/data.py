"""The subcommands that need no server: token, and check, backup and restore of a durable store's directory."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rdzv.cli.command import DONE, Argument, command, print_text
from store import StoreError, StoreUsageError
from store.net.threads import in_thread

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from store.disk.copies import StoreReport

TOKEN_BYTES = 32  # random bytes, as many as an HMAC-SHA256 has; the token's text is longer
DIRECTORY = Argument("directory", metavar="DIR", type=Path, help="the directory that was given as --data-dir")


@command("check", "read all of a durable store, and say what is in it", DIRECTORY)
async def _check_store_files(options: argparse.Namespace) -> int:
    from store.disk.copies import check

    return await _report_on_store(partial(check, options.directory), "is whole")


@command(
    "backup",
    "copy a durable store into one file, also while a server has it",
    DIRECTORY,
    Argument("file", metavar="FILE", type=Path, help="where to put the copy; must not be there yet"),
)
async def _back_up_store(options: argparse.Namespace) -> int:
    from store.disk.copies import back_up

    return await _report_on_store(partial(back_up, options.directory, options.file), f"was copied to {options.file}")


@command(
    "restore",
    "make a store of such a copy, under a new identity",
    Argument("file", metavar="FILE", type=Path, help="a copy made by rdzv backup, or a store.sqlite3"),
    Argument("directory", metavar="DIR", type=Path, help="a directory without a store; made if not there"),
)
async def _restore_store(options: argparse.Namespace) -> int:
    from store.disk.copies import restore

    done = f"is in {options.directory}, as a new store: clients of the old one are told that it was replaced"
    return await _report_on_store(partial(restore, options.file, options.directory, new_id=secrets.token_hex(8)), done)


async def _report_on_store(work: Callable[[], StoreReport], done: str) -> int:
    try:
        report = await in_thread(work)
    except StoreUsageError as error:
        raise StoreError(str(error)) from error  # exit with status 1: the store is at fault, not the usage
    served = f"; process {report.served_by} serves it" if report.served_by else ""
    saved = report.saved
    print_text(
        f"store {saved.store_id} {done}: revision {saved.revision}, {len(saved.entries)} keys with "
        f"{sum(len(entry.value) for entry in saved.entries)} bytes, {len(saved.leases)} leases, {len(saved.sessions)} "
        f"sessions, {len(saved.history)} past changes; {report.file_bytes} bytes on the disk{served}"
    )
    return DONE


@command("token", "print a new token, to be kept in a file for --token-file")
async def _print_token(_: argparse.Namespace) -> int:
    print_text(secrets.token_urlsafe(TOKEN_BYTES))
    return DONE
