"""What a longer context adds to a step is in what the heads and the routers predict."""

import pytest
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerView
from molink.routing.cost.cost import PROFILED_CONTEXT_TOKENS, CostModel
from molink.routing.cost.pipeline import PipelineStage
from molink.routing.cost.prefill import prefill_ms
from molink.routing.cost.reliability import PeerObservation
from molink.routing.cost.terms import Demand, PeerCosts, peer_costs
from molink.shards.spec import ModelSpec

FACTS = facts_of(Identity.generate())
SPEC = ModelSpec(
    "0" * 64, "1" * 64, "m", "llama", 1, 8, 16, 9000, "float32", "none", (100,), 30, 40, (1,), (0,)
)


def stage(context_tokens: float) -> PipelineStage:
    return PipelineStage(FACTS, 10, 0.0, 0.0, 0.0, None, 100, context_tokens)


def costs(tokens: int, prompt_tokens: int) -> PeerCosts:
    view = PeerView(FACTS, state_of(Identity.generate()), 0.0)
    return peer_costs(view, PeerObservation(), SPEC, Demand.of(tokens, prompt_tokens), 1000.0, CostModel())


def test_each_decoding_session_pays_for_its_context() -> None:
    assert stage(0).decode_ms(1) == stage(PROFILED_CONTEXT_TOKENS).decode_ms(1) == pytest.approx(12.5)
    assert stage(PROFILED_CONTEXT_TOKENS + 2000).decode_ms(1) == pytest.approx(12.5 + 10 * 2 * 0.5)
    assert stage(PROFILED_CONTEXT_TOKENS + 2000).decode_ms(8) == pytest.approx(25.0 + 8 * 10 * 2 * 0.5)


def test_a_part_of_a_prompt_pays_for_what_came_before_it() -> None:
    alone_ms = stage(0).prefill_ms(100)
    assert stage(0).prefill_ms(100, 1000) == pytest.approx(alone_ms + 10 * 100 * 0.03125)


def test_however_a_prompt_is_cut_its_context_costs_what_half_of_the_pairs_of_its_tokens_cost() -> None:
    without_ms = 4 * stage(0).prefill_ms(100)
    pairs = 100 * (0 + 100 + 200 + 300)
    overhead_ms = prefill_ms([stage(0)], [100]) - stage(0).prefill_ms(100)
    expected_ms = without_ms + 10 * 0.03125 * pairs / 1000 + 4 * overhead_ms
    assert prefill_ms([stage(0)], [100] * 4) == pytest.approx(expected_ms)


def test_a_router_counts_a_layer_with_the_mean_context_of_the_session() -> None:
    short, long = costs(64, 32), costs(4064, 2064)
    assert short.layer_ms == pytest.approx(1.25)
    assert long.layer_ms == pytest.approx(1.25 + 0.5 * (3064 - PROFILED_CONTEXT_TOKENS) / 1000)
    assert long.batched_layer_ms - short.batched_layer_ms == pytest.approx(long.layer_ms - short.layer_ms)
