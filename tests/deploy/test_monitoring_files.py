"""Alert rules and dashboard ask for what gateways and peers really tell."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from molink.client.gateway.telemetry.metrics import Metrics
from molink.dht.records.records import LayerLatency
from molink.peer.engine.metrics import PeerMetrics, ServingState
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.step_times import StepTimes
from molink.peer.wire.transport.line_quality import LineQuality

FOLDER = Path(__file__).parents[2] / "docs" / "deploy"
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "info": ("_info",),
    "gauge": ("",),
}
STATE = ServingState(
    sessions=0,
    layers=0,
    queued_steps=0,
    free_weight_bytes=0,
    free_kv_bytes=0,
    is_draining=False,
    is_paused=False,
)
COPIES = (
    "copied_sessions", "copied_behind_tokens", "copied_furthest_behind_tokens", "sent_copy_bytes",
    "sent_computed_tokens", "input_log_bytes", "kept_copies", "kept_behind_tokens",
    "kept_furthest_behind_tokens", "kept_copy_bytes", "computed_copy_tokens", "taken_over",
)  # fmt: skip


def told_by(registry: CollectorRegistry) -> set[str]:
    """The names of all series that a registry may have."""
    return {family.name + suffix for family in registry.collect() for suffix in SUFFIXES[family.type]}


@pytest.fixture(scope="module")
def told() -> set[str]:
    peer = PeerMetrics()
    peer.watch(lambda: LineQuality(1.0, ()))
    peer.watch_copies(lambda: dict.fromkeys(COPIES, 0))
    peer.watch_serving("model", lambda: STATE)
    peer.compare(StepTimes(Profile((LayerLatency(1, 0.1),), 0.1, 0.1, 1e9)))
    gateway = {
        family.name + suffix
        for family in text_string_to_metric_families(Metrics().exposition().decode())
        for suffix in (*SUFFIXES.get(family.type, ()), "")
    }
    return told_by(peer.registry) | gateway


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "grafana/molink.json").read_text("utf-8"))
    return content


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "prometheus/alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def series_in(text: str) -> set[str]:
    return set(re.findall(r"\bmolink_[a-z_]+", text))


def test_alerts_ask_for_series_that_there_are(told: set[str]) -> None:
    asked = series_in(" ".join(rule["expr"] for rule in rules()))
    assert len(asked) > 10
    assert asked - told == set()


def test_panels_ask_for_series_that_there_are(told: set[str]) -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    asked = series_in(json.dumps([panel["targets"] for panel in panels]))
    assert len(asked) > 20
    assert asked - told == set()
    variables = dashboard()["templating"]["list"]
    assert series_in(json.dumps(variables)) - told == set()


def test_every_alert_says_how_bad_it_is_and_has_a_section() -> None:
    page = (FOLDER.parent / "TROUBLESHOOTING.md").read_text("utf-8")
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["for"]
        assert f"`{rule['alert']}`" in page, rule["alert"]


def test_panels_neither_overlap_nor_share_a_number() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + right, at["y"] + down) for right in range(at["w"]) for down in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
