"""The options of `rdzv run`, the ranks of its processes, and their environment.

A node announces its number of processes in the attribute `nproc` (without it, one). Ranks are in the order of nodes.
"""

from __future__ import annotations

import argparse
import signal
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rdzv import RendezvousStateError
from rdzv.cli.command import Argument, duration, flag, integer_type, option
from rdzv.config.value_types import plain_number
from rdzv.loop import STATUS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rdzv import Participant, RendezvousInfo

NPROC: Final = "nproc"

# Paths in the environment: the command writes the first file at a checkpoint, `@record` the second at an error.
CHECKPOINT_FILE: Final = "RDZV_CHECKPOINT_FILE"
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
SIGNALLED: Final = 128  # a process ended by signal N counts as exit status 128 + N
COUNTED: Final = ("auto", "cpu", "gpu")  # values of `--nproc` besides numbers, as in torchrun
DRAINS_ON: Final = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")


class OnChangeMode(Enum):
    """Ways to end the processes when nodes wait to join: SIGTERM now, SIGUSR1, or SIGTERM after a checkpoint."""

    TERM = "term"
    USR1 = "usr1"
    CHECKPOINT = "checkpoint"


class NodeRemedy(Enum):
    """Actions for the caller of a failed launcher: start this node again, replace it, or none (the run is over)."""

    RESTART = "restart"
    REPLACE = "replace"
    OVER = "over"


def _parse_modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be names of modules, separated by commas: torch,numpy")
    return names


def _parse_drain_signal(text: str) -> signal.Signals:
    name = text.upper().removeprefix("SIG")
    if name not in DRAINS_ON:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be one of {', '.join(DRAINS_ON)}")
    return signal.Signals[f"SIG{name}"]


def _parse_on_change(text: str) -> OnChangeMode:
    if text not in (names := [each.value for each in OnChangeMode]):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be one of {', '.join(names)}")
    return OnChangeMode(text)


def _parse_exit_codes(text: str) -> dict[NodeRemedy, int]:
    try:
        parts = [each.partition("=") for each in text.split(",")]
        codes = {NodeRemedy(name): plain_number(status, int) for name, _, status in parts}
    except ValueError:
        codes = {}
    if not codes or not all(0 < status < SIGNALLED for status in codes.values()):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} must be statuses from 1 to {SIGNALLED - 1}, by name: restart=80,replace=81,over=82"
        )
    return codes


def _option(named: str, kind: Callable[[str], Any] | None, help: str, default: Any = None, without: Any = None) -> Any:
    """Return a field of `Job` for an option. `without` replaces `default` in a `Job` that Python code makes."""
    by = option(named, kind, help, default=default)
    return field(default=default if without is None else without, metadata={"by": by})


def _flag(name: str, help: str, *, default: bool) -> Any:
    return field(default=default, metadata={"by": flag(name, help, action=f"store_{str(not default).lower()}")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The options and command of `rdzv run`; with `says_cost`, the launcher prints a closed run's cost."""

    url: str
    command: tuple[str, ...]
    says_cost: bool = True
    nproc: int = _option(
        "--nproc N|auto|cpu|gpu",
        lambda text: text if text in COUNTED else integer_type(1)(text),
        "processes here: so many, or one for each core or GPU (auto: GPU, if there is one, else core); by default 1, "
        "under Slurm one for each GPU of the node's",
        without=1,
    )
    preload: tuple[str, ...] = _option(
        "--preload MODULES",
        _parse_modules,
        "torch,numpy, say: import these once, and fork the processes of a Python command from there, so that a restart "
        "does not import them again",
        (),
    )
    standby: int = _option("--standby N", integer_type(0), "with --preload: processes that are forked ahead", 0)
    agent_store: bool = _flag(
        "--agent-store", "rank 0's launcher serves PyTorch's TCPStore at MASTER_PORT, as under torchrun", default=False
    )
    max_restarts: int = _option("--max-restarts N", integer_type(0), "of the run, after failures", 0)  # as in PyTorch
    give_up_status: int = _option(
        "--give-up-status N",
        integer_type(1, STATUS_MAX),
        "a process that exits with it ends the run on every node, with this status",
        93,
    )
    no_progress: int = _option(
        "--no-progress N",
        integer_type(0),
        f"give the run up after so many rounds, one after the other, that ended by a failure or a loss before any "
        f"process had written the file {CHECKPOINT_FILE}, or told of a second step; 0: never",
        0,
    )
    exit_codes: Mapping[NodeRemedy, int] | None = _option(
        "--exit-codes restart=N,replace=N,over=N",
        _parse_exit_codes,
        "end with these statuses instead, by what is to be done with this node: start it again here (the store is out "
        "of reach, or no round came about), replace it (it leaves, is not taken in, or has failed once too often), or "
        "nothing (the run is over, though not well)",
    )
    drain_on: signal.Signals | None = _option(  # noqa: RUF009  `_option` makes a field
        "--drain-on SIGNAL",
        _parse_drain_signal,
        "TERM, say: announce on it that this node leaves, and leave in good order; a second one ends it at once",
    )
    drain_in: float = _option(
        "--drain-in SECONDS", duration, "that this node then has, less than whoever sends the signal allows", 30.0
    )
    on_change: OnChangeMode = _option(  # noqa: RUF009  `_option` makes a field
        "--on-change term|usr1|checkpoint",
        _parse_on_change,
        f"when nodes wait to join: end the processes at once (term); tell them by SIGUSR1, so that they end by "
        f"themselves (usr1); or wait until one has written the file {CHECKPOINT_FILE} (checkpoint); the last two for "
        f"as long as --grace",
        "term",
        without=OnChangeMode.TERM,
    )
    grace: float = _option(
        "--grace SECONDS", duration, "from SIGTERM to SIGKILL, and the longest wait for a checkpoint", 10.0
    )
    prefix: bool = _flag("--no-prefix", "pass output through, without the rank before each line", default=True)
    log_dir: str | None = _option(
        "--log-dir DIR", None, "also write what each process writes into DIR/RUN/round-N/rank-R.log"
    )
    stacks: bool = _flag(
        "--no-stacks",
        "do not let Python processes of the command write their stacks when asked, by a folder in PYTHONPATH",
        default=True,
    )
    remote_stacks: bool = _flag(
        "--no-remote-stacks",
        "refuse rdzv stacks: the stacks of the processes are for this node's log alone",
        default=True,
    )
    allow_chaos: bool = _flag("--allow-chaos", "let rdzv chaos kill this node, to rehearse a failure", default=False)

    def exit_status_for(self, then: NodeRemedy, otherwise: int) -> int:
        """Return the exit status that `--exit-codes` names for an action, else `otherwise`."""
        return (self.exit_codes or {}).get(then, otherwise)

    @property
    def forwards_output(self) -> bool:
        """True if the launcher passes on the processes' output."""
        return self.prefix or self.log_dir is not None


def run_cli_arguments() -> Iterator[Argument]:
    """Yield the arguments of `rdzv run` that are fields of `Job`."""
    for each in fields(Job):
        if each.metadata:
            by: Argument = each.metadata["by"]
            yield Argument(*by.names, **by.settings, dest=each.name)


class NodeRanks(NamedTuple):
    """The ranks of this node's processes."""

    first_rank: int
    world_size: int


def process_ranks(rank: int, participants: Sequence[Participant], nproc: int) -> NodeRanks:
    """Return the ranks of the processes of the node with this rank; `participants` are in the order of ranks."""
    counts = [_node_process_count(participant) for participant in participants]
    assert counts[rank] == nproc, "a node reads of itself what it has written"
    return NodeRanks(first_rank=sum(counts[:rank]), world_size=sum(counts))


def _node_process_count(participant: Participant) -> int:
    text = participant.attributes.get(NPROC, "1")
    if not text.isdecimal() or int(text) < 1:
        raise RendezvousStateError(
            f"node {participant.node_id} has the attribute {NPROC}:{text}, which must be a number of processes; "
            f"rename that attribute"
        )
    return int(text)


def environment_of(job: Job, info: RendezvousInfo, own: NodeRanks, *, local_rank: int, restarts: int) -> dict[str, str]:
    """Return a process's environment variables, except paths; `rdzv.connect` reads none of them as parameters."""
    host, port = info.bootstrap_address
    return {
        "RANK": str(own.first_rank + local_rank),
        "WORLD_SIZE": str(own.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "GROUP_RANK": str(info.rank),
        "GROUP_WORLD_SIZE": str(info.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # torchrun also sets ROLE_* and TORCHELASTIC_*.
        "ROLE_NAME": "default",
        "ROLE_RANK": str(own.first_rank + local_rank),
        "ROLE_WORLD_SIZE": str(own.world_size),
        "TORCHELASTIC_RUN_ID": info.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(job.agent_store),  # if False, rank 0 serves the TCPStore of env://
        "RDZV_RUN_ID": info.run_id,
        "RDZV_ROUND": str(info.round),
        "RDZV_URL": job.url,
        "RDZV_RESTARTS": str(restarts),
    }
