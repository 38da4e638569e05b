"""The explored scenarios: three nodes, two rounds, and a fault of one of them at any point."""

from dataclasses import replace

from tests.sim.explorer.world import Scenario

__all__ = [
    "AGAIN",
    "AGAIN_AND_CUT",
    "AGAIN_AND_DEATH",
    "COMMIT_AND_CUT",
    "COMMIT_AND_DEATH",
    "DEATH",
    "EVERYTHING",
    "LOSS",
    "MEETING",
    "SCENARIOS",
    "TAKE_OVER",
    "WRITE_AND_CUT",
]

MEETING = Scenario(name="meeting", connected=True)
"""Three nodes join at the same time, in every order, and meet."""

AGAIN = Scenario(name="again", standing=True, again=True)
"""All are in a round. One joins again by itself, and all meet again."""

TAKE_OVER = Scenario(name="take-over", standing=True, faults=("crash",), victims=(0,))
"""All are in a round, and the coordinator dies. Another takes over, and the two meet again."""

DEATH = Scenario(name="death", standing=True, faults=("crash",))
"""All are in a round, one of them dies, perhaps the coordinator, and the others meet again."""

LOSS = Scenario(name="loss", standing=True, faults=("lose",))
"""All are in a round, and another store takes the store's place. Two meet there; the third learns of it at any time."""

AGAIN_AND_DEATH = Scenario(name="again-death", standing=True, again=True, faults=("crash",))
"""One joins again by itself, and any node dies at any point after that, for example during the commit."""

AGAIN_AND_CUT = Scenario(name="again-cut", standing=True, again=True, faults=("cut",))
"""One joins again by itself, and any node is cut off at any later point until it is dropped; its messages come late."""

COMMIT_AND_DEATH = Scenario(name="commit-death", standing=True, again=True, faults=("crash",), at="/head/round")
"""One joins again by itself, and any node dies while the commit of the next round is under way."""

COMMIT_AND_CUT = Scenario(name="commit-cut", standing=True, again=True, faults=("cut",), at="/head/round")
"""One joins again by itself, and any node is cut off while a commit is under way, which arrives after the takeover."""

WRITE_AND_CUT = Scenario(name="write-cut", standing=True, again=True, faults=("cut",), at="/store/")
"""One joins again by itself, and any node is cut off while it writes to the round's store."""

EVERYTHING = Scenario(name="everything", connected=False, again=True, faults=("crash", "cut"))
"""Three nodes join one by one, meet, and meet again. Any of them dies or is cut off at any point."""

WHOLE = (
    TAKE_OVER,
    AGAIN,
    MEETING,
    DEATH,
    LOSS,
    COMMIT_AND_DEATH,
    AGAIN_AND_DEATH,
    COMMIT_AND_CUT,
    WRITE_AND_CUT,
    AGAIN_AND_CUT,
    EVERYTHING,
)
JOINED = tuple(replace(one, name=f"{one.name}-joined", joined=True) for one in WHOLE[:-2])
"""The same but the longest, where each node reads in one turn all that the store has sent to it."""

SCENARIOS = {one.name: one for one in (*WHOLE, *JOINED)}
"""The scenarios by name."""
