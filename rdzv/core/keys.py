"""Pure: the names of a run's keys.

`<prefix>/ending`, which belongs to no run, says that the node that hosts this store is done: no other comes to it.

What the nodes of a run share, under `<prefix>/<run_id>/`:

    lease                           which lease is the run's own
    settings                        what all its nodes must agree on
    nodes/<id>                      a node: who it is, and which arrival of it this is (on the node's lease)
    nodes//accused/<id>/<by>        that one member accuses another, and why (on the accuser's lease)
    nodes//marker                   what a coordinator writes to see its own watch come up to date
    begun/<id>                      which step a member has begun, when all are to stop (on the node's lease)
    head/coordinator                who decides now (on that node's leadership lease); its create_revision is the *term*
    head/round                      the last round that completed
    head/closed                     that, and why, the run is over
    head/progress                   how far the next round is, and who has gone from the last one
    head/stop                       at which step all members are to stop
    head/resized                    that the run has got other numbers of nodes
    head/draining/<id>              that a node is to leave (on the node's lease)
    head/banned/<id>                that a node may not join, and why
    head/banned/with/<name>=<value> that no node with this attribute may
    head/asked/<question>           what an operator asks of nodes
    answers/<question>/<id>         what a node has answered
    unfit/<id>                      why a node that wanted to join failed its health check
    failed/<id>/<n>                 that a node has failed in a round
    rounds/<n>/<term>/ranks/<i>     who has which rank, spread over buckets by the node's id
    rounds/<n>/<term>/roster/<i>    addresses and payloads, in order of rank
    rounds/<n>/<term>/reached       what became of it, if not all of its members reached its rank 0
    store/<n>/<term>/               what the members of the round share (on the round's lease)
    tally                           what the nodes count together (on the round's lease)
    kept/<name>                     what members keep from round to round
    history                         what happened in its last rounds
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from store.messages import CHOSEN_LEASE_LEAST

__all__ = ["Keys"]


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of a run's keys."""

    prefix: str
    run_id: str
    root: str = field(init=False, repr=False, compare=False)  # what all of them start with
    head: str = field(init=False, repr=False, compare=False)  # the prefix that every node watches

    def __post_init__(self) -> None:
        # Not made anew at each use: every name begins with them.
        object.__setattr__(self, "root", f"{self.prefix}/{self.run_id}/")
        object.__setattr__(self, "head", f"{self.root}head/")

    @property
    def ending(self) -> str:
        """That this store is about to end: nobody arrives at any run in it."""
        return f"{self.prefix}/ending"

    @property
    def lease(self) -> str:
        """The run's own lease: the one that this key is on."""
        return f"{self.root}lease"

    @property
    def lease_id(self) -> int:
        """The id of that lease: all who come first at once would grant the same one."""
        digest = hashlib.blake2b(self.root.encode(), digest_size=8).digest()
        return CHOSEN_LEASE_LEAST + int.from_bytes(digest) % CHOSEN_LEASE_LEAST

    @property
    def stores(self) -> str:
        """The prefix of what the members of all rounds share; apart, since nobody lists what users write."""
        return f"{self.root}store/"

    @property
    def settings(self) -> str:
        """What all nodes must agree on."""
        return f"{self.root}settings"

    @property
    def nodes(self) -> str:
        """The prefix of all nodes."""
        return f"{self.root}nodes/"

    @property
    def marker(self) -> str:
        """A key among the nodes that none can have: no node's id holds a slash."""
        return f"{self.nodes}/marker"

    @property
    def accusations(self) -> str:
        """The prefix of all accusations, among the nodes, and like none of them."""
        return f"{self.nodes}/accused/"

    def accusation(self, accused: str, by: str) -> str:
        """That one member accuses another."""
        return f"{self.accusations}{accused}/{by}"

    @property
    def coordinator(self) -> str:
        """Who decides now."""
        return f"{self.head}coordinator"

    @property
    def round(self) -> str:
        """The last round that completed."""
        return f"{self.head}round"

    @property
    def closed(self) -> str:
        """That the run is over."""
        return f"{self.head}closed"

    @property
    def progress(self) -> str:
        """How far the next round is."""
        return f"{self.head}progress"

    @property
    def stop(self) -> str:
        """Where the members of the round are asked, and told, at which step all leave."""
        return f"{self.head}stop"

    @property
    def resized(self) -> str:
        """That the run has got other numbers of nodes."""
        return f"{self.head}resized"

    @property
    def drains(self) -> str:
        """The prefix of all nodes that are to leave."""
        return f"{self.head}draining/"

    @property
    def bans(self) -> str:
        """The prefix of all bans."""
        return f"{self.head}banned/"

    @property
    def questions(self) -> str:
        """The prefix of all that operators ask."""
        return f"{self.head}asked/"

    def answers(self, question: str) -> str:
        """Return the prefix of all answers to a question."""
        return f"{self.root}answers/{question}/"

    @property
    def unfits(self) -> str:
        """The prefix of all failed health checks."""
        return f"{self.root}unfit/"

    @property
    def failures(self) -> str:
        """The prefix of all failures that count."""
        return f"{self.root}failed/"

    def failures_of(self, node_id: str) -> str:
        """Return the prefix of those of one node."""
        return f"{self.failures}{node_id}/"

    def failure(self, node_id: str, round: int) -> str:
        """Return the key that says that a node has failed in a round."""
        return f"{self.failures_of(node_id)}{round}"

    @property
    def rounds(self) -> str:
        """The prefix of all rounds."""
        return f"{self.root}rounds/"

    @property
    def history(self) -> str:
        """What happened in the last rounds."""
        return f"{self.root}history"

    def node(self, node_id: str) -> str:
        """Return one node's record."""
        return f"{self.nodes}{node_id}"

    @property
    def begun(self) -> str:
        """The prefix of the members' answers: which step each has begun."""
        return f"{self.root}begun/"

    def begun_by(self, node_id: str) -> str:
        """One member's answer."""
        return f"{self.begun}{node_id}"

    def draining(self, node_id: str) -> str:
        """That one node is to leave."""
        return f"{self.drains}{node_id}"

    def kept(self, name: str) -> str:
        """A little state that the members keep from round to round."""
        return f"{self.root}kept/{name}"

    @property
    def tally(self) -> str:
        """What the launchers of the run count together."""
        return f"{self.root}tally"

    def banned(self, name: str) -> str:
        """That one node may not join, or all that have an attribute; see `ban_names`."""
        return f"{self.bans}{name}"

    def unfit(self, node_id: str) -> str:
        """Return why one node failed its health check."""
        return f"{self.unfits}{node_id}"

    def attempt(self, number: int, term: int) -> str:
        """Return the prefix of one coordinator's attempt at one round."""
        return f"{self.rounds}{number}/{term}/"

    def ranks(self, number: int, term: int, bucket: int | None = None) -> str:
        """Return one bucket of ranks, or the prefix of all."""
        return f"{self.attempt(number, term)}ranks/{'' if bucket is None else bucket}"

    def roster(self, number: int, term: int, bucket: int | None = None) -> str:
        """Return one bucket of the roster, or the prefix of all."""
        return f"{self.attempt(number, term)}roster/{'' if bucket is None else bucket}"

    def reached(self, number: int, term: int) -> str:
        """Return what a round's rank 0 says, if not all members have reached it."""
        return f"{self.attempt(number, term)}reached"

    def shared(self, number: int, term: int) -> str:
        """Return the prefix of what a round's members share."""
        return f"{self.stores}{number}/{term}/"
