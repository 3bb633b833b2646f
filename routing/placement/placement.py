"""Placement: which layers a machine should hold when it joins, and what that changes. Advice: the peer decides."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from molink.dht.records.records import (
    PROTOCOL_VERSION,
    AnnouncedDraft,
    Coordinate,
    DeviceProperties,
    LayerLatency,
    LinkMeasurement,
    PeerFacts,
    PeerState,
    PeerView,
    RelayAt,
    ServedModel,
)
from molink.routing.arrays import BoolArray, FloatArray
from molink.routing.cost.cost import CostModel
from molink.routing.cost.guesses import guessing_head
from molink.routing.cost.reliability import UNSEEN
from molink.routing.placement.coverage import (
    BestCircuit,
    Placement,
    layer_table,
    spans_of,
    thinness,
    weight_bytes,
)
from molink.routing.problem.circuit import format_bytes
from molink.routing.snapshot import Snapshot
from molink.shards.spec import GUESSES, ModelSpec, Span

SESSION_TOKENS = 512
"""Length of the session for which TPOT is predicted and KV memory must suffice, unless the model's is shorter."""
NOTICEABLE = 0.01
"""A TPOT that is better by less than this part is as good: capacity decides."""
_SEARCHED = 4
"""Spans whose TPOT is worked out because they give most capacity, besides those that suit the best circuit."""


@dataclass(frozen=True, slots=True)
class JoiningMachine:
    """Machine that joins: what it brings. Raises ValueError naming the field that makes no sense."""

    peer_id: str
    free_weight_bytes: int
    """Memory for weights that it does not hold yet."""
    free_kv_bytes: int
    """Memory for KV caches when the memory for weights is full."""
    layer_latencies: tuple[LayerLatency, ...]
    embed_ms: float = 0.0
    head_ms: float = 0.0
    step_ms: float = 0.0
    load_bytes_per_s: float = 1e9
    """How fast weights on its disk become layers that serve."""
    fetch_bytes_per_s: float | None = None
    """Its bandwidth for weights that are not on its disk; None: they are."""
    rtt_ms: Mapping[str, float] = field(default_factory=dict)
    """Measured or predicted round trips to peers, by peer id. Others are assumed as the cost model says."""
    coordinate: Coordinate | None = None
    span_limit: Span | None = None
    """Layers that it is willing to hold; None: any."""
    held: tuple[Span, ...] = ()
    """Layers that it holds already: no byte of them is fetched again."""
    relays: tuple[RelayAt, ...] = ()
    """Where it is asked for, if nobody can dial it."""
    cone: bool = False
    """Whether it can punch holes, if nobody can dial it."""
    drafts: tuple[AnnouncedDraft, ...] = ()
    """What it would guess tokens with where it is the head."""

    def __post_init__(self) -> None:
        for name in ("free_weight_bytes", "free_kv_bytes", "embed_ms", "head_ms", "step_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        for name in ("load_bytes_per_s", "fetch_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and above 0, got {value}")
        times = [latency.layer_ms for latency in self.layer_latencies]
        if not times or not all(math.isfinite(time) and time >= 0 for time in times):
            raise ValueError(f"layer_latencies must hold finite times, at least one, got {times}")


@dataclass(frozen=True, slots=True)
class JoinPreview:
    """The span that would help most, and what it would change."""

    span: Span | None
    """None: not a single layer with its KV cache fits."""
    tpot_before_ms: float | None
    """Predicted TPOT of the best circuit; None: there is no circuit."""
    tpot_after_ms: float | None
    tokens_per_s_before: float
    """Of the layer that its holders can take the fewest tokens through; 0 where nobody holds one."""
    tokens_per_s_after: float
    fetch_bytes: int
    """Weights of the span that the machine does not hold."""
    ready_s: float
    """Predicted seconds until it serves the span."""
    reason: str
    """A sentence for people."""
    guessed_without_draft_ms: float | None = None
    """Predicted TPOT of the best circuit where tokens are guessed, if the machine had no draft model of its own; None:
    it has none, or there is no circuit."""
    guessed_with_draft_ms: float | None = None
    """The same with its draft model: lower where it would be the head."""


def preview_join(
    snapshot: Snapshot,
    machine: JoiningMachine,
    *,
    tokens: int | None = None,
    cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
) -> JoinPreview:
    """The span that helps the swarm most if the machine joins.

    What makes a circuit possible goes first, or else what covers the most layers that nobody holds; then a lower
    TPOT; then capacity where it is least. Spans are as long as memory allows; in a swarm that holds nothing it is
    the first layers. TPOT is that of the best circuit for a session of `tokens` tokens (None: SESSION_TOKENS), which
    may have peers load further layers into free memory. Where the machine has a draft model, the preview says what that
    changes where tokens are guessed; the span does not depend on it. Raises ValueError if `tokens` is below 1.
    """
    tokens = min(SESSION_TOKENS, snapshot.model.context_length) if tokens is None else tokens
    placement = Placement.of(snapshot, _as_peer(machine, snapshot.model), tokens, cost)
    held = layer_table(snapshot.model.layers, machine.held)
    candidates = placement.candidates(held)
    if not candidates:
        before = placement.without()
        reason = "Not a single layer with its KV cache fits"
        return _preview(placement, machine, None, before, before, reason)
    if not placement.other_rates.any():
        span = candidates[0]
        return _preview(
            placement, machine, span, placement.without(),
            placement.holding(held | layer_table(len(held), (span,))),
            "Nobody holds a layer yet: as many as fit, from the first one on",
        )  # fmt: skip
    span, before, after = _choose(placement, candidates, held)
    return _preview(placement, machine, span, before, after, "")


def _choose(
    placement: Placement, candidates: Sequence[Span], held: BoolArray
) -> tuple[Span, BestCircuit | None, BestCircuit | None]:
    """The best candidate, the best circuit of the others, and the best one with the candidate."""
    layers = placement.model.layers

    def with_span(span: Span) -> BoolArray:
        return held | layer_table(layers, (span,))

    def merit(span: Span) -> tuple[object, ...]:
        table = with_span(span)
        return (thinness(placement.rates(table)), -weight_bytes(placement.model, table), -span.start)

    by_merit = sorted(candidates, key=merit, reverse=True)
    most = by_merit[0]
    after = before = placement.holding(with_span(most))
    if after is None or after.own_hop is not None or most.start in after.stops:
        before = (
            placement.without()
        )  # else it is the same: without the machine, and nobody stops where it begins
    before_ms = math.inf if before is None else before.tpot_ms
    found = [] if after is None else [(most, after)]
    below_ms = min([before_ms, *(best.tpot_ms * (1 + NOTICEABLE) for _, best in found)])
    for span in _searched(placement, by_merit, held, below_ms):
        # The circuit of the others remains, and what is not as good as another span is not chosen.
        best = placement.holding(with_span(span), below_ms)
        if best is not None:
            found.append((span, best))
            below_ms = min(below_ms, best.tpot_ms * (1 + NOTICEABLE))
    as_quick_ms = min((best.tpot_ms for _, best in found), default=math.inf) * (1 + NOTICEABLE)
    if not found or before_ms <= as_quick_ms:
        return most, before, after
    span, after = max((one for one in found if one[1].tpot_ms <= as_quick_ms), key=lambda one: merit(one[0]))
    return span, before, after


def _searched(placement: Placement, by_merit: Sequence[Span], held: BoolArray, below_ms: float) -> list[Span]:
    """The candidates whose TPOT is worked out beside that of the first one.

    Those that suit the best circuit that there would be if the machine loaded what is wanted, and none if that is not
    noticeably below `below_ms`. Where the search tries all spans, one of them is proven to be as good as any.
    """
    possible = placement.holding(held, below_ms * (1 - NOTICEABLE))
    if possible is None:
        return []
    searched = list(by_merit[1:_SEARCHED])
    if possible.own_hop is not None:
        hop = possible.own_hop.span
        touching = sorted((span for span in by_merit if span.covers(hop)), key=lambda span: span.start)
        searched += [span for span in touching[:1] + touching[-1:] if span not in searched]
    return [span for span in dict.fromkeys(searched) if span != by_merit[0]]


def _preview(
    placement: Placement,
    machine: JoiningMachine,
    span: Span | None,
    before: BestCircuit | None,
    after: BestCircuit | None,
    reason: str,
) -> JoinPreview:
    model = placement.model
    held = layer_table(model.layers, machine.held)
    table = held if span is None else held | layer_table(model.layers, (span,))
    old_rates, rates = placement.other_rates, placement.rates(table)
    without_ms, with_ms = _guessed(placement, machine, table)
    if before is not None and (after is None or after.tpot_ms > before.tpot_ms):
        after = before  # the circuit of the others is still there
    missing = weight_bytes(model, table) - weight_bytes(model, held)
    fetch_s = missing / machine.fetch_bytes_per_s if machine.fetch_bytes_per_s else 0.0
    return JoinPreview(
        span=span,
        tpot_before_ms=None if before is None else before.tpot_ms,
        tpot_after_ms=None if after is None else after.tpot_ms,
        tokens_per_s_before=float(old_rates.min()),
        tokens_per_s_after=float(rates.min()),
        fetch_bytes=missing,
        ready_s=fetch_s + missing / machine.load_bytes_per_s,
        reason=reason or _why(old_rates, rates, before, after),
        guessed_without_draft_ms=without_ms,
        guessed_with_draft_ms=with_ms,
    )


def _guessed(
    placement: Placement, machine: JoiningMachine, table: BoolArray
) -> tuple[float | None, float | None]:
    """The best circuit's time per token where tokens are guessed, without the machine's draft model and with it."""
    models = [one for one in machine.drafts if one.tokenizer]
    if not models:
        return None, None
    facts = placement.view.facts
    others = replace(facts, drafts=tuple(one for one in machine.drafts if one not in models))
    cost = placement.cost
    without = placement.guessed_ms(table, guessing_head(others, UNSEEN, cost))
    return without, placement.guessed_ms(table, guessing_head(facts, UNSEEN, cost))


def _why(
    old_rates: FloatArray, rates: FloatArray, before: BestCircuit | None, after: BestCircuit | None
) -> str:
    covered = ", ".join(map(str, spans_of((old_rates == 0) & (rates > 0))))
    if before is None and after is not None:
        return "It makes a circuit possible" + (f": nobody held layers {covered}" if covered else "")
    if before is None:
        missing = ", ".join(map(str, spans_of(rates == 0)))
        covers = f"It covers layers {covered} that nobody held" if covered else "It adds capacity"
        return covers + (
            f"; {missing} are still missing" if missing else "; memory is still short for a circuit"
        )
    if after is not None and after.tpot_ms < before.tpot_ms * (1 - NOTICEABLE):
        return f"It lowers the predicted TPOT from {before.tpot_ms:.1f} to {after.tpot_ms:.1f} ms"
    if covered:
        return f"Nobody held layers {covered} yet: others would have had to load them"
    thin = spans_of(old_rates <= old_rates.min() * (1 + NOTICEABLE))
    return f"Capacity is least at layers {', '.join(map(str, thin))}"


def _as_peer(machine: JoiningMachine, model: ModelSpec) -> PeerView:
    """The machine as it would announce itself, had it joined with what it holds."""
    facts = PeerFacts(
        peer_id=machine.peer_id,
        public_key=b"",
        sequence=0,
        ttl_s=1,
        protocol_version=PROTOCOL_VERSION,
        version="",
        name="",
        addresses=(),
        grpc_addresses=(),
        certificate=b"",
        device=DeviceProperties("", "", 1, 0, "", 1),
        model=ServedModel.of(model),
        span_limit=machine.span_limit,
        layer_latencies=machine.layer_latencies,
        embed_ms=machine.embed_ms,
        head_ms=machine.head_ms,
        step_ms=machine.step_ms,
        load_bytes_per_s=machine.load_bytes_per_s,
        links=tuple(LinkMeasurement(peer_id, rtt_ms) for peer_id, rtt_ms in machine.rtt_ms.items()),
        coordinate=machine.coordinate,
        relays=machine.relays,
        cone=machine.cone,
        sampling_abilities=(GUESSES,),
        drafts=machine.drafts,
    )
    state = PeerState(
        peer_id=machine.peer_id,
        sequence=0,
        ttl_s=1,
        facts_sequence=0,
        spans=machine.held,
        free_weight_bytes=machine.free_weight_bytes,
        free_kv_bytes=machine.free_kv_bytes,
        sessions=0,
        queued=0,
    )
    return PeerView(facts, state, age_s=0.0)


def describe_preview(preview: JoinPreview) -> str:
    """One line for people: the span, TPOT before and after, bytes, and why."""
    if preview.span is None:
        return f"Holding no layers from the start. {preview.reason}"

    def shown(tpot_ms: float | None) -> str:
        return "no circuit" if tpot_ms is None else f"predicted TPOT {tpot_ms:.1f} ms"

    return (
        f"Taking layers {preview.span} ({format_bytes(preview.fetch_bytes)}): {shown(preview.tpot_before_ms)} before, "
        f"{shown(preview.tpot_after_ms)} after. {preview.reason}{_of_draft(preview)}"
    )


def _of_draft(preview: JoinPreview) -> str:
    """What the machine's draft model changes, as a further sentence; nothing without one."""
    without_ms, with_ms = preview.guessed_without_draft_ms, preview.guessed_with_draft_ms
    if without_ms is None or with_ms is None:
        return ""
    if with_ms >= without_ms * (1 - NOTICEABLE):
        return ". Its draft model changes nothing: the best circuit has another head"
    return f". With its draft model, where tokens are guessed: {with_ms:.1f} ms in place of {without_ms:.1f}"
