"""Shell: what an agent says of the rendezvous, also as events of PyTorch's own: `torch.distributed.elastic.events`.

Each line of the logger `rdzv.torch` becomes one `RdzvEvent`, as those of PyTorch's own rendezvous: where somebody has
set up a handler for its destination `dynamic_rendezvous`, that gets ours, too. As PyTorch comes, nobody has.
"""

from __future__ import annotations

import logging
from typing import Final

from rdzv.logs import Fields
from rdzv.torch import pytorch

__all__ = ["EventHandler"]

NAME: Final = "rdzv"
CLOSED: Final = " is closed"


class EventHandler(logging.Handler):
    """Records log lines as events of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(Fields())

    def emit(self, record: logging.LogRecord) -> None:
        """Record one line; what PyTorch's handler raises is shown as logging shows it, and ends nothing."""
        message = record.getMessage()
        state = pytorch.events.NodeState.RUNNING
        if record.levelno >= logging.ERROR:
            state = pytorch.events.NodeState.FAILED
        elif CLOSED in message:
            state = pytorch.events.NodeState.SUCCEEDED
        try:
            pytorch.events.construct_and_record_rdzv_event(
                run_id=getattr(record, "run", None) or "", message=message, node_state=state, name=NAME
            )
        except Exception:  # noqa: BLE001  it is somebody else's handler
            self.handleError(record)
