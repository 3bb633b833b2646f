"""What a token takes on a circuit as things are, by the terms with which the product predicts it. Pure.

The router predicts from announcements, which are old; the same functions say here what happens, from the peers' loads
of this moment and the true round trips.
"""

from dataclasses import dataclass

from molink.dht.records.records import PeerFacts, PeerView
from molink.routing.cost.cost import CostModel, decode_context_ms, layer_ms_at
from molink.routing.cost.first_token import first_token_ms as predicted_ms
from molink.routing.cost.first_token import prompt_chunks
from molink.routing.cost.pipeline import stage_of
from molink.routing.cost.reliability import PeerObservation
from molink.routing.cost.terms import Demand, batch_size, queue_ms, transmission_ms
from molink.routing.latency.relayed_links import RelayOffer
from molink.shards.spec import ModelSpec, Span

COST = CostModel()


@dataclass(frozen=True, slots=True)
class SimulatedHop:
    """A span on a peer, and the true way onwards."""

    peer_id: str
    span: Span
    link_ms: float
    """One way to the next hop, with what taking in a message costs; 0 if the circuit has one hop."""
    uplink_mbps: float | None
    """Of the peer's own line."""
    relay: RelayOffer | None = None
    """Over which the link goes."""

    @property
    def prompt_mbps(self) -> float | None:
        """What of a prompt the link carries: the uplink, or the relay's share if that is less."""
        if self.relay is None:
            return self.uplink_mbps
        return min(self.relay.mbps, self.uplink_mbps or COST.unknown_bandwidth_mbps)


def link_ms(rtt_ms: float) -> float:
    """One way over a link, as `one_way_ms` counts it."""
    return rtt_ms / 2 + COST.hop_overhead_ms


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What a peer takes for a session's step because of those that step beside it: the same for all of them."""

    layer_ms: float
    """One layer, at the batch size that they make together."""
    queue_ms: float

    @classmethod
    def of(cls, view: PeerView, guessed_rows: float = 0.0) -> "PeerLoad":
        """`view` is the peer as one of its sessions meets it: with the others that step there. All of them together
        have so many rows of guesses beside one each."""
        rows = batch_size(view) + round(guessed_rows)
        return cls(layer_ms_at(view.facts.layer_latencies, rows), queue_ms(view, COST))

    def hop_ms(self, layers: int, own_ms: float) -> float:
        """Milliseconds of one decode step through so many layers, with what `own_ms` says of the session."""
        return layers * self.layer_ms + self.queue_ms + own_ms


def own_ms(hop: SimulatedHop, facts: PeerFacts, model: ModelSpec, demand: Demand, rows: float = 1.0) -> float:
    """Of one decode step of a session on a hop, with so many rows, all in the TPOT that does not depend on others: what
    the step takes whatever its layers, its context, the link onwards, the activations on the uplink, and what the ends
    of the model take."""
    context_ms = decode_context_ms(facts.decode_context_ms, (demand.prompt_tokens + demand.tokens) / 2)
    total = facts.step_ms + rows * len(hop.span) * context_ms + hop.link_ms
    if hop.span.start == 0:
        total += facts.embed_ms + _service_ms(facts)
    if hop.span.stop == model.layers:
        return total + facts.head_ms
    sent_ms = transmission_ms(model.activation_bytes, PeerObservation(uplink_mbps=hop.uplink_mbps), COST)
    return total + rows * max(sent_ms, hop.relay.through_ms(model.activation_bytes) if hop.relay else 0.0)


def first_token_ms(
    hops: tuple[SimulatedHop, ...],
    views: tuple[PeerView, ...],
    model: ModelSpec,
    demand: Demand,
    client_rtt_ms: float,
) -> float:
    """Milliseconds from the start of the ready circuit to its first token at the client."""
    stages = [
        stage_of(view.facts, hop.span, model, hop.link_ms, hop.prompt_mbps)
        for hop, view in zip(hops, views, strict=True)
    ]
    waits_ms = client_rtt_ms + _service_ms(views[0].facts) + sum(queue_ms(view, COST) for view in views)
    return predicted_ms(stages, prompt_chunks(stages, demand.prompt_tokens), waits_ms, COST)


def _service_ms(head: PeerFacts) -> float:
    return COST.head_service_ms / max(1, head.device.processors)
