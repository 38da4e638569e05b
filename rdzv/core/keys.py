"""The names of a run's keys; docs/architecture.md has the contents and the lease of each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

from store.messages import CHOSEN_LEASE_LEAST


class _Key:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, keys: Keys, _: type[Keys]) -> str:
        return keys.root + self._name


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of a run's keys."""

    prefix: str
    run_id: str
    has_successors: bool = field(default=False, repr=False, compare=False)  # True if the URL lists several hosts
    root: str = field(init=False, repr=False, compare=False)  # the prefix of all the run's keys

    lease: ClassVar[_Key] = _Key("lease")  # on the run's own lease: a reader of this key learns the lease's id
    settings: ClassVar[_Key] = _Key("settings")
    marker: ClassVar[_Key] = _Key("nodes//marker")  # written by a coordinator to see when its watch is up to date
    coordinator: ClassVar[_Key] = _Key("head/coordinator")  # coordinator's id; the key's create_revision is the *term*
    round: ClassVar[_Key] = _Key("head/round")
    closed: ClassVar[_Key] = _Key("head/closed")
    progress: ClassVar[_Key] = _Key("head/progress")
    stop: ClassVar[_Key] = _Key("head/stop")
    resized: ClassVar[_Key] = _Key("head/resized")
    lost_store: ClassVar[_Key] = _Key("head/lost_store")
    moving: ClassVar[_Key] = _Key("head/moving")
    tally: ClassVar[_Key] = _Key("tally")
    tally_copy: ClassVar[_Key] = _Key("head/tally")  # a copy that all nodes watch, and write to the next store
    history: ClassVar[_Key] = _Key("history")

    head: ClassVar[_Key] = _Key("head/")  # the prefix that every node watches
    # Prefixes of keys that end with a node's id; ids have no slash.
    nodes: ClassVar[_Key] = _Key("nodes/")
    accusations: ClassVar[_Key] = _Key("nodes//accused/")  # keys end with the ids of the accused and the accuser
    begun: ClassVar[_Key] = _Key("begun/")
    drains: ClassVar[_Key] = _Key("head/draining/")
    hosted: ClassVar[_Key] = _Key("head/hosted/")
    parents: ClassVar[_Key] = _Key("parent/")  # with `host=process`: nodes in the parent of the store's process
    bans: ClassVar[_Key] = _Key("head/banned/")  # see `ban_names_of`
    unbans: ClassVar[_Key] = _Key("head/unbanned/")
    unfits: ClassVar[_Key] = _Key("unfit/")
    # Prefixes of keys that end with other names.
    questions: ClassVar[_Key] = _Key("head/asked/")
    rounds: ClassVar[_Key] = _Key("rounds/")  # by round and term
    stores: ClassVar[_Key] = _Key("store/")  # see `shared`; not below `rounds/`, which coordinators list

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", f"{self.prefix}/{self.run_id}/")

    @property
    def ending(self) -> str:
        """The key that prevents joins while the store shuts down. With several hosts, runs of all prefixes share it."""
        return f"{'/rdzv' if self.has_successors else self.prefix}/ending"

    @property
    def host(self) -> str:
        """The key of the node whose process serves the store; one key for all runs of a prefix."""
        return f"{self.prefix}/host"

    @property
    def derived_lease_id(self) -> int:
        """The id of the run's own lease: a hash of `root`, so that concurrent first nodes grant the same lease."""
        digest = hashlib.blake2b(self.root.encode(), digest_size=8).digest()
        return CHOSEN_LEASE_LEAST + int.from_bytes(digest) % CHOSEN_LEASE_LEAST

    def node(self, node_id: str) -> str:
        """Return the key of a node's record."""
        return self.nodes + node_id

    def accusation(self, accused: str, by: str) -> str:
        """Return an accusation's key."""
        return f"{self.accusations}{accused}/{by}"

    def operator_answers(self, question: str) -> str:
        """Return the prefix of the answers to a question; the keys end with node ids."""
        return f"{self.root}answers/{question}/"

    def kept_item(self, name: str) -> str:
        """Return the key of data that members keep from round to round."""
        return f"{self.root}kept/{name}"

    def round_prefix(self, number: int, term: int) -> str:
        """Return the prefix below which the coordinator of a term writes a round's members, committed or not."""
        return f"{self.rounds}{number}/{term}/"

    def ranks(self, number: int, term: int, bucket: int | None = None) -> str:
        """Return the key of one bucket of ranks (see `rank_bucket_number`); without `bucket`, the prefix of all."""
        return f"{self.round_prefix(number, term)}ranks/{'' if bucket is None else bucket}"

    def roster(self, number: int, term: int, bucket: int | None = None) -> str:
        """Return the key of one bucket of `Participant`s, in order of rank; without `bucket`, the prefix of all."""
        return f"{self.round_prefix(number, term)}roster/{'' if bucket is None else bucket}"

    def rank0_report(self, number: int, term: int) -> str:
        """Return the key where rank 0 reports that not all members have reached rank 0."""
        return f"{self.round_prefix(number, term)}reached"

    def shared(self, number: int, term: int) -> str:
        """Return the prefix of a round's shared store, which holds users' keys."""
        return f"{self.stores}{number}/{term}/"
