"""What is explored: three nodes, two rounds, and what may befall one of them at any point."""

from __future__ import annotations

from tests.sim.explorer.world import Scenario

__all__ = [
    "AGAIN",
    "AGAIN_AND_CUT",
    "AGAIN_AND_DEATH",
    "COMMIT_AND_CUT",
    "COMMIT_AND_DEATH",
    "DEATH",
    "EVERYTHING",
    "MEETING",
    "SCENARIOS",
    "TAKE_OVER",
    "WRITE_AND_CUT",
]

MEETING = Scenario(name="meeting", connected=True)
"""Three nodes come at once, in every order, and meet."""

AGAIN = Scenario(name="again", standing=True, again=True)
"""They stand in a round, one goes on by itself, and all meet again."""

TAKE_OVER = Scenario(name="take-over", standing=True, faults=("crash",), victims=(0,))
"""They stand in a round, and the one that coordinates dies: another takes over, and the two meet again."""

DEATH = Scenario(name="death", standing=True, faults=("crash",))
"""They stand in a round, one dies, who may coordinate, and the others meet again."""

AGAIN_AND_DEATH = Scenario(name="again-death", standing=True, again=True, faults=("crash",))
"""One goes on by itself, and any of them dies, at any point of what follows: of the commit, say."""

AGAIN_AND_CUT = Scenario(name="again-cut", standing=True, again=True, faults=("cut",))
"""One goes on by itself, and any of them is cut off, at any point, until it is dropped; then what it sent comes."""

COMMIT_AND_DEATH = Scenario(name="commit-death", standing=True, again=True, faults=("crash",), at="/head/round")
"""One goes on by itself, and any of them dies while the commit of the next round is under way."""

COMMIT_AND_CUT = Scenario(name="commit-cut", standing=True, again=True, faults=("cut",), at="/head/round")
"""One goes on by itself, and any of them is cut off while a commit is under way, which comes after the take-over."""

WRITE_AND_CUT = Scenario(name="write-cut", standing=True, again=True, faults=("cut",), at="/store/")
"""One goes on by itself, and any of them is cut off while it writes to what the members share."""

EVERYTHING = Scenario(name="everything", connected=False, again=True, faults=("crash", "cut"))
"""Three nodes come one by one, meet, and meet again, and any of them dies or is cut off, at any point of all that."""

WHOLE = (
    TAKE_OVER,
    AGAIN,
    MEETING,
    DEATH,
    COMMIT_AND_DEATH,
    AGAIN_AND_DEATH,
    COMMIT_AND_CUT,
    WRITE_AND_CUT,
    AGAIN_AND_CUT,
    EVERYTHING,
)
SCENARIOS = {one.name: one for one in WHOLE}
"""Each by its name."""
