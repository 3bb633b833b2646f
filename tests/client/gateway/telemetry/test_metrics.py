"""What the gateway counts, by the names and in the units that Prometheus' conventions ask for."""

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.gateways.expositions import faults_of
from support.swarms.fake_swarm import CHAT, MODEL, TEXT, FakeSwarm

from molink.client.api.generation import CircuitReport, Generation, Hop, Recovery
from molink.client.errors import PeerLost
from molink.client.gateway.telemetry.metrics import MOST_MODELS, OTHER_MODELS, Metrics


def test_metrics_count_requests_tokens_and_times(http: httpx.Client) -> None:
    http.post("/v1/completions", json=TEXT | {"n": 2})
    http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    http.post("/v1/completions", json=TEXT | {"n": 0})
    http.get("/v1/models/molink/tiny-shakespeare")
    http.get("/some/scanner.php")
    lines = http.get("/metrics").text.splitlines()

    def requests(route: str, method: str, status: int) -> str:
        return f'molink_gateway_requests_total{{method="{method}",route="{route}",status="{status}"}} 1.0'

    assert requests("/v1/completions", "POST", 200) in lines
    assert requests("/v1/completions", "POST", 400) in lines
    assert requests("/v1/chat/completions", "POST", 200) in lines
    assert requests("/v1/models/{model:path}", "GET", 200) in lines
    assert requests("unmatched", "GET", 404) in lines
    model = f'model="{MODEL}"'
    assert f'molink_gateway_tokens_total{{kind="prompt",{model}}} 15.0' in lines
    assert f'molink_gateway_tokens_total{{kind="generated",{model}}} 9.0' in lines
    assert f"molink_gateway_ttft_seconds_count{{{model}}} 3.0" in lines
    assert f"molink_gateway_tpot_seconds_count{{{model}}} 3.0" in lines
    assert 'molink_gateway_request_duration_seconds_count{route="/v1/completions"} 2.0' in lines
    assert "molink_gateway_queue_seconds_count 2.0" in lines
    assert "molink_gateway_active_requests 0.0" in lines


def test_metrics_count_what_losses_cost(http: httpx.Client, swarm: FakeSwarm) -> None:
    lost = Hop("12D3", 0, 2)
    swarm.recoveries = (Recovery(lost, 0.3, 2, by_standby=True), Recovery(lost, 2.0, 90, by_standby=False))
    http.post("/v1/completions", json=TEXT)
    lines = http.get("/metrics").text.splitlines()
    assert 'molink_gateway_recoveries_total{by="standby"} 1.0' in lines
    assert 'molink_gateway_recoveries_total{by="circuit"} 1.0' in lines
    assert 'molink_gateway_recovery_seconds_bucket{le="0.5"} 1.0' in lines
    assert "molink_gateway_recovery_seconds_sum 2.3" in lines
    assert "molink_gateway_recomputed_tokens_total 92.0" in lines


def test_what_is_told_keeps_to_the_conventions(http: httpx.Client) -> None:
    http.post("/v1/completions", json=TEXT)
    assert faults_of(http.get("/metrics").text) == []


def test_models_that_peers_make_up_take_no_more_than_so_many_series() -> None:
    metrics = Metrics()
    generation = Generation("", (1,), 3, "stop", 0.1, 0.0, CircuitReport((), 1.0))
    for number in range(3 * MOST_MODELS):
        metrics.generations.finished(generation, f"model {number}")
    text = metrics.exposition().decode()
    models = set(re.findall(r'molink_gateway_ttft_seconds_count{model="([^"]*)"}', text))
    assert len(models) == MOST_MODELS + 1
    assert OTHER_MODELS in models
    families = {family.name: family for family in text_string_to_metric_families(text)}
    total = sum(
        one.value for one in families["molink_gateway_tokens"].samples if one.labels["kind"] == "prompt"
    )
    assert total == 9 * MOST_MODELS


@pytest.mark.parametrize("stream", [False, True])
def test_generations_that_fail_are_counted_by_what_they_failed_of(
    http: httpx.Client, swarm: FakeSwarm, stream: bool
) -> None:
    swarm.error, swarm.fails_at = PeerLost("12D3", None, "gone"), 1
    http.post("/v1/completions", json=TEXT | {"stream": stream})
    assert 'molink_gateway_failures_total{code="peer_lost"} 1.0' in http.get("/metrics").text.splitlines()
