"""The files for Slurm and Kubernetes: valid by their validators, and with commands that rdzv accepts."""

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rdzv.cli import main as command
from rdzv.cli.launcher.job import NodeRemedy
from rdzv.config.settings import parse
from tests.support.processes import ROOT, require

KUBERNETES, SLURM = ROOT / "examples" / "kubernetes", ROOT / "examples" / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
VERSIONS = {"store.yaml": ("1.31", "1.37"), "job.yaml": ("1.31", "1.37"), "scale.yaml": ("1.31", "1.37")}
KINDS = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}
KINDS |= {"ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime"}
NEWEST = "1.37"


def required(module: str) -> Any:
    require(module)
    return importlib.import_module(module)


def documents(name: str) -> list[dict[str, Any]]:
    text = (KUBERNETES / name).read_text(encoding="utf-8")
    return list(required("yaml").safe_load_all(text))


def find(document: Any, name: str) -> list[Any]:
    """Return all values of this name in a document, at any depth."""
    if isinstance(document, list):
        return [one for each in document for one in find(each, name)]
    if not isinstance(document, dict):
        return []
    return [*([document[name]] if name in document else []), *find(list(document.values()), name)]


@pytest.mark.parametrize("name", VERSIONS)
def test_manifests_conform_to_the_schemas_of_kubernetes(name: str) -> None:
    validator = required("kubernetes_validate")
    for document in documents(name):
        for version in VERSIONS[name]:
            validator.validate(document, version, strict=True)


def as_it_is_read(document: dict[str, Any]) -> Any:
    """Parse a document with the types of JobSet or Trainer, which drop unknown fields."""
    kind = getattr(required("kubeflow_trainer_api.models"), KINDS[document["kind"]])
    return kind.from_dict(document).to_dict()


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_manifests_conform_to_jobset_and_trainer(name: str) -> None:
    validator = required("kubernetes_validate")
    for document in documents(name):
        assert as_it_is_read(document) == document
        for job in find(document, "replicatedJobs"):
            whole = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "a"},
                "spec": job[0]["template"]["spec"],
            }
            validator.validate(whole, NEWEST, strict=True)


def test_the_validators_would_find_a_field_that_does_not_exist() -> None:
    validator = required("kubernetes_validate")
    wrong = documents("store.yaml")[1]
    wrong["spec"]["replica"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, NEWEST, strict=True)
    (jobset,) = documents("jobset.yaml")
    jobset["spec"]["failurePolicy"]["maxRestart"] = 1
    assert as_it_is_read(jobset) != jobset


@pytest.mark.parametrize("name", ["store.yaml", "job.yaml", "jobset.yaml", "trainjob.yaml"])
def test_container_commands_are_valid_and_the_rules_have_their_exit_codes(name: str) -> None:
    (words,) = find(documents(name), "command")
    assert words[0] == "rdzv"
    options = command._parse([str(word) for word in words[1:]])
    assert options is not None
    if options.command == "run":
        assert parse(options.url.replace("$(JOB)", "job"), {}, {}).max_nodes in (4, 16)
        codes = options.exit_codes
        ends = [
            rule["onExitCodes"]["values"]
            for rules in find(documents(name), "rules")
            for rule in rules
            if "onExitCodes" in rule
        ]
        assert ends == [[codes[NodeRemedy.OVER]]]
        for rules in find(documents(name), "restartPolicyRules"):
            assert rules[0]["exitCodes"]["values"] == [codes[NodeRemedy.RESTART], 128 + signal.SIGKILL]


def test_nodes_have_names_before_they_are_ready_and_the_secret_exists() -> None:
    service, job = documents("job.yaml")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    for workload in (job, documents("store.yaml")[1]):
        (secret,) = (each["secret"] for each in workload["spec"]["template"]["spec"]["volumes"] if "secret" in each)
        assert secret["secretName"] == "rdzv"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_batch_scripts_and_their_commands_are_valid(script: Any) -> None:
    text = script.read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", str(script)], check=False).returncode == 0
    (line,) = re.findall(r"^ *srun .*?(rdzv run .*?)$", text.replace("\\\n", " "), re.MULTILINE)
    words = shlex.split(line.replace("$SLURM_JOB_ID", "7").replace("$SLURM_JOB_NUM_NODES", "4"))
    options = command._parse(words[1:])
    assert options is not None
    assert options.words == ("python", "train.py")


@pytest.mark.parametrize(
    ("ends", "phase", "restarts", "does"),
    [
        ("0", "complete", 0, []),
        ("80 0", "complete", 0, []),
        ("82", "complete", 0, []),
        ("81", "gathering", 0, ["requeue 7"]),
        ("137", "gathering", 4, ["requeue 7"]),
        ("137", "gathering", 5, []),
        ("81", "closed", 0, []),
    ],
    ids=["done", "again", "over", "replaced", "killed", "killed too often", "finished without it"],
)
def test_the_slurm_script_follows_the_exit_status(
    ends: str, phase: str, restarts: int, does: list[str], tmp_path: Path
) -> None:
    stubs = {
        "srun": f'read -ra ends < "{tmp_path}/ends"; echo "${{ends[*]:1}}" > "{tmp_path}/ends"; exit "${{ends[0]}}"',
        "rdzv": f'[[ $2 == */slurm-7.{len(ends.split()) - 1} ]] && echo "run slurm-7: {phase}: as it is"',
        "scontrol": f'echo "$*" >> "{tmp_path}/did"',
    }
    for name, script in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ends").write_text(f"{ends}\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", SLURM / "store_outside.sbatch"], env={**environment, "SLURM_RESTART_COUNT": str(restarts)}, check=False
    )
    did = tmp_path / "did"
    assert (did.read_text().splitlines() if did.exists() else []) == does
    assert done.returncode == int(ends.rpartition(" ")[2])


def test_the_image_copies_the_files_of_the_package_and_its_command_is_valid() -> None:
    """Building it needs a registry, so only the rest is checked."""
    text = (KUBERNETES / "Dockerfile").read_text(encoding="utf-8")
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)).split()
    assert all((ROOT / name).exists() for name in copied)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    wheel = build["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "README.md", "LICENSE", *wheel["packages"], *wheel["force-include"]}
    assert "custom" in build["metadata"]["hooks"], "the hook that is called during the build"
    assert set(copied) >= needed | {"hatch_build.py"}
    (started,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert command._parse(re.findall(r'"([^"]+)"', started)[1:]) is not None
