"""`rdzv run slurm`: the URL that follows from Slurm's environment variables, and two launchers that meet by it."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import parse_qs, urlsplit

import pytest

from rdzv.cli import main as command
from rdzv.cli.launcher.slurm import default_process_count, expand_node_list, slurm_url
from rdzv.config.settings import parse
from rdzv.errors import RendezvousSettingsError
from tests.support.processes import free_port, start_python

LIMIT = 60.0
STEP = {  # as Slurm 22.05 sets it, but for names and numbers
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[001-003,017]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURMD_NODENAME": "gpu002",
    "SLURM_TOPOLOGY_ADDR": "core.leaf7.gpu002",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    "SLURM_GPUS_ON_NODE": "8",
    "RDZV_TOKEN": "correct horse battery staple",
}


def test_every_task_of_a_step_makes_the_same_url() -> None:
    url = slurm_url("slurm", STEP)
    parts, settings = urlsplit(url), parse(url, {}, {})
    assert (parts.hostname, parts.port, parts.path) == ("gpu001", 23456, "/slurm-123456.0")
    assert (settings.min_nodes, settings.max_nodes, settings.node_id) == (4, 4, "gpu002")
    assert settings.expected == ("gpu001", "gpu002", "gpu003", "gpu017")
    assert dict(settings.attributes) == {"switch": "leaf7"}
    other = slurm_url("slurm", {**STEP, "SLURMD_NODENAME": "gpu017"})
    assert other.replace("gpu017", "").replace("gpu002", "") == url.replace("gpu017", "").replace("gpu002", "")


@pytest.mark.parametrize(("restarts", "run_id"), [("", "7.0"), ("0", "7.0"), ("1", "7.0.1"), ("12", "7.0.12")])
@pytest.mark.parametrize("word", ["slurm", "slurm?store=tcp://store:29400"])
def test_a_job_that_was_requeued_has_a_run_of_its_own(word: str, restarts: str, run_id: str) -> None:
    """A requeued job keeps its number. The run of its first start is closed for a day in a store that outlives it."""
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", **({"SLURM_RESTART_COUNT": restarts} if restarts else {})}
    assert urlsplit(slurm_url(word, step)).path == f"/slurm-{run_id}"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("min_workers=2", {"min_nodes": 2, "max_nodes": 4}),
        ("attributes=rack:r1", {"attributes": {"rack": "r1", "switch": "leaf7"}}),
        ("attributes=switch:mine&token_file=/to+ken", {"attributes": {"switch": "mine"}, "token_file": "/to+ken"}),
    ],
)
def test_given_parameters_take_precedence_and_attributes_are_joined(query: str, expected: dict[str, object]) -> None:
    settings = parse(slurm_url(f"slurm?insecure=1&{query}", STEP), {}, {})
    assert {name: getattr(settings, name) for name in expected} == expected
    with pytest.raises(RendezvousSettingsError, match="is in the URL twice"):
        slurm_url(f"slurm?{query}&{query}", STEP)


def test_an_allocation_without_topology_or_gpus_will_do() -> None:
    least = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}
    assert slurm_url("slurm", least) == "tcp://a:20007/slurm-7.0?min_nodes=1&max_nodes=1&expected=a"
    assert (default_process_count(STEP), default_process_count(least)) == (8, 1)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[009-011,7]x,login", ["gpu009x", "gpu010x", "gpu011x", "gpu7x", "login"]),
    ],
)
def test_lists_of_nodes_are_expanded_as_slurm_writes_them(names: str, expected: list[str]) -> None:
    assert list(expand_node_list(names)) == expected


@pytest.mark.parametrize("names", ["n[3-1]", "gpu[1-", "gpu[1-2", "gpu[-1]", "gpu[1-99999999]"])
def test_an_invalid_list_of_nodes_is_refused(names: str) -> None:
    with pytest.raises(RendezvousSettingsError, match="nodes"):
        list(expand_node_list(names))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "start it by srun"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "start it by srun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "srun --ntasks-per-node=1"),
    ],
)
def test_a_task_that_is_not_the_only_one_of_its_node_gets_an_error_with_the_remedy(
    change: dict[str, str], message: str
) -> None:
    with pytest.raises(RendezvousSettingsError, match=re.escape(message)):
        slurm_url("slurm", {**STEP, **change})


def test_slurm_takes_precedence_over_a_url_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_URL", "tcp://other/job")
    options = command._parse(["run", "slurm?min_nodes=2", "--", "true"])
    assert options is not None
    assert options.url == "slurm?min_nodes=2"


@pytest.mark.parametrize(
    ("word", "environment"),
    [
        ("slurm?insecure=1", {}),
        ("slurm?token_file=token", {}),
        ("slurm", {"RDZV_TOKEN": "correct horse battery staple"}),
        ("slurm?cert=c&key=k&ca=a", {}),
    ],
)
def test_a_store_of_several_nodes_needs_a_token_tls_or_insecure(word: str, environment: dict[str, str]) -> None:
    """Every node gets the error. When only the first node got it, the others waited 10 minutes for its store."""
    bare = {name: value for name, value in STEP.items() if name != "RDZV_TOKEN"}
    for node in ("gpu001", "gpu003"):
        with pytest.raises(RendezvousSettingsError, match=re.escape('export RDZV_TOKEN="$(rdzv token)"')):
            slurm_url("slurm", {**bare, "SLURMD_NODENAME": node})
    assert urlsplit(slurm_url(word, bare | environment)).hostname == "gpu001"


def test_a_given_store_replaces_that_of_the_first_node() -> None:
    url = slurm_url("slurm?store=etcd://a:2379,b:2379/&min_nodes=2", {**STEP, "RDZV_TOKEN": ""})
    parts, given = urlsplit(url), parse_qs(urlsplit(url).query)
    assert (parts.scheme, parts.netloc, parts.path) == ("etcd", "a:2379,b:2379", "/slurm-123456.0")
    assert (given["min_nodes"], given["node_id"]) == (["2"], ["gpu002"])
    assert "store" not in given


async def test_two_tasks_of_a_step_meet_by_their_environment_alone() -> None:
    """Both tasks run on this machine, with fake Slurm variables. The first task writes the cost of the run."""
    step = {**STEP, "SLURM_JOB_ID": str(free_port() % 10_000), "SLURM_STEP_NODELIST": "localhost"}
    step |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    prints = ("--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE in $RDZV_RUN_ID")
    async with asyncio.timeout(2 * LIMIT):
        async with (
            start_python(
                "-m", "rdzv", "run", "slurm", *prints, env={**step, "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1"}
            ) as first,
            start_python(
                "-m", "rdzv", "run", "slurm", *prints, env={**step, "SLURM_PROCID": "1", "SLURMD_NODENAME": "n2"}
            ) as second,
        ):
            assert [await child.wait(timeout=LIMIT) for child in (first, second)] == [0, 0]
    lines = sorted(line.partition("] ")[2] for child in (first, second) for line in child.stdout)
    run_id = f"slurm-{step['SLURM_JOB_ID']}.0"
    told = [sum("training" in line for line in child.output) for child in (first, second)]
    assert told == [1, 0], "srun writes what all tasks say to one place"
    assert lines == [f"rank 0 of 2 in {run_id}", f"rank 1 of 2 in {run_id}"]
