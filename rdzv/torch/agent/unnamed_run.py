"""Runs without a name, which end with their last node instead of staying closed for a day.

Unrelated jobs at one endpoint may all have PyTorch's default name, "none": the second job would find the run closed.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

import store
from rdzv.loop import Keys
from rdzv.torch.store import open_blocking_client
from store.printable import make_logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

log: Final = make_logger(__name__)

NO_NAME: Final = "none"  # PyTorch's default for `--rdzv-id`
LOOK_EVERY: Final = 0.2  # seconds between counts of the nodes that a closed job still has


def reopen_closed_run(url: str, overrides: Mapping[str, Any], *, wait: float) -> bool:
    """Reopen a closed run once it has no live nodes, within `wait` seconds; return True if it can be joined."""
    deadline = time.monotonic() + wait
    client, settings = open_blocking_client(url, overrides)
    keys = Keys(settings.prefix, settings.run_id)
    told = False
    with contextlib.closing(client), contextlib.suppress(store.StoreError):
        while True:
            closed = client.get(keys.closed)
            if closed is None:
                return True
            nodes = client.count(keys.nodes)
            if not nodes:
                # Do not count again: a node that arrives now finds the run closed, and does not join.
                unchanged = store.when.mod_revision(keys.closed) == closed.mod_revision
                client.transact(when=(unchanged,), then=(store.Delete(keys.closed),))
                return True
            if not told:
                told = True
                log.warning(
                    "run %s is closed, and %d nodes of the job that had it are still there; waiting for them to go "
                    "(a name of its own for each job spares that: --rdzv-id=NAME)",
                    settings.run_id,
                    nodes,
                )
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_EVERY)
    return False
