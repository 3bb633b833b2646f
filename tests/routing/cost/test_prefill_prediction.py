"""The time to the first token: chunks follow each other, the slowest stage sets the pace."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.circuit_cases import peer, snapshot_of
from support.circuits.route_cases import on

from molink.dht.records.records import LayerLatency
from molink.routing import CostModel, PeerObservation, plan
from molink.routing.routes.planner import Criteria

ROWS = (LayerLatency(1, 1.0), LayerLatency(101, 11.0))
"""0.9 ms and 0.1 ms for each row."""
KNOWN = PeerObservation(uptime_s=1.0, client_rtt_ms=40.0, uplink_mbps=2.048)
"""An activation of 256 bytes takes 1 ms."""


def test_one_hop_takes_what_it_computes_and_the_way_to_the_client() -> None:
    snapshot = replace(snapshot_of(on(peer("a", (0, 8), layer_latencies=ROWS), 1)), observed={"a": KNOWN})
    route = plan(snapshot, 200, prompt_tokens=101)
    embed_ms = 0.1 * 11
    assert route.ttft_ms == pytest.approx(40.0 + 0.5 + 8 * 11.0 + embed_ms + 0.3)


def test_chunks_of_a_long_prompt_are_pipelined_behind_the_slowest_stage() -> None:
    low = on(peer("low", (0, 4), layer_latencies=ROWS, links={"high": 10.0}), 1)
    high = peer("high", (4, 8), layer_latencies=ROWS)
    snapshot = replace(snapshot_of(low, high), observed={"low": KNOWN, "high": KNOWN})
    cost = CostModel(prefill_chunk_tokens=101)
    one, three = (
        plan(snapshot, 500, prompt_tokens=tokens, criteria=Criteria(cost=cost)).ttft_ms
        for tokens in (101, 303)
    )
    first = 40.0 + 0.5 + (4 * 11.0 + 1.1) + 101 * 1.0 + 6.0 + 4 * 11.0 + 0.3 + 6.0
    assert one == pytest.approx(first)
    assert three == pytest.approx(first + 2 * 101.0), "the uplink is slower than the 45.1 ms of computing"
    wide = replace(snapshot, observed={"low": replace(KNOWN, uplink_mbps=2048.0), "high": KNOWN})
    pace_ms = 4 * 11.0 + 1.1
    assert plan(wide, 500, prompt_tokens=303, criteria=Criteria(cost=cost)).ttft_ms == pytest.approx(
        first - 101.0 + 0.101 + 2 * pace_ms
    )


@given(st.integers(1, 6), st.integers(0, 6), st.floats(1.0, 500.0), st.floats(0.0, 500.0))
def test_longer_prompts_and_narrower_uplinks_never_come_sooner(
    chunks: int, more_chunks: int, uplink_mbps: float, more_mbps: float
) -> None:
    low = peer("low", (0, 4), layer_latencies=ROWS, links={"high": 10.0})
    high = peer("high", (4, 8))

    def ttft_ms(prompt_tokens: int, mbps: float) -> float:
        observed = {name: replace(KNOWN, uplink_mbps=mbps) for name in ("low", "high")}
        snapshot = replace(snapshot_of(low, high), observed=observed)
        return plan(snapshot, 10_000, prompt_tokens=prompt_tokens).ttft_ms

    chunk = CostModel().prefill_chunk_tokens
    now_ms = ttft_ms(chunks * chunk, uplink_mbps)
    assert ttft_ms((chunks + more_chunks) * chunk, uplink_mbps) >= now_ms
    assert ttft_ms(chunks * chunk, uplink_mbps + more_mbps) <= now_ms + 1e-9
