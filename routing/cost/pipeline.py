"""A circuit as it is predicted: what its stages compute, and what the links between them take. Pure.

All of it travels with the session's descriptor: each hop's signed facts hold its profile, the rest is the
client's. So every hop can predict the others, as the transmission paper's section 4.2 asks: `decode_ms` is its
T_d, `link_ms` its Lat, `uplink_mbps` its Band, `sent_bytes` its act_sz, or tok_sz at the last stage. A router makes the
same stages of the announcements that it plans with, so that it predicts what the hops will.
"""

from dataclasses import dataclass

from molink.dht.records.records import PeerFacts
from molink.routing.cost.cost import (
    CostModel,
    decode_context_ms,
    layer_ms_at,
    prefill_context_ms,
    prefill_layer_ms,
)
from molink.shards.spec import ModelSpec, Span, row_bytes

TOKEN_BYTES = 40
"""A drawn token on its way back to the head, as encoded: ids and numbers around it included."""

COST = CostModel()
"""What peers assume of each other where nobody has measured."""
STEP_OVERHEAD_MS = COST.hop_overhead_ms
"""What a step costs a peer beside its computation: taking it in, handing it to the device, sending it on.

A route counts it with each link; here it is the stage's, since a peer does it for one micro-batch after the other.
"""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One hop of a circuit, and the link from it to the next one, or from the last one back to the first."""

    facts: PeerFacts
    layers: int
    embed_ms: float
    """Of a step, where this hop embeds tokens."""
    head_ms: float
    """Of a step after which a token is drawn, where this hop has the language-model head."""
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
        """The computation of one decode step of so many rows, behind each of which a token is drawn."""
        facts = self.facts
        layer_ms = layer_ms_at(facts.layer_latencies, rows)
        head_ms = self.head_ms
        if head_ms and rows > 1 and (single_ms := layer_ms_at(facts.layer_latencies, 1)):
            head_ms *= max(1.0, layer_ms / single_ms)  # a product as a layer's are
        layer_ms += rows * decode_context_ms(facts.decode_context_ms, self.context_tokens)
        return facts.step_ms + self.layers * layer_ms + self.embed_ms + head_ms

    def prefill_ms(self, tokens: int, context_tokens: float = 0.0, *, ends: bool = True) -> float:
        """The computation of so many tokens of one prompt in one step, when so many came before them. With those that
        end the prompt a token is drawn."""
        facts = self.facts
        layer_ms = prefill_layer_ms(facts.layer_latencies, tokens, COST, facts.prefill_latencies)
        layer_ms += prefill_context_ms(facts.prefill_context_ms, tokens, context_tokens)
        return facts.step_ms + self.layers * layer_ms + self.embed_ms + (self.head_ms if ends else 0.0)

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
    encoding: str = "",
) -> PipelineStage:
    """The stage that a hop of a circuit is; `link_ms` as a route predicts it, `encoding` that of the activations that
    it sends (empty: the model's own numbers)."""
    first, last = span.start == 0, span.stop == spec.layers
    return PipelineStage(
        facts=facts,
        layers=len(span),
        embed_ms=facts.embed_ms if first else 0.0,
        head_ms=facts.head_ms if last else 0.0,
        link_ms=max(0.0, link_ms - STEP_OVERHEAD_MS),
        uplink_mbps=uplink_mbps,
        sent_bytes=row_bytes(encoding or spec.dtype, spec.hidden_size)
        if not last
        else 0
        if first
        else TOKEN_BYTES,
        context_tokens=context_tokens,
    )
