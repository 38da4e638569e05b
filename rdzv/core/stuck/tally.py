"""Pure: shared counters of a run's nodes, in one record of the run's store: its launchers, or its `rounds()`.

A restart counts for the run, whichever node's process failed: with counters per node, `--max-restarts 3` on a hundred
nodes would allow three hundred. A round without progress counts once, too: it ended by a failure or a loss, no process
wrote the checkpoint file in it, and none reported more than one step. Announced changes (newcomers, a drain, a resize)
do not count.

The record lasts as long as the run has nodes, and half a minute more.
"""

from __future__ import annotations

from rdzv.core.stored import Stored

__all__ = ["Tally"]


class Tally(Stored, kw_only=True):
    """The counters."""

    called = "the tally of the run"

    restarts: int = 0  # failures of processes
    fruitless: int = 0  # failed rounds in a row without a checkpoint or a finished step
    round: int = -1  # the last counted round

    @classmethod
    def of(cls, value: bytes) -> Tally:
        """Unpack the key's value, empty if there is none. An unreadable one starts anew."""
        return (cls.unpack_at("tally", value) if value else None) or cls()

    def after(self, round: int, *, restart: bool = False, failed: bool = False, achieved: bool = False) -> Tally:
        """Return the tally after one node's part in a round is over.

        Args:
            round: Its number. Several nodes report the same round, which counts once.
            restart: A process of this node failed by itself.
            failed: The round ended by a failure or a loss.
            achieved: A process of this node wrote a checkpoint in it, or finished a step.
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
