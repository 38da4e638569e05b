"""Names what a log line is about: the run, the round and the node, as fields of its record; and writes lines as JSON.

    handler.addFilter(rdzv.logs.Fields())           # record.run, record.round, record.node
    handler.setFormatter(rdzv.logs.JsonFormatter())

Every line that is about a run begins with it: "run job-7, round 3: ...", "run job-7, node gpu-017: ...". The fields are
taken from there, for whoever has set up logging in a way of their own, too.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Final

__all__ = ["Fields", "JsonFormatter", "configure"]

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
OURS: Final = ("rdzv", "store")

_SUBJECT: Final = re.compile(
    r"\Arun (?P<run>[^\s,:]+)(?:, round (?P<round>\d+))?(?:, node (?P<node>[^\s,:]+))?(?=[,: ])"
)
_NODE: Final = re.compile(r"(?:\bnode |\bthis one, )(?P<node>[^\s,:;]+)")


class Fields(logging.Filter):
    """Adds `run`, `round` and `node` to each record; None where a line is not about one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        run = round = node = None
        if record.name.partition(".")[0] in OURS:
            found = _SUBJECT.match(record.getMessage())
            if found is not None:
                run, node = found["run"], found["node"]
                round = None if found["round"] is None else int(found["round"])
                if node is None and (named := _NODE.search(record.getMessage(), found.end())) is not None:
                    node = named["node"]
        record.run, record.round, record.node = run, round, node
        return True


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time (UTC), level, logger, message, run, round, node, perhaps exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        plain = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "run": getattr(record, "run", None),
            "round": getattr(record, "round", None),
            "node": getattr(record, "node", None),
        }
        if record.exc_info:
            plain["exception"] = self.formatException(record.exc_info)
        return json.dumps(plain)


def configure(level: int, *, as_json: bool = False) -> None:
    """Write all logs of this process to standard error, unless logging is set up already."""
    handler = logging.StreamHandler()
    handler.addFilter(Fields())
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler])
