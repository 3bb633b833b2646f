"""Time to first token: chunks of the prompt pass through the hops as through a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.dht.records.records import PeerView
from molink.routing.cost.cost import CostModel, layer_ms_at, prefill_context_ms, prefill_layer_ms
from molink.routing.cost.terms import PeerCosts, prefill_chunks


@dataclass(frozen=True, slots=True)
class PrefillStage:
    """One hop of a circuit as a prompt passes through it."""

    view: PeerView
    costs: PeerCosts
    layers: int
    link_ms: float
    """One way to the next hop, from the last one back to the first; 0 if there is one hop."""


def ttft_ms(
    stages: Sequence[PrefillStage], prompt_tokens: int, client_rtt_ms: float, cost: CostModel
) -> float:
    """Milliseconds from the client's start of a ready circuit to the first token at the client.

    The first chunk goes through every hop: waiting, computation, uplink, link. The others follow at the pace
    of the slowest computation or uplink, since a peer computes a chunk while it sends the one before. Chunks
    are taken as equal, and so is the context before them; the last hop returns one token, which weighs nothing.
    """
    chunks, rows = prefill_chunks(prompt_tokens, cost)
    through_ms, pace_ms = client_rtt_ms, 0.0
    for index, stage in enumerate(stages):
        facts = stage.view.facts
        latencies = facts.layer_latencies
        layer_ms = prefill_layer_ms(latencies, rows, cost, facts.prefill_latencies)
        layer_ms += prefill_context_ms(facts.prefill_context_ms, rows, (prompt_tokens - rows) / 2)
        compute_ms = stage.costs.fixed_ms + stage.layers * layer_ms
        if index == 0:
            single_ms = layer_ms_at(latencies, 1)
            growth = layer_ms / single_ms if single_ms > 0 else 1.0
            compute_ms += stage.costs.embed_ms * max(1.0, growth)
            through_ms += stage.costs.service_ms
        last = index == len(stages) - 1
        sent_ms = 0.0 if last else rows * stage.costs.transfer_ms
        through_ms += stage.costs.queue_ms + compute_ms + sent_ms + stage.link_ms
        through_ms += stage.costs.head_ms if last else 0.0
        pace_ms = max(pace_ms, compute_ms, sent_ms)
    return through_ms + (chunks - 1) * pace_ms
