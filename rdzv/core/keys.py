"""Pure: the names of a run's keys, all under `<prefix>/<run_id>/`; docs/architecture.md has the lease of each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

from store.messages import CHOSEN_LEASE_LEAST

__all__ = ["Keys"]


class _Name:
    """A property that returns a name which every run has, declared in one line of a table."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, keys: Keys, _: type[Keys]) -> str:
        return keys.root + self._name


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of a run's keys."""

    prefix: str
    run_id: str
    root: str = field(init=False, repr=False, compare=False)  # the prefix of all of them
    head: str = field(init=False, repr=False, compare=False)  # the prefix that every node watches

    # Keys.
    lease: ClassVar[_Name] = _Name("lease")  # its lease is the run's own lease
    settings: ClassVar[_Name] = _Name("settings")  # the settings on which all nodes must agree
    marker: ClassVar[_Name] = _Name("nodes//marker")  # a coordinator writes it to see when its watch is up to date
    # the coordinator's node; its create_revision is the *term*
    coordinator: ClassVar[_Name] = _Name("head/coordinator")
    round: ClassVar[_Name] = _Name("head/round")  # the last completed round
    closed: ClassVar[_Name] = _Name("head/closed")  # set if the run is closed, with the reason
    # the state of the next round, and the members gone from the last one
    progress: ClassVar[_Name] = _Name("head/progress")
    stop: ClassVar[_Name] = _Name("head/stop")  # the question and the decision at which step all leave
    resized: ClassVar[_Name] = _Name("head/resized")  # the run's new numbers of nodes
    lost_store: ClassVar[_Name] = _Name("head/lost_store")  # what nodes knew of the run in a store that was lost
    moving: ClassVar[_Name] = _Name("head/moving")  # the store's host leaves, and all move to the next one
    tally: ClassVar[_Name] = _Name("tally")  # shared counters of the nodes
    history: ClassVar[_Name] = _Name("history")  # events of the last rounds

    # Prefixes of keys: by node name, which has no slash ...
    nodes: ClassVar[_Name] = _Name("nodes/")  # a node and its current arrival
    accusations: ClassVar[_Name] = _Name("nodes//accused/")  # below the nodes, but not a node's name
    begun: ClassVar[_Name] = _Name("begun/")  # the step that a member has begun, when all are to stop
    drains: ClassVar[_Name] = _Name("head/draining/")  # a node must leave
    hosted: ClassVar[_Name] = _Name("head/hosted/")  # a node in the process that serves the store, if others may follow
    bans: ClassVar[_Name] = _Name("head/banned/")  # a node may not join; see `ban_names`
    unbans: ClassVar[_Name] = _Name("head/unbanned/")  # a ban of this name was lifted; kept until the history has it
    unfits: ClassVar[_Name] = _Name("unfit/")  # why a node that wanted to join failed its health check
    # ... and by other names.
    questions: ClassVar[_Name] = _Name("head/asked/")  # questions of an operator to nodes
    rounds: ClassVar[_Name] = _Name("rounds/")  # the members of a round
    # Apart from the rest, as users' keys are never listed:
    stores: ClassVar[_Name] = _Name("store/")  # the shared stores of all rounds

    def __post_init__(self) -> None:
        # Computed once: every name begins with them.
        object.__setattr__(self, "root", f"{self.prefix}/{self.run_id}/")
        object.__setattr__(self, "head", f"{self.root}head/")

    @property
    def ending(self) -> str:
        """Return the key that says, for all runs, that this store is shutting down: no node may arrive."""
        return f"{self.prefix}/ending"

    @property
    def host(self) -> str:
        """Return the key that names, to all runs, the node whose process serves this store."""
        return f"{self.prefix}/host"

    @property
    def lease_id(self) -> int:
        """Return the id of the run's own lease, so that nodes that come first at once grant the same one."""
        digest = hashlib.blake2b(self.root.encode(), digest_size=8).digest()
        return CHOSEN_LEASE_LEAST + int.from_bytes(digest) % CHOSEN_LEASE_LEAST

    def node(self, node_id: str) -> str:
        """Return one node's record."""
        return self.nodes + node_id

    def accusation(self, accused: str, by: str) -> str:
        """Return the key of one member's accusation of another."""
        return f"{self.accusations}{accused}/{by}"

    def banned(self, name: str) -> str:
        """Return the key of a ban of a node, or of all nodes with an attribute; see `ban_names`."""
        return self.bans + name

    def answers(self, question: str) -> str:
        """Return the prefix of all answers to a question, by node."""
        return f"{self.root}answers/{question}/"

    def kept(self, name: str) -> str:
        """Return the key of a small state that members keep across rounds."""
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
        """Return the key of a round's rank 0, for the case that not all members have reached it."""
        return f"{self.attempt(number, term)}reached"

    def shared(self, number: int, term: int) -> str:
        """Return the prefix of the shared store of a round."""
        return f"{self.stores}{number}/{term}/"
