"""What a round offers to a member's body, awaited or blocking: who it is, what has changed, and how the body ends.

`judge` draws the consequence of a body's end, for both twins.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from rdzv.errors import GiveUp, MembersLostError, RendezvousStateError, RoundChanged, RoundSupersededError
from rdzv.loop.ending import EndKind
from rdzv.membership import Membership, Previous

if TYPE_CHECKING:
    from rdzv.core.stopping import StepGate
    from rdzv.loop.ending import Ending

__all__ = ["Consequence", "MemberOfRound", "finished_of", "judge"]


class MemberOfRound:
    """What both twins of a round have.

    Attributes:
        number: The round's number, from 0.
        rank: This member's place, from 0.
        world_size: How many members there are.
        node_id: This member.
        run_id: Which run.
        bootstrap_address: Host and port on rank 0, the same for every member.
        previous: What has changed since the last round this node was in; None in its first.
        newest: Rank and last finished step of the member who has finished the most; None if nobody has finished any.
    """

    number: int
    rank: int
    world_size: int
    node_id: str
    run_id: str
    bootstrap_address: tuple[str, int]
    previous: Previous | None
    newest: tuple[int, int] | None

    def __init__(self, membership: Membership, *, run_id: str, node_id: str, last_rank: int | None) -> None:
        round = membership.round
        self.number = round.number
        self.rank = membership.rank
        self.world_size = round.size
        self.node_id = node_id
        self.run_id = run_id
        self.bootstrap_address = (round.host, round.port)
        self.previous = None if last_rank is None else Previous(last_rank, *round.since)
        self.newest = round.newest

    def __repr__(self) -> str:
        return f"<round {self.number} of run {self.run_id}: rank {self.rank} of {self.world_size}>"


class Consequence(Enum):
    """What follows from the end of a body."""

    FINISHED = "finished"  # wait for the others to finish, too
    GIVEN_UP = "given up"  # close the run, and raise it
    MEET_AGAIN = "meet again"  # the round has ended, and with it whatever the body has raised
    FIND_OUT = "find out"  # somebody's error, perhaps one's own: see who else has gone, and when
    RAISE = "raise"  # it is the caller's own business


def judge(error: BaseException | None, ending: Ending | None) -> Consequence:
    """What follows from the end of a body.

    Args:
        error: What it has raised, if anything.
        ending: Why the round has ended, if it has.
    """
    match error:
        case None:
            return Consequence.FINISHED if ending is None else Consequence.MEET_AGAIN
        case GiveUp():
            return Consequence.GIVEN_UP
        case RoundChanged() | MembersLostError() | RoundSupersededError():
            return Consequence.MEET_AGAIN
        case Exception():
            # After a loss, whatever fails has failed for that; after an agreement nobody has gone away from anybody.
            others_have_gone = ending is not None and ending.kind is not EndKind.AGREED
            return Consequence.MEET_AGAIN if others_have_gone else Consequence.FIND_OUT
        case _:
            return Consequence.RAISE


def finished_of(gate: StepGate, before: int | None) -> int | None:
    """The last step that a member has finished, as far as its `check` says; else what it had finished before."""
    return before if gate.begun is None else max(gate.begun - 1, -1)


@dataclass(slots=True)
class Use:
    """How often a round was entered: exactly once is right."""

    entered: bool = False

    def enter(self) -> None:
        """Note that it is."""
        if self.entered:
            raise RendezvousStateError("a round is entered once: the loop gives the next one")
        self.entered = True

    def check(self) -> None:
        """Complain of a loop that asks for the next round before it has entered this one."""
        if not self.entered:
            raise RendezvousStateError(
                "a round is to be entered: write `async with round:` or `with round:` in the loop"
            )
