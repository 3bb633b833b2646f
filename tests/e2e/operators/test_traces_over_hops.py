"""One request's trace over gateway and peers; and nothing of what was asked in anything that operators see."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.gateways.expositions import faults_of
from support.gateways.trace_collector import collector, value_of
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, FORMATION_TIMEOUT_S

from molink.client.local.local_gateway import LocalGateway

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.full]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "x-request-id": "mine-1"}
WORD = "Zanzibarbarossa"  # of the prompt: nothing else says it


async def test_a_request_is_one_trace_over_all_hops_and_nobody_is_told_its_prompt(tmp_path: Path) -> None:
    with collector() as (url, spans):
        options = ("--model", BUNDLED, "--otlp-endpoint", url, "--log-format", "json", "--debug")
        async with ForkedSwarm() as swarm:
            metrics = []
            for name, layers in (("front", "0:6"), ("back", "6:12")):
                peer = await swarm.join(name, *options, "--layers", layers, "--metrics-port", "0")
                metrics.append(next(line.split()[-1] for line in peer.lines if line.startswith("Metrics: ")))
            log = tmp_path / "gateway.log"
            asked = ("--otlp-endpoint", url, "--log-format", "json", "--debug")
            async with LocalGateway(swarm.addresses[:1], log, *asked) as gateway:
                answers = await _ask(gateway.url)
            pages = [answers[-1], *[await asyncio.to_thread(_page, one) for one in metrics]]
            logs = [one.read_text("utf-8") for one in (log, *(peer.log for peer in swarm.peers))]
        _check_tree(spans)
    for page in pages:
        assert faults_of(page) == []
    assert json.loads(logs[0].splitlines()[-1])["time"]
    (line,) = [one for one in map(json.loads, logs[0].splitlines()) if one.get("request_id") == "mine-1"]
    assert line["trace_id"] == TRACE_ID
    for text in (*answers[1:], *pages, *logs, *map(str, spans)):
        assert WORD not in text


async def _ask(url: str) -> list[str]:
    """An answer, which quotes nobody, errors about requests with the word in every place, and the metrics."""
    body = {"model": BUNDLED, "prompt": f"{WORD}:", "max_tokens": 5}
    async with httpx.AsyncClient(base_url=url, timeout=FORMATION_TIMEOUT_S) as http:
        answer = await http.post("/v1/completions", json=body, headers=HEADERS)
        assert answer.status_code == 200, answer.text
        wrong = (
            {"prompt": [[WORD]]},
            {"prompt": f"{WORD} " * 2000},
            {"temperature": WORD},
            {"guided_regex": WORD},
        )
        refused = [await http.post("/v1/completions", json=body | one) for one in wrong]
        assert {one.status_code for one in refused} == {400}
        return [answer.text, *(one.text for one in refused), (await http.get("/metrics")).text]


def _page(url: str) -> str:
    return httpx.get(url, timeout=FORMATION_TIMEOUT_S).raise_for_status().text


def _check_tree(spans: list[Span]) -> None:
    """A request has a generation, and that the parts that its client sees, and a span of each of its hops."""
    traced = [span for span in spans if span.trace_id.hex() == TRACE_ID]
    names = Counter(span.name for span in traced)
    expected = (
        "POST /v1/completions",
        "generation",
        "form circuit",
        "prefill",
        "decode",
        "hop [0, 6)",
        "hop [6, 12)",
    )
    assert names == Counter(expected)
    by_name = {span.name: span for span in traced}
    request, generation = by_name["POST /v1/completions"], by_name["generation"]
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    assert generation.parent_span_id == request.span_id
    for name in expected[2:]:
        assert by_name[name].parent_span_id == generation.span_id
    assert value_of(generation, "gen_ai.usage.output_tokens") == 5
    steps = {value_of(by_name[name], "molink.hop.steps") for name in expected[5:]}
    assert steps <= {1, 2, 3, 4, 5}  # guessed tokens come together
    assert len(steps) == 1
    assert not re.search("error", " ".join(str(span.status) for span in traced))
