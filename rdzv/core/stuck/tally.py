"""Pure: what the nodes of a run count together, in one record of the run's store: its launchers, or its `rounds()`.

A restart is a restart of the run, whichever node's process has failed: counts that each node keeps for itself disagree,
and `--max-restarts 3` on a hundred nodes would be three hundred. A round in which nothing was achieved is one for all,
too: it ended by a failure or a loss, and no process of any node has written the checkpoint file in it,
or told of more than one step. Announced
changes (newcomers, a drain, a resize) count as neither.

The record stands as long as the run has nodes, and half a minute more.
"""

from __future__ import annotations

from rdzv.core.stored import Stored

__all__ = ["Tally"]


class Tally(Stored, kw_only=True):
    """What is counted."""

    called = "the tally of the run"

    restarts: int = 0  # how often a process has failed by itself
    fruitless: int = 0  # how many rounds have failed, one after the other, without a checkpoint or a finished step
    round: int = -1  # the last round of which that is known

    @classmethod
    def of(cls, value: bytes) -> Tally:
        """Unpack what the key holds; empty bytes if there is none. What nobody can read is counted anew."""
        return (cls.unpack_at("tally", value) if value else None) or cls()

    def after(self, round: int, *, restart: bool = False, failed: bool = False, achieved: bool = False) -> Tally:
        """Return the tally after one node's part in a round is over.

        Args:
            round: Its number. Several nodes tell of the same round, and it counts once.
            restart: A process of this node has failed by itself.
            failed: The round has ended by a failure or a loss.
            achieved: A process of this node has written a checkpoint in it, or finished a step.
        """
        fruitless = self.fruitless
        if achieved:
            fruitless = 0
        elif failed and round > self.round:
            fruitless += 1
        told = achieved or failed
        return self.replace(
            restarts=self.restarts + restart,
            fruitless=fruitless,
            round=max(self.round, round) if told else self.round,
        )
