"""The URL of a run from the environment of a Slurm step: `srun rdzv run slurm -- ...`, as in docs/command.md.

Up to `EXPECTED_MOST` nodes are `expected`, or none. Jobs may share a node, so the port depends on the job. The run_id
names job, step and requeues.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlencode

from rdzv import RendezvousSettingsError
from rdzv.config.endpoint import split_url
from rdzv.config.settings import PARAMETERS, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCHEME: Final = "slurm"
PORT_FIRST, PORTS = 20_000, 10_000  # for steps' stores: first port and number of ports, below the ephemeral ones
EXPECTED_MOST: Final = 1024  # node names that fit into a URL; for a larger step `expected` is left out
NODES_MOST: Final = 65_536  # node names per list


def is_slurm_url(word: str) -> bool:
    """Return True if this word, in place of a URL, is `slurm`, with or without parameters."""
    return word.partition("?")[0] == SCHEME


def slurm_url(word: str, environment: Mapping[str, str]) -> str:
    """Return the URL of a step's run; `word` is `slurm`, perhaps with parameters after a question mark.

    Raises:
        RendezvousSettingsError: No task of a Slurm step, several launchers on a node, or a store open to every client.
    """
    job = environment.get("SLURM_JOB_ID", "")
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if not job.isdecimal() or not names:
        raise RendezvousSettingsError(
            "slurm takes everything from the environment of a Slurm step, and SLURM_JOB_ID and SLURM_STEP_NODELIST are "
            "not set; start it by srun, or give a URL"
        )
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if re.fullmatch(r"1(\(x\d+\))?", tasks) is None:
        raise RendezvousSettingsError(
            f"SLURM_STEP_TASKS_PER_NODE is {tasks[:40]}; a node takes one launcher: srun --ntasks-per-node=1, and "
            f"--nproc says how many processes it starts"
        )
    nodes = list(expand_node_list(names))
    size = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_JOB_NUM_NODES") or str(len(nodes))
    parameters = {"min_nodes": size, "max_nodes": size}
    if len(nodes) <= EXPECTED_MOST:
        parameters["expected"] = ",".join(nodes)
    if node := environment.get("SLURMD_NODENAME"):
        parameters["node_id"] = node
    if switch := _nearest_switch(environment):
        parameters["attributes"] = f"switch:{switch}"
    given = dict(split_url(f"tcp://slurm?{word.partition('?')[2]}").parameters)
    parameters = {name: own for name, own in parameters.items() if given.keys().isdisjoint(PARAMETERS[name].aliases)}
    if "attributes" in given and switch and ",switch:" not in f",{given['attributes']}":
        given["attributes"] = f"{given['attributes']},switch:{switch}"
    endpoint = given.pop("store", "").rstrip("/")
    run_id = f"slurm-{job}.{environment.get('SLURM_STEP_ID', '0')}"
    if (restarts := environment.get("SLURM_RESTART_COUNT", "0")) != "0":
        run_id += f".{restarts}"
    query = urlencode({**parameters, **given}, quote_via=quote, safe=",:")
    if endpoint:
        return f"{endpoint}/{run_id}?{query}"
    encrypted = any(name in given or f"RDZV_{name.upper()}" in environment for name in ("ca", "cert"))
    url = f"{'tcps' if encrypted else 'tcp'}://{nodes[0]}:{PORT_FIRST + int(job) % PORTS}/{run_id}?{query}"
    if len(nodes) > 1:
        _refuse_open_store(url, environment)
    return url


def _refuse_open_store(url: str, environment: Mapping[str, str]) -> None:
    """Raise an error on every node, not only on the store's host, if the store would accept every client."""
    settings = parse(url, {}, environment)
    has_secret = settings.token is not None or settings.token_file is not None
    if not (has_secret or settings.insecure or (settings.cert and settings.ca)):
        raise RendezvousSettingsError(
            "the first node's store would accept every client: give all nodes one token, which srun passes on "
            '(export RDZV_TOKEN="$(rdzv token)" before srun), or token_file=, or cert= and key= and ca=; or say '
            "slurm?insecure=1 to leave it open"
        )


def default_process_count(environment: Mapping[str, str]) -> int:
    """Return the default number of processes per node: the number of GPUs that Slurm names, at least one."""
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return max(int(gpus), 1) if gpus.isdecimal() else 1


def _nearest_switch(environment: Mapping[str, str]) -> str:
    parts = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(parts) != len(kinds):
        return ""
    return next((part for part, kind in zip(reversed(parts), reversed(kinds), strict=True) if kind == "switch"), "")


_PIECE = re.compile(r"([^,\[]*)(?:\[([0-9,-]+)\])?([^,\[]*)(?:,|$)")


def expand_node_list(names: str) -> Iterator[str]:
    """Yield the nodes of a list of Slurm's: `gpu[001-003,7],login` is gpu001, gpu002, gpu003, gpu7 and login."""
    count = position = 0
    while position < len(names):
        piece = _PIECE.match(names, position)
        if piece is None or piece.end() == position:
            raise RendezvousSettingsError(
                f"{names[:80]!r} is no list of nodes as Slurm writes it: {names[position:][:20]!r}"
            )
        position = piece.end()
        for number in _expand_ranges(piece[2]) if piece[2] is not None else ("",):
            count += 1
            if count > NODES_MOST:
                raise RendezvousSettingsError(f"{names[:80]!r} names more than {NODES_MOST} nodes")
            yield f"{piece[1]}{number}{piece[3]}"


def _expand_ranges(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or int(last or first) < int(first):
            raise RendezvousSettingsError(f"{part[:20]!r} is no range of numbers in a list of Slurm's nodes")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
