"""Shell: what an agent says of the rendezvous, also as events of PyTorch's own: `torch.distributed.elastic.events`.

Each line of the logger `rdzv.torch` becomes one `RdzvEvent`, as those of PyTorch's own rendezvous: where somebody has
set up a handler for its destination `dynamic_rendezvous`, that gets ours, too. As PyTorch comes, nobody has.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from rdzv.torch import pytorch

__all__ = ["EventHandler"]

NAME: Final = "rdzv"
CLOSED: Final = " is closed"
_RUN: Final = re.compile(r"run ([^\s,:]+)")  # with which every line about a run begins


class EventHandler(logging.Handler):
    """Records log lines as events of PyTorch's."""

    def emit(self, record: logging.LogRecord) -> None:
        """Record one line; what PyTorch's handler raises is shown as logging shows it, and ends nothing."""
        message = record.getMessage()
        run = _RUN.match(message)
        state = pytorch.events.NodeState.RUNNING
        if record.levelno >= logging.ERROR:
            state = pytorch.events.NodeState.FAILED
        elif CLOSED in message:
            state = pytorch.events.NodeState.SUCCEEDED
        try:
            pytorch.events.construct_and_record_rdzv_event(
                run_id=run[1] if run is not None else "", message=message, node_state=state, name=NAME
            )
        except Exception:  # noqa: BLE001  it is somebody else's handler
            self.handleError(record)
