"""Cost terms of a hop: the one cost model by which circuits are chosen and explained.

All terms are milliseconds per generated token. Their sum over a circuit is the objective of its search.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from molink.dht.records.records import PeerFacts, PeerView
from molink.routing.cost.cost import CostModel, decode_context_ms, layer_ms_at, prefill_layer_ms
from molink.routing.cost.prefill_chunks import most_chunk_tokens
from molink.routing.cost.reliability import PeerObservation, loss_probability, loss_rate_per_s
from molink.shards.spec import ModelSpec

TERM_NAMES = (
    "layers",
    "batching",
    "step",
    "embedding",
    "head",
    "service",
    "queue",
    "link",
    "relay",
    "transfer",
    "client link",
    "prefill",
    "loading",
    "reliability",
    "guesses",
)
"""batching: what sharing the device adds. step: what the peer's step takes whatever its layers. service: of the client,
by the head. relay: what an activation takes longer at the relay of a link than on the uplink. transfer: one
activation on the uplink. client link: to the client and back, once. prefill: the prompt's activations on the uplink,
or at the link's relay. reliability: what losing the peer would cost, times how likely that is. guesses: of the head,
and below 0: what of a trip's time the tokens pay that its guesses are expected to bring."""


@dataclass(frozen=True, slots=True)
class Term:
    """Cost term: one reason why a hop costs what it does."""

    name: str
    """One of TERM_NAMES."""
    ms: float
    in_tpot: bool
    """Whether every token waits for it. Otherwise it counts in the choice of a circuit only: what is paid
    once, or perhaps, is spread over the session's tokens (loading over `load_amortisation_tokens`)."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of a session: its lengths in tokens."""

    tokens: int
    """Most tokens that it may have, prompt and generation."""
    prompt_tokens: int
    prompt_assumed: bool = False

    @classmethod
    def of(cls, tokens: int, prompt_tokens: int | None = None) -> "Demand":
        """An unknown prompt is assumed to be half of the session. Raises ValueError for impossible lengths."""
        if tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {tokens}")
        if prompt_tokens is None:
            return cls(tokens, max(1, tokens // 2), prompt_assumed=True)
        if not 1 <= prompt_tokens <= tokens:
            raise ValueError(f"prompt_tokens must be in [1, {tokens}], got {prompt_tokens}")
        return cls(tokens, prompt_tokens)

    @property
    def new_tokens(self) -> int:
        """Tokens over which what is paid once is spread, at least 1."""
        return max(1, self.tokens - self.prompt_tokens)

    @property
    def prompt_part(self) -> float:
        """Tokens of the prompt for each new one."""
        return self.prompt_tokens / self.new_tokens


@dataclass(frozen=True, slots=True)
class PeerCosts:
    """Costs of a peer for a session, whatever its span. Milliseconds; per token unless it says otherwise."""

    layer_ms: float
    """One layer at batch size 1, with the session's mean context."""
    batched_layer_ms: float
    """One layer at the batch size that the session would make."""
    queue_ms: float
    """Waiting until the device is free."""
    transfer_ms: float
    """One token's activation on the uplink."""
    prefill_ms: float
    """All of the prompt's activations on the uplink, spread over the new tokens."""
    reliability_ms: float
    embed_ms: float
    head_ms: float
    service_ms: float
    """Serving the client, if it is the head."""
    client_link_ms: float
    """The round trip to the client once, spread over the new tokens, if it is the head."""
    fixed_ms: float = 0.0
    """Of the peer's step, whatever its layers."""

    @property
    def start_ms(self) -> float:
        """Added where the circuit starts."""
        return self.embed_ms + self.service_ms + self.client_link_ms

    @property
    def hop_ms(self) -> float:
        """Added for being used at all. The tail's uplink is charged too, although it returns a token only:
        which machine is the last is not known while the circuit grows."""
        return self.fixed_ms + self.queue_ms + self.transfer_ms + self.prefill_ms + self.reliability_ms

    def step_ms(self, layers: int, *, first: bool, last: bool) -> float:
        """Returns what every token waits for on a hop of so many layers, the link onwards apart; `first` and `last` say
        which ends of the model it has."""
        total = self.fixed_ms + layers * self.batched_layer_ms + self.queue_ms
        total += self.embed_ms + self.service_ms if first else 0.0
        return total + (self.head_ms if last else self.transfer_ms)


def peer_costs(
    view: PeerView,
    seen: PeerObservation,
    model: ModelSpec,
    demand: Demand,
    recovery_ms: float,
    cost: CostModel,
) -> PeerCosts:
    """The costs of a peer; `recovery_ms` is what its loss would cost the session (see `recovery_ms`)."""
    facts, new_tokens = view.facts, demand.new_tokens
    transfer_ms = transmission_ms(model.activation_bytes, seen, cost)
    session_s = new_tokens * cost.session_tpot_ms / 1000
    rate_per_s = loss_rate_per_s(seen.uptime_s, seen.losses, cost)
    lost = loss_probability(rate_per_s, view.age_s, session_s)
    context_ms = decode_context_ms(facts.decode_context_ms, (demand.prompt_tokens + demand.tokens) / 2)
    together = batch_size(view)
    layer_ms = batched_layer_ms = layer_ms_at(facts.layer_latencies, 1)
    if together > 1:
        batched_layer_ms = layer_ms_at(facts.layer_latencies, together)
    return PeerCosts(
        layer_ms=layer_ms + context_ms,
        batched_layer_ms=batched_layer_ms + context_ms,
        queue_ms=queue_ms(view, cost),
        transfer_ms=transfer_ms,
        prefill_ms=transfer_ms * demand.prompt_tokens / new_tokens,
        reliability_ms=lost * recovery_ms / new_tokens,
        embed_ms=facts.embed_ms,
        head_ms=facts.head_ms,
        service_ms=cost.head_service_ms / max(1, facts.device.processors),
        client_link_ms=client_rtt_ms(seen, cost) / new_tokens,
        fixed_ms=facts.step_ms,
    )


def batch_size(view: PeerView) -> int:
    """Sessions that would step together on the peer, the new one included."""
    return max(view.state.sessions, view.state.queued, 0) + 1


def queue_ms(view: PeerView, cost: CostModel) -> float:
    """Expected milliseconds until the device takes up a step that arrives now.

    Half of a step, if the device is busy: it is when steps wait, and otherwise with the probability of its
    utilisation, one step per session and `session_tpot_ms`. What waits goes together with the new step;
    beyond `steps_per_batch`, whole steps come before it. Steps go through all layers that the peer holds.
    """
    state = view.state
    if state.sessions <= 0 and state.queued <= 0:
        return 0.0
    held = sum(map(len, state.spans))
    latencies = view.facts.layer_latencies
    fixed_ms = view.facts.step_ms
    together_ms = fixed_ms + held * layer_ms_at(latencies, max(1, batch_size(view) - 1))
    busy = 1.0 if state.queued > 0 else utilisation(view, cost.session_tpot_ms)
    return together_ms * (busy / 2 + max(0, state.queued) // cost.steps_per_batch)


def utilisation(view: PeerView, tpot_ms: float) -> float:
    """Returns the part of its time, 0 to 1, in which a peer's device steps its sessions, each by itself once in
    `tpot_ms`, through all layers that it holds."""
    held, sessions = sum(map(len, view.state.spans)), max(0, view.state.sessions)
    alone_ms = view.facts.step_ms + held * layer_ms_at(view.facts.layer_latencies, 1)
    return min(1.0, sessions * alone_ms / tpot_ms) if tpot_ms > 0 else float(sessions > 0)


def transmission_ms(size_bytes: int, seen: PeerObservation, cost: CostModel) -> float:
    """Milliseconds that so many bytes take on the peer's uplink."""
    return size_bytes * 8 / (1000 * (seen.uplink_mbps or cost.unknown_bandwidth_mbps))


def client_rtt_ms(seen: PeerObservation, cost: CostModel) -> float:
    """The round trip between client and peer."""
    return cost.unknown_rtt_ms if seen.client_rtt_ms is None else seen.client_rtt_ms


def recovery_ms(views: Sequence[PeerView], model: ModelSpec, demand: Demand, cost: CostModel) -> float:
    """Returns what losing a hop halfway costs: another circuit, and the prefill of all that there was by then.

    That circuit is not known: its layers take what they take on the median peer, in chunks as long as that one takes
    them, and the activations cross one link at the assumed bandwidth, since the pipeline hides the others.
    """
    history = demand.prompt_tokens + (demand.tokens - demand.prompt_tokens) // 2
    layers_ms = (
        median(_recomputing_ms(view.facts, history, model.layers, cost) for view in views) if views else 0
    )
    sent_ms = transmission_ms(history * model.activation_bytes, PeerObservation(), cost)
    return cost.recovery_ms + layers_ms + sent_ms


def _recomputing_ms(facts: PeerFacts, tokens: int, layers: int, cost: CostModel) -> float:
    """Of so many layers for a history, in the fewest chunks that the peer takes."""
    chunks = -(-tokens // most_chunk_tokens([facts.step_tokens]))
    rows = -(-tokens // chunks)
    return chunks * layers * prefill_layer_ms(facts.layer_latencies, rows, cost, facts.prefill_latencies)
