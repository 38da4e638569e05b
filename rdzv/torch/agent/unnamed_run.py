"""Shell: runs that nobody has named, which end with their last node instead of staying closed for a day.

PyTorch calls a run "none" if it is not told a name, and `accelerate` cannot tell it one. So jobs that have nothing to
do with each other come to the same endpoint under the same name, one after the other, and the second finds it closed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from rdzv.core.keys import Keys
from rdzv.torch.store import open_store
from store import Delete, StoreError, when
from store.printable import escaping

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["NO_NAME", "begin_anew"]

log: logging.Logger = escaping(logging.getLogger(__name__))

NO_NAME: Final = "none"
"""What PyTorch calls a run by default: `--rdzv-id` of its launcher."""

LOOK_EVERY: Final = 0.2
"""In seconds: how often to look whether the former job's nodes have gone. They go within seconds of its closing."""


def begin_anew(url: str, overrides: Mapping[str, Any], *, wait: float) -> bool:
    """Take back the closing of a run without live nodes, waiting for those it has; whether it may be joined now.

    Args:
        url: Where the run is.
        overrides: The URL's parameters as keywords.
        wait: In seconds, how long its nodes may take to go.
    """
    deadline = time.monotonic() + wait
    client, settings = open_store(url, overrides)
    keys = Keys(settings.prefix, settings.run_id)
    told = False
    with contextlib.closing(client), contextlib.suppress(StoreError):
        while True:
            closed = client.get(keys.closed)
            if closed is None:
                return True
            nodes = client.count(keys.nodes)
            if not nodes:
                # Not on condition of there being no node: one that came since finds the run closed, as we did.
                unchanged = when.mod_revision(keys.closed) == closed.mod_revision
                client.transact(when=(unchanged,), then=(Delete(keys.closed),))
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
