"""Carry a subcommand out: its exit status, and one line for each error, without a traceback unless `--debug`.

`rdzv run` ends with its command's own status, and says 120 to 124 for the statuses 1 to 5.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Final

import store
from rdzv import logs
from rdzv.cli.command import (
    CLOSED,
    DONE,
    FAILED,
    NO_CONNECTION,
    OF_RUN,
    TIMED_OUT,
    WRONG_USAGE,
    limited_by_timeout,
)
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousSettingsError,
    RendezvousTimeoutError,
)
from store.connecting import is_etcd
from store.net.threads import loop_factory
from store.printable import printable

if TYPE_CHECKING:
    import argparse

    from rdzv.cli.command import Command

__all__ = ["outcome_of"]

ERROR_LETTERS_MOST: Final = 4000  # of a line that says what went wrong


def outcome_of(command: Command, options: argparse.Namespace) -> int:
    """Carry a subcommand out, and return its exit status."""
    level = logging.DEBUG if options.debug else logging.INFO if options.verbose else logging.WARNING
    logs.configure(level, as_json=options.log_format == "json")
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_run(command, options))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has enough of it, and of what is still to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (RendezvousError, store.StoreError, OSError, ValueError, ImportError) as error:
        if options.debug:
            traceback.print_exc()
        sys.stderr.write(f"rdzv {options.command}: {printable(str(error), most=ERROR_LETTERS_MOST)}\n")
        return _status_of(error) + (OF_RUN if command.takes_command else 0)


async def _run(command: Command, options: argparse.Namespace) -> int:
    """Run a subcommand, within its `--timeout`; one that goes on for long takes care of that itself."""
    if command.takes_url and is_etcd(options.url):
        # Importing gRPC takes longer than a short `--timeout`, and says nothing of the store.
        importlib.import_module("store.etcd.client")
    if not command.limited or getattr(options, "watch", False):
        return await command.run(options)
    with limited_by_timeout(options.timeout):
        return await command.run(options)


def _status_of(error: Exception) -> int:
    match error:
        case RendezvousSettingsError() | store.StoreUsageError() | ImportError():  # of an extra, which is named
            return WRONG_USAGE
        case RendezvousClosedError():
            return CLOSED
        case RendezvousTimeoutError() | store.StoreTimeoutError():
            return TIMED_OUT
        case RendezvousConnectionError() | store.ConnectionLost() | store.AuthenticationError():
            return NO_CONNECTION
        case _:
            return FAILED
