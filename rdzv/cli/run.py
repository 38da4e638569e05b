"""The subcommand `rdzv run`: its arguments. What it does is in `launcher.launch`."""

from __future__ import annotations

import argparse
import os
import signal

from rdzv.cli.command import argument, command, duration, whole_number
from rdzv.cli.launcher import launch, slurm
from rdzv.cli.launcher.job import CHECKPOINT_FILE, Job, OnChange
from rdzv.errors import RendezvousSettingsError

DRAINS_ON = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")


def _names(text: str) -> tuple[str, ...]:
    """Read names of modules, separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be names of modules, separated by commas: torch,numpy")
    return names


def _signal(text: str) -> signal.Signals:
    """Read the name of a signal, one that can be handled here."""
    name = text.upper().removeprefix("SIG")
    if name not in DRAINS_ON:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be one of {', '.join(DRAINS_ON)}")
    return signal.Signals[f"SIG{name}"]


@command(
    "run",
    "run a command under rendezvous, and again whenever the nodes change",
    argument("url", metavar="URL", help="scheme://host[:port]/run_id?min_nodes=2, say; or slurm, under srun"),
    # What is started here, and how.
    argument(
        "--nproc",
        type=whole_number(1),
        metavar="N",
        help="processes here (default: 1, and under Slurm one for each GPU of the node's)",
    ),
    argument(
        "--preload",
        type=_names,
        default=(),
        metavar="MODULES",
        help="torch,numpy, say: import these once, and fork the processes of a Python command from there, so that a "
        "restart does not import them again",
    ),
    argument(
        "--standby",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="with --preload: processes that are forked ahead (default: 0)",
    ),
    # What a process's end means for the run.
    argument(
        "--max-restarts", type=whole_number(0), default=0, metavar="N", help="of the run, after failures (default: 0)"
    ),
    argument(
        "--give-up-status",
        type=whole_number(1),
        default=93,
        metavar="N",
        help="a process that exits with it ends the run on every node, with this status (default: %(default)d)",
    ),
    argument(
        "--no-progress",
        type=whole_number(0),
        default=0,
        metavar="N",
        help=f"give the run up after so many rounds, one after the other, that ended by a failure or a loss before any "
        f"process had written the file {CHECKPOINT_FILE}, or told of a second step (default: 0, never)",
    ),
    argument(
        "--ban-after",
        metavar="N/TIME",
        help="3/1h, say: a node that fails so often within so long, by being lost or by its command, is banned for as "
        "long; as the parameter ban_after, the same on all nodes (default: off)",
    ),
    # How processes end that are well, since nodes come or this one leaves.
    argument(
        "--drain-on",
        type=_signal,
        metavar="SIGNAL",
        help="TERM, say: announce on it that this node leaves, and leave in good order; a second one ends it at once",
    ),
    argument(
        "--drain-in",
        type=duration,
        default=30.0,
        metavar="SECONDS",
        help="that this node then has, less than whoever sends the signal allows (default: %(default)g)",
    ),
    argument(
        "--on-change",
        choices=[choice.value for choice in OnChange],
        default=OnChange.TERM.value,
        help=f"when nodes wait to come in: end the processes at once (term); tell them by SIGUSR1, so that they end by "
        f"themselves (usr1); or wait until one has written the file {CHECKPOINT_FILE} (checkpoint); the last two for "
        f"as long as --grace (default: %(default)s)",
    ),
    argument(
        "--grace",
        type=duration,
        default=10.0,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL, and the longest wait for a checkpoint (default: %(default)g)",
    ),
    # What is seen of the processes, and who may look.
    argument(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="pass output through, without the rank before each line",
    ),
    argument(
        "--log-dir",
        metavar="DIR",
        help="also write what each process writes into DIR/RUN/round-N/rank-R.log",
    ),
    argument(
        "--no-stacks",
        dest="stacks",
        action="store_false",
        help="do not let Python processes of the command write their stacks when asked, by a folder in PYTHONPATH",
    ),
    argument(
        "--no-remote-stacks",
        dest="remote_stacks",
        action="store_false",
        help="refuse rdzv stacks: the stacks of the processes are for this node's log alone",
    ),
    argument(
        "--allow-chaos",
        action="store_true",
        help="let rdzv chaos kill this node, and stop its processes, to rehearse a failure",
    ),
    usage="rdzv run [options] URL -- COMMAND ...",
    means_url=lambda word: "://" in word or slurm.is_meant_by(word),
    takes_command=True,
)
async def _run(options: argparse.Namespace) -> int:
    if not options.words:
        raise RendezvousSettingsError("there is no command; write it at the end, after --")
    by_slurm = slurm.is_meant_by(options.url)
    given = {name: value for name, value in vars(options).items() if name in Job.__slots__}
    job = Job(
        **given
        | {
            "url": slurm.url_of(options.url, os.environ) if by_slurm else options.url,
            "command": options.words,
            "nproc": options.nproc or (slurm.processes_of(os.environ) if by_slurm else 1),
            "on_change": OnChange(options.on_change),
            "says_cost": not by_slurm or slurm.is_first_task(os.environ),  # srun writes all tasks' words to one place
        }
    )
    return await launch.run(job)
