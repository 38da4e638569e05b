"""What `rdzv run` runs, where each process stands among all processes of the round, and what it is told. Pure.

**Ranks.** A node says how many processes it runs in an attribute, `nproc`, beside the user's own attributes, and leaves
the payload alone. The members are read once a round, in order of rank; a node's first process comes after all processes
of the nodes before it. A member without the attribute, which uses the library rather than this launcher, counts as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from rdzv.core.round import Participant
    from rdzv.membership import RendezvousInfo

__all__ = ["CHECKPOINT_FILE", "NPROC", "Job", "OnChange", "Place", "environment_of", "place_of"]

NPROC: Final = "nproc"  # the attribute

CHECKPOINT_FILE: Final = "RDZV_CHECKPOINT_FILE"
"""The environment variable with the name of the file that a job writes to say that it is at a checkpoint."""


class OnChange(Enum):
    """What becomes of the processes when nodes wait to come in."""

    TERM = "term"  # they are asked to end by SIGTERM
    USR1 = "usr1"  # they are told by SIGUSR1, and end, or say that they are at a checkpoint, when they are ready
    CHECKPOINT = "checkpoint"  # they are told nothing, and asked to end once they say that they are at a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run, and how.

    Attributes:
        url: Of the run to join.
        command: A program and its arguments.
        nproc: How many processes of it on this node.
        max_restarts: How often the run starts again after a process has failed; PyTorch's default, too, is never.
        give_up_status: The exit status by which a process says that the run is not to go on anywhere.
        on_change: What becomes of the processes when nodes wait to come in.
        grace: Seconds from SIGTERM to SIGKILL, and for which newcomers wait for a checkpoint.
        prefix: Whether each line of output gets the rank in front.
        preload: Modules that a process of this node imports once, to fork the command's processes from.
        standby: How many of these are forked ahead.
        drain_on: The signal on which this node leaves in good order; None: none does.
        drain_in: Seconds that it then has.
        ban_after: How many failures of a node, within how long, get it banned for as long; None: as the URL says.
        no_progress: After how many rounds without a checkpoint or a step the run is given up; 0: never.
        log_dir: A folder for a file of each process's output, beside what is passed on; None for no files.
        stacks: Whether the processes can be asked for their Python stacks.
        remote_stacks: Whether operators may see these over the store.
        allow_chaos: Whether this node may be killed, and its processes stopped, by `rdzv chaos`.
        says_cost: Whether this launcher writes the closing line, of those whose output goes to one place.
    """

    url: str
    command: tuple[str, ...]
    nproc: int = 1
    max_restarts: int = 0
    give_up_status: int = 93
    on_change: OnChange = OnChange.TERM
    grace: float = 10.0
    prefix: bool = True
    preload: tuple[str, ...] = ()
    standby: int = 0
    drain_on: signal.Signals | None = None
    drain_in: float = 30.0
    ban_after: str | None = None
    no_progress: int = 0
    stacks: bool = True
    log_dir: str | None = None
    remote_stacks: bool = True
    allow_chaos: bool = False
    says_cost: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this node's processes are among all those of the round."""

    first_rank: int
    world_size: int


def place_of(rank: int, participants: Sequence[Participant], nproc: int) -> Place:
    """Return the ranks of a node's processes, from the members in order of rank.

    Raises:
        RendezvousStateError: A member says of itself that it runs no such number of processes.
    """
    counts = [_count_of(participant) for participant in participants]
    assert counts[rank] == nproc, "a node reads of itself what it has written"
    return Place(first_rank=sum(counts[:rank]), world_size=sum(counts))


def _count_of(participant: Participant) -> int:
    text = participant.attributes.get(NPROC, "1")
    if not text.isdecimal() or int(text) < 1:
        raise RendezvousStateError(
            f"node {participant.node_id} has the attribute {NPROC}:{text}, which must be a number of processes; "
            f"rename that attribute"
        )
    return int(text)


def environment_of(
    job: Job, info: RendezvousInfo, place: Place, *, local_rank: int, restarts: int, checkpoint_file: str
) -> dict[str, str]:
    """Return what a process is told. None of the names is a parameter's, which `rdzv.connect` would read there."""
    host, port = info.bootstrap_address
    return {
        "RANK": str(place.first_rank + local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "GROUP_RANK": str(info.rank),
        "GROUP_WORLD_SIZE": str(info.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # What torchrun tells its workers beyond these, for scripts and libraries that ask for it. The agent's store is
        # not used, so that env:// has rank 0 make one.
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.first_rank + local_rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "TORCHELASTIC_RUN_ID": info.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "RDZV_RUN_ID": info.run_id,
        "RDZV_ROUND": str(info.round),
        "RDZV_URL": job.url,
        "RDZV_RESTARTS": str(restarts),
        CHECKPOINT_FILE: checkpoint_file,
    }
