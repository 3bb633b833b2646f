"""What the distribution's own programs say of the files: promtool of Prometheus, systemd-analyze, nginx."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from molink.client.api.generation import CircuitReport, Generation
from molink.client.gateway.telemetry.metrics import Metrics
from molink.peer.engine.metrics import PeerMetrics

FOLDER = Path(__file__).parents[2] / "docs" / "deploy"
pytestmark = pytest.mark.full


def run(program: str, package: str, *arguments: str | Path, said: str = "", **environment: str) -> None:
    """Runs a program of the distribution, which is told `said`; fails where there is none, saying how to get it."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    assert found, f"{program} is missing: apt-get install -y {package}"
    done = subprocess.run(
        [found, *arguments],
        input=said,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_configuration_and_rules_and_the_rules_fire_as_they_should() -> None:
    run("promtool", "prometheus", "check", "config", FOLDER / "prometheus/prometheus.yml")
    run("promtool", "prometheus", "test", "rules", FOLDER / "prometheus/alerts.test.yml")


def test_promtool_finds_nothing_to_say_of_what_gateways_and_peers_tell() -> None:
    gateway, peer = Metrics(), PeerMetrics()
    gateway.answered("/v1/models", "GET", 200, 0.1)
    gateway.generations.finished(Generation("", (1, 2), 3, "stop", 0.1, 0.1, CircuitReport((), 1.0)), "model")
    peer.stepped(0.1, 1, 3)
    for told in (gateway.exposition(), generate_latest(peer.registry)):
        run("promtool", "prometheus", "check", "metrics", said=told.decode())


def test_promtool_takes_what_every_panel_asks_for(tmp_path: Path) -> None:
    import json

    import yaml

    panels = json.loads((FOLDER / "grafana/molink.json").read_text("utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(asked)
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), "utf-8")
    run("promtool", "prometheus", "check", "rules", file)


@pytest.mark.parametrize("unit", ["molink-peer", "molink-gateway"])
def test_systemd_takes_each_unit(unit: str, tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    text = (FOLDER / f"systemd/{unit}.service").read_text("utf-8")
    assert "%h/.local/share/molink/venv/bin/" in text
    file = tmp_path / f"{unit}.service"
    file.write_text(text.replace("%h/.local/share/molink/venv/bin", str(programs)), "utf-8")
    run("systemd-analyze", "systemd", "--user", "verify", file, XDG_RUNTIME_DIR=str(tmp_path))
