"""The files for Slurm and Kubernetes: valid where a validator can tell, and with commands that rdzv takes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from typing import Any

import pytest

from rdzv.cli import main as command
from rdzv.config.settings import parse
from tests.support.processes import ROOT

KUBERNETES, SLURM = ROOT / "examples" / "kubernetes", ROOT / "examples" / "slurm"
VERSIONS = ("1.31", "1.34")
SCRIPTS = sorted(SLURM.glob("*.sbatch"))


def required(module: str) -> Any:
    """A module, or a skipped test; where everything is to be installed, a failed one."""
    if os.environ.get("RDZV_TEST_REQUIRE_ALL") == "1":
        return __import__(module)
    return pytest.importorskip(module)


def documents(name: str) -> list[dict[str, Any]]:
    text = (KUBERNETES / name).read_text(encoding="utf-8")
    return list(required("yaml").safe_load_all(text))


@pytest.mark.parametrize("name", ["store.yaml", "job.yaml"])
def test_manifests_are_what_the_schemas_of_kubernetes_say(name: str) -> None:
    validator = required("kubernetes_validate")
    for document in documents(name):
        for version in VERSIONS:
            validator.validate(document, version, strict=True)


def test_the_validator_would_find_a_field_that_does_not_exist() -> None:
    validator = required("kubernetes_validate")
    wrong = documents("store.yaml")[1]
    wrong["spec"]["replica"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, VERSIONS[0], strict=True)


def commands_of(document: dict[str, Any]) -> list[list[str]]:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container]
    return [container["command"], *(probe["exec"]["command"] for probe in probes)]


@pytest.mark.parametrize("name", ["store.yaml", "job.yaml"])
def test_containers_run_commands_that_rdzv_takes(name: str) -> None:
    (workload,) = (one for one in documents(name) if "template" in one["spec"])
    for words in commands_of(workload):
        assert words[0] == "rdzv"
        options = command._parse([str(word) for word in words[1:]])
        assert options is not None
        if options.command == "run":
            assert parse(options.url, {}, {}).max_nodes == 4


def test_nodes_that_wait_for_each_other_have_names_and_the_secret_is_the_one_that_is_made() -> None:
    service, job = documents("job.yaml")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    store = documents("store.yaml")[1]
    for workload in (job, store):
        (secret,) = (each["secret"] for each in workload["spec"]["template"]["spec"]["volumes"] if "secret" in each)
        assert secret["secretName"] == "rdzv"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_batch_scripts_are_whole_and_their_commands_are_taken(script: Any) -> None:
    text = script.read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", str(script)], check=False).returncode == 0
    (line,) = re.findall(r"^srun .*?(rdzv run .*?)$", text.replace("\\\n", " "), re.MULTILINE)
    words = shlex.split(line.replace("$SLURM_JOB_ID", "7").replace("$SLURM_JOB_NUM_NODES", "4"))
    options = command._parse(words[1:])
    assert options is not None
    assert options.words == ("python", "train.py")


def test_the_image_is_built_of_what_the_package_is_built_of_and_starts_what_rdzv_takes() -> None:
    """Building it needs a registry; what can be checked without is."""
    text = (KUBERNETES / "Dockerfile").read_text(encoding="utf-8")
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)).split()
    assert all((ROOT / name).exists() for name in copied)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    wheel = build["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "README.md", "LICENSE", *wheel["packages"], *wheel["force-include"]}
    assert "custom" in build["metadata"]["hooks"], "what is asked while it is built"
    assert set(copied) >= needed | {"hatch_build.py"}
    (started,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    words = re.findall(r'"([^"]+)"', started)
    assert command._parse(words[1:]) is not None
