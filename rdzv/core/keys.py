"""Pure: the names of a run's keys, all under `<prefix>/<run_id>/`; docs/architecture.md says on which lease each is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

from store.messages import CHOSEN_LEASE_LEAST

__all__ = ["Keys"]


class _Name:
    """One name that every run has: a property that reads as a line of a table."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, keys: Keys, _: type[Keys]) -> str:
        return keys.root + self._name


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of a run's keys.

    Attributes:
        root: What all of them start with.
        head: The prefix that every node watches.
    """

    prefix: str
    run_id: str
    root: str = field(init=False, repr=False, compare=False)
    head: str = field(init=False, repr=False, compare=False)

    # Keys.
    lease: ClassVar[_Name] = _Name("lease")  # which lease is the run's own: the one that this key is on
    settings: ClassVar[_Name] = _Name("settings")  # what all its nodes must agree on
    marker: ClassVar[_Name] = _Name("nodes//marker")  # what a coordinator writes to see its own watch come up to date
    coordinator: ClassVar[_Name] = _Name("head/coordinator")  # who decides now; its create_revision is the *term*
    round: ClassVar[_Name] = _Name("head/round")  # the last round that completed
    closed: ClassVar[_Name] = _Name("head/closed")  # that, and why, the run is over
    progress: ClassVar[_Name] = _Name("head/progress")  # how far the next round is, and who has gone from the last one
    stop: ClassVar[_Name] = _Name("head/stop")  # where the members are asked, and told, at which step all leave
    resized: ClassVar[_Name] = _Name("head/resized")  # that the run has got other numbers of nodes
    tally: ClassVar[_Name] = _Name("tally")  # what the nodes count together
    history: ClassVar[_Name] = _Name("history")  # what happened in its last rounds

    # Prefixes of keys: of nodes by their names, which hold no slash ...
    nodes: ClassVar[_Name] = _Name("nodes/")  # who a node is, and which arrival of it this is
    accusations: ClassVar[_Name] = _Name("nodes//accused/")  # among the nodes, and like none of them
    begun: ClassVar[_Name] = _Name("begun/")  # which step a member has begun, when all are to stop
    drains: ClassVar[_Name] = _Name("head/draining/")  # that a node is to leave
    bans: ClassVar[_Name] = _Name("head/banned/")  # that a node may not join; see `ban_names`
    unbans: ClassVar[_Name] = _Name("head/unbanned/")  # that a ban of this name was lifted, until the history says so
    unfits: ClassVar[_Name] = _Name("unfit/")  # why a node that wanted to join failed its health check
    # ... and of others.
    questions: ClassVar[_Name] = _Name("head/asked/")  # what an operator asks of nodes
    rounds: ClassVar[_Name] = _Name("rounds/")  # who is in a round
    # Apart from the rest, since nobody lists what users write:
    stores: ClassVar[_Name] = _Name("store/")  # what the members of all rounds share

    def __post_init__(self) -> None:
        # Not made anew at each use: every name begins with them.
        object.__setattr__(self, "root", f"{self.prefix}/{self.run_id}/")
        object.__setattr__(self, "head", f"{self.root}head/")

    @property
    def ending(self) -> str:
        """That the host of this store is done, which belongs to no run: nobody arrives at any run in it."""
        return f"{self.prefix}/ending"

    @property
    def lease_id(self) -> int:
        """The id of the run's own lease: all who come first at once would grant the same one."""
        digest = hashlib.blake2b(self.root.encode(), digest_size=8).digest()
        return CHOSEN_LEASE_LEAST + int.from_bytes(digest) % CHOSEN_LEASE_LEAST

    def node(self, node_id: str) -> str:
        """Return one node's record."""
        return self.nodes + node_id

    def accusation(self, accused: str, by: str) -> str:
        """That one member accuses another, and why."""
        return f"{self.accusations}{accused}/{by}"

    def banned(self, name: str) -> str:
        """That one node may not join, or all that have an attribute; see `ban_names`."""
        return self.bans + name

    def answers(self, question: str) -> str:
        """Return the prefix of all answers to a question, by node."""
        return f"{self.root}answers/{question}/"

    def kept(self, name: str) -> str:
        """A little state that the members keep from round to round."""
        return f"{self.root}kept/{name}"

    def attempt(self, number: int, term: int) -> str:
        """Return the prefix of one coordinator's attempt at one round."""
        return f"{self.rounds}{number}/{term}/"

    def ranks(self, number: int, term: int, bucket: int | None = None) -> str:
        """Return one bucket of ranks, spread by the nodes' ids, or the prefix of all."""
        return f"{self.attempt(number, term)}ranks/{'' if bucket is None else bucket}"

    def roster(self, number: int, term: int, bucket: int | None = None) -> str:
        """Return one bucket of addresses and payloads, in order of rank, or the prefix of all."""
        return f"{self.attempt(number, term)}roster/{'' if bucket is None else bucket}"

    def reached(self, number: int, term: int) -> str:
        """Return what a round's rank 0 says, if not all members have reached it."""
        return f"{self.attempt(number, term)}reached"

    def shared(self, number: int, term: int) -> str:
        """Return the prefix of what a round's members share."""
        return f"{self.stores}{number}/{term}/"
