"""Counters that a run's launchers, or its members in `rounds()`, share in one record in the store.

A restart counts for the run, whichever node's process failed: else `--max-restarts 3` on a hundred nodes would allow
three hundred restarts. A round that ended by a failure or a loss is fruitless if no process wrote the checkpoint
file or finished a step in it. It counts once. Rounds that end by announced changes do not count.

The counters outlive the run's last node by at least 20 seconds.
"""

from __future__ import annotations

from rdzv.core.stored import Stored


class RunCounts(Stored, kw_only=True):
    """The counters."""

    called = "the tally of the run"

    restarts: int = 0
    fruitless: int = 0  # the number of fruitless rounds in a row
    round: int = -1  # the last failed or fruitful round; -1: none

    @classmethod
    def of(cls, value: bytes) -> RunCounts:
        """Unpack the key's value; without a readable value, return a new tally."""
        return (cls.unpack_or_log("tally", value) if value else None) or cls()

    def after(self, round: int, *, restart: bool = False, failed: bool = False, achieved: bool = False) -> RunCounts:
        """Return the tally after a node's part in a round has ended.

        `restart`: a process of this node failed by itself. `failed`: the round ended by a failure or a loss; it counts
        once for all nodes. `achieved`: a process of this node wrote a checkpoint or finished a step.
        """
        fruitless = self.fruitless
        if achieved:
            fruitless = 0
        elif failed and round > self.round:
            fruitless += 1
        told = achieved or failed
        return self.replace(
            restarts=self.restarts + restart, fruitless=fruitless, round=max(self.round, round) if told else self.round
        )
