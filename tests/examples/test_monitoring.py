"""The alerts and the dashboard: their metrics exist, and Prometheus accepts their expressions."""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import pytest

import rdzv
from rdzv.http import app
from tests.examples.test_cluster_files import required
from tests.rdzv.http.test_app import answered, served
from tests.support.processes import ROOT, require

ALERTS = ROOT / "examples" / "prometheus" / "rdzv.rules.yml"
DASHBOARD = ROOT / "examples" / "grafana" / "rdzv.json"
CASES = ROOT / "tests" / "examples" / "alerts.test.yml"


def asked_by_alerts() -> list[str]:
    groups = required("yaml").safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def asked_by_dashboard() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


async def test_every_metric_in_the_files_exists() -> None:
    asked = {
        name
        for text in (*asked_by_alerts(), *asked_by_dashboard())
        for name in re.findall(r"\b(?:rdzv|process)_\w+", text)
    }
    async with (
        served() as (server, url),
        aiohttp.ClientSession(url) as session,
        rdzv.connect(f"{server.url}/job?min_nodes=1", is_host=False) as handler,
    ):
        await handler.next_rendezvous()
        await asyncio.sleep(app.LOOK_EVERY)
        lines = (await answered(session, "/metrics")).splitlines()
    named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    there = named | {f"{name}{end}" for name in named for end in ("_bucket", "_count", "_sum")}
    assert "rdzv_run_missing" in asked
    assert asked - there == set()


@pytest.fixture
def promtool(tmp_path: Path) -> Path:
    """Return a folder with all files that promtool reads."""
    require("promtool")  # on Debian it is in the package prometheus
    for path in (ALERTS, CASES):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_prometheus_accepts_every_expression(promtool: Path) -> None:
    panels = [text.replace("$run", "job") for text in asked_by_dashboard()]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(panels)]
    (promtool / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", ALERTS.name, "panels.yml"], cwd=promtool, check=True)


def test_each_alert_fires_on_its_symptom_and_only_then(promtool: Path) -> None:
    subprocess.run(["promtool", "test", "rules", CASES.name], cwd=promtool, check=True)
