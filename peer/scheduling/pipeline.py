"""A circuit as it is predicted: what its stages compute, and what the links between them take. Pure.

All of it travels with the session's descriptor: each hop's signed facts hold its profile, the rest is the
client's. So every hop can predict the others, as the transmission paper's section 4.2 asks: `decode_ms` is its
T_d, `link_ms` its Lat, `uplink_mbps` its Band, `sent_bytes` its act_sz, or tok_sz at the last stage.
"""

from dataclasses import dataclass
from typing import TypeAlias

from molink.dht.records.records import PeerFacts
from molink.routing.cost.cost import (
    CostModel,
    decode_context_ms,
    layer_ms_at,
    prefill_context_ms,
    prefill_layer_ms,
)
from molink.shards.spec import ModelSpec, Span

TOKEN_BYTES = 40
"""A drawn token on its way back to the head, as encoded: ids and numbers around it included."""

Circuit: TypeAlias = tuple[tuple[str, Span], ...]
"""Who serves what, in order: peer ids and spans."""

_COST = CostModel()
STEP_OVERHEAD_MS = _COST.hop_overhead_ms
"""What a step costs a peer beside its computation: taking it in, handing it to the device, sending it on.

A route counts it with each link; here it is the stage's, since a peer does it for one micro-batch after the other.
"""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One hop of a circuit, and the link from it to the next one, or from the last one back to the first."""

    facts: PeerFacts
    layers: int
    ends_ms: float
    """Embedding or language-model head, where this hop has them."""
    link_ms: float
    """On its way only, without what the peers do at both ends; 0 if the circuit has one hop."""
    uplink_mbps: float | None
    """None: not known, and transmission is then left out of predictions."""
    sent_bytes: int
    """What goes on for each row of a step: one activation, or one token."""
    context_tokens: float = 0.0
    """Of each session that decodes, on average."""

    @property
    def processors(self) -> tuple[str, int] | None:
        """On which host's processors this stage computes, and how many these are; None: on a device of its own."""
        facts = self.facts
        if facts.device.kind != "cpu" or not facts.grpc_addresses:
            return None
        return facts.grpc_addresses[0].rpartition(":")[0], max(1, facts.device.processors)

    def decode_ms(self, rows: int) -> float:
        """The computation of one decode step of so many sessions."""
        facts = self.facts
        layer_ms = layer_ms_at(facts.layer_latencies, rows)
        layer_ms += rows * decode_context_ms(facts.decode_context_ms, self.context_tokens)
        return facts.step_ms + self.layers * layer_ms + self.ends_ms

    def prefill_ms(self, tokens: int, context_tokens: float = 0.0) -> float:
        """The computation of so many tokens of one prompt in one step, when so many came before them."""
        facts = self.facts
        layer_ms = prefill_layer_ms(facts.layer_latencies, tokens, _COST, facts.prefill_latencies)
        layer_ms += prefill_context_ms(facts.prefill_context_ms, tokens, context_tokens)
        return facts.step_ms + self.layers * layer_ms + self.ends_ms

    def transfer_ms(self, rows: int) -> float:
        """How long so many rows occupy the uplink."""
        return 0.0 if self.uplink_mbps is None else rows * self.sent_bytes * 8 / (1000 * self.uplink_mbps)


def stage_of(
    facts: PeerFacts,
    span: Span,
    spec: ModelSpec,
    link_ms: float,
    uplink_mbps: float | None,
    context_tokens: float = 0.0,
) -> PipelineStage:
    """The stage that a hop of a circuit is; `link_ms` as a route predicts it."""
    first, last = span.start == 0, span.stop == spec.layers
    return PipelineStage(
        facts=facts,
        layers=len(span),
        ends_ms=(facts.embed_ms if first else 0.0) + (facts.head_ms if last else 0.0),
        link_ms=max(0.0, link_ms - STEP_OVERHEAD_MS),
        uplink_mbps=uplink_mbps,
        sent_bytes=spec.activation_bytes if not last else 0 if first else TOKEN_BYTES,
        context_tokens=context_tokens,
    )
