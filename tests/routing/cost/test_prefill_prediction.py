"""The time to the first token: a route's prediction is that of the chunks which its head will cut."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.circuit_cases import MODEL, peer, snapshot_of
from support.circuits.route_cases import on, snapshots
from support.swarms.pipelines import pipelines

from molink.dht.records.records import LayerLatency
from molink.routing import CostModel, PeerObservation, Snapshot, plan
from molink.routing.cost.cost import layer_ms_at
from molink.routing.cost.first_token import prompt_chunks
from molink.routing.cost.pipeline import PipelineStage, stage_of
from molink.routing.cost.prefill import prefill_ms
from molink.routing.cost.terms import client_rtt_ms, queue_ms

ROWS = (LayerLatency(1, 1.0), LayerLatency(101, 11.0))
"""0.9 ms and 0.1 ms for each row."""
KNOWN = PeerObservation(uptime_s=1.0, client_rtt_ms=40.0, uplink_mbps=2.048)
"""An activation of 256 bytes takes 1 ms."""
STEP_MS = 1.0
"""What every step costs a peer beside its computation. Where a route says 6 ms of a link, its way takes 5."""
COST = CostModel()


def test_one_hop_takes_what_it_computes_and_the_way_to_the_client() -> None:
    snapshot = replace(snapshot_of(on(peer("a", (0, 8), layer_latencies=ROWS), 1)), observed={"a": KNOWN})
    route = plan(snapshot, 200, prompt_tokens=101)
    assert route.ttft_ms == pytest.approx(40.0 + 0.5 + STEP_MS + 8 * 11.0 + 0.1 + 0.3)


def test_two_hops_compute_and_send_one_after_the_other() -> None:
    low = on(peer("low", (0, 4), layer_latencies=ROWS, links={"high": 10.0}), 1)
    high = peer("high", (4, 8), layer_latencies=ROWS)
    snapshot = replace(snapshot_of(low, high), observed={"low": KNOWN, "high": KNOWN})
    layer_ms = 0.9 + 0.1 * 8
    low_ms, high_ms = STEP_MS + 4 * layer_ms + 0.1, STEP_MS + 4 * layer_ms + 0.3
    predicted_ms = plan(snapshot, 500, prompt_tokens=8).ttft_ms
    assert predicted_ms == pytest.approx(40.0 + 0.5 + low_ms + 8 * 1.0 + 5.0 + high_ms + 5.0)


@given(snapshots(), st.integers(1, 511))
def test_a_route_predicts_the_chunks_that_its_head_will_cut(snapshot: Snapshot, prompt_tokens: int) -> None:
    """An uplink of which nothing is known takes no time for a head that cuts, and some for who waits for it."""
    route = plan(snapshot, 512, prompt_tokens=prompt_tokens)
    views = {view.peer_id: view for view in snapshot.peers}
    stages, waits_ms = list[PipelineStage](), 0.0
    for hop in route.hops:
        view = views[hop.peer_id]
        stages.append(stage_of(view.facts, hop.span, MODEL, hop.link_ms, hop.uplink_mbps))
        waits_ms += queue_ms(view, COST)
    head = views[route.hops[0].peer_id]
    waits_ms += client_rtt_ms(snapshot.seen(head), COST) + 0.5 / head.facts.device.processors
    sent = [replace(one, uplink_mbps=one.uplink_mbps or COST.unknown_bandwidth_mbps) for one in stages]
    predicted_ms = waits_ms + prefill_ms(sent, prompt_chunks(stages, prompt_tokens))
    assert route.ttft_ms == pytest.approx(predicted_ms)


@pytest.mark.parametrize(("announced", "chunks"), [((512, 512), 5), ((2048, 512), 5), ((2048, 2048), 1)])
def test_longer_steps_are_expected_where_every_hop_announces_them(
    announced: tuple[int, int], chunks: int
) -> None:
    """A step costs 400 ms, whatever its length: as few as may be."""
    dear = (LayerLatency(1, 100.0), LayerLatency(2, 100.0))
    stages = [
        stage_of(replace(view.facts, step_tokens=tokens), view.state.spans[0], MODEL, 1.0, 10_000.0)
        for tokens, view in zip(
            announced, (peer(name, (0, 4), layer_latencies=dear) for name in "ab"), strict=True
        )
    ]
    assert len(prompt_chunks(stages, 1984)) == chunks


@given(st.integers(1, 6), st.integers(0, 6), st.floats(1.0, 500.0), st.floats(0.0, 500.0))
def test_longer_prompts_and_narrower_uplinks_hardly_ever_come_sooner(
    chunks: int, more_chunks: int, uplink_mbps: float, more_mbps: float
) -> None:
    """Sooner by what a finer cut must bring at most: heads do not cut finer for less."""
    low = peer("low", (0, 4), layer_latencies=ROWS, links={"high": 10.0})
    high = peer("high", (4, 8))

    def ttft_ms(prompt_tokens: int, mbps: float) -> float:
        observed = {name: replace(KNOWN, uplink_mbps=mbps) for name in ("low", "high")}
        snapshot = replace(snapshot_of(low, high), observed=observed)
        return plan(snapshot, 10_000, prompt_tokens=prompt_tokens).ttft_ms

    now_ms = ttft_ms(chunks * 448, uplink_mbps)
    assert ttft_ms((chunks + more_chunks) * 448, uplink_mbps) >= 0.95 * now_ms
    assert ttft_ms(chunks * 448, uplink_mbps + more_mbps) <= now_ms / 0.95


@given(pipelines(), st.integers(2, 64))
def test_behind_more_rows_of_a_decode_step_drawing_takes_longer_as_layers_do(
    stages: list[PipelineStage], rows: int
) -> None:
    for one in stages:
        tail, middle = replace(one, head_ms=2.0), replace(one, head_ms=0.0)
        one_ms, all_ms = (layer_ms_at(one.facts.layer_latencies, count) for count in (1, rows))
        head_ms = tail.decode_ms(rows) - middle.decode_ms(rows)
        assert head_ms == pytest.approx(2.0 * max(1.0, all_ms / one_ms), rel=1e-3)
