"""The subcommand `rdzv run`. `launcher.job.Job` defines its flags, and `launcher.launch` carries it out."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from rdzv.cli.command import CLOSED, FAILED, NO_CONNECTION, OF_RUN, TIMED_OUT, WRONG_USAGE, Argument, command
from rdzv.cli.launcher import launch, slurm
from rdzv.cli.launcher.job import Job, NodeRemedy, run_cli_arguments
from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


THEN: Final = {
    OF_RUN + FAILED: NodeRemedy.REPLACE,
    OF_RUN + WRONG_USAGE: NodeRemedy.OVER,
    OF_RUN + CLOSED: NodeRemedy.OVER,
    OF_RUN + TIMED_OUT: NodeRemedy.RESTART,
    OF_RUN + NO_CONNECTION: NodeRemedy.RESTART,
}
"""The action that the caller of a failed launcher should take, by the launcher's exit status."""


@command(
    "run",
    "run a command under rendezvous, and again whenever the nodes change",
    Argument("url", metavar="URL", help="scheme://host[:port]/run_id?min_nodes=2, say; or slurm, under srun"),
    *run_cli_arguments(),
    usage="rdzv run [options] URL -- COMMAND ...",
    means_url=lambda word: "://" in word or slurm.is_slurm_url(word),
    takes_command=True,
    ends_with=lambda options, status: (options.exit_codes or {}).get(THEN[status], status),
)
async def _run_launcher(options: argparse.Namespace) -> int:
    if not options.words:
        raise RendezvousSettingsError("there is no command; write it at the end, after --")
    told = {each.name: getattr(options, each.name) for each in fields(Job) if each.metadata}
    told |= {"url": options.url, "command": options.words}
    nproc = options.nproc or 1
    if slurm.is_slurm_url(options.url):
        nproc = options.nproc or slurm.default_process_count(os.environ)
        told |= {
            "url": slurm.slurm_url(options.url, os.environ),
            "says_cost": os.environ.get("SLURM_PROCID", "0") == "0",  # one task prints the cost: srun merges all output
        }
    return await launch.run(Job(**{**told, "nproc": resolve_nproc(nproc)}))


def resolve_nproc(wanted: str | int) -> int:
    """Return the number of processes on this node for a value of `--nproc`; raise for `gpu` without a GPU."""
    if isinstance(wanted, int):
        return wanted
    gpus = count_gpus(os.environ) if wanted != "cpu" else 0
    if wanted == "gpu" and not gpus:
        raise RendezvousSettingsError("--nproc gpu: there is no GPU of NVIDIA's here; give a number, or auto or cpu")
    return gpus or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def count_gpus(environment: Mapping[str, str]) -> int:
    """Return how many NVIDIA GPUs a process that starts here may use; this needs no PyTorch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name.strip() for name in visible.split(",")]
        return next((at for at, name in enumerate(named) if name in ("", "-1")), len(named))
    return sum(name.removeprefix("nvidia").isdecimal() for name in os.listdir("/dev"))
