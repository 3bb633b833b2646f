"""A circuit in terms of peers, with what each hop is predicted to take and why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from molink.routing.cost.cost import CostModel
from molink.routing.cost.encodings import encodings_of_circuit
from molink.routing.cost.first_token import first_token_ms, prompt_chunks
from molink.routing.cost.pipeline import PipelineStage, stage_of
from molink.routing.cost.terms import Term, client_rtt_ms
from molink.routing.latency.relayed_links import RelayOffer
from molink.routing.problem.circuit import Hop
from molink.routing.problem.problem import load_ms
from molink.routing.routes.guessed_trips import GuessedTrip, guessed_trip
from molink.routing.snapshot import PosedProblem, Snapshot
from molink.shards.spec import Span, missing_spans


@dataclass(frozen=True, slots=True)
class RouteHop:
    """A span on a peer, and the predicted milliseconds of one decode step there."""

    peer_id: str
    span: Span
    cold_spans: tuple[Span, ...]
    """Layers of the span that the peer must load first; with layer 0 the embedding, with the last layer the
    head."""
    compute_ms: float
    """All layers of the span, with the embedding on the first hop and the head on the last."""
    link_ms: float
    """To the next hop, from the last one back to the first; 0 if the circuit has one hop."""
    terms: tuple[Term, ...] = ()
    """All that was charged for this hop when the circuit was chosen; `compute_ms` and `link_ms` are in it."""
    assumed: tuple[str, ...] = ()
    """What nobody has measured, each with the value that was assumed in its place."""
    measured: tuple[str, ...] = ()
    """What is assumed of other peers and was measured of this one, each with its value."""
    uplink_mbps: float | None = None
    """What the peer's line carries away from it; None if nobody has measured it."""
    relay: RelayOffer | None = None
    """Over which the link to the next hop is predicted to go; None: it is direct."""


@dataclass(frozen=True, slots=True)
class Route:
    """A circuit over peers: hops in order."""

    hops: tuple[RouteHop, ...]
    tpot_ms: float
    """The sum of all terms that every token waits for."""
    load_s: float
    """Seconds until the slowest peer has loaded what is cold, all loading side by side; 0 if all is warm."""
    ttft_ms: float = 0.0
    """From the start of the ready circuit to the first token at the client."""
    tokens_per_trip: float = 1.0
    """That a time round the circuit is predicted to bring; above 1 where guesses travel."""

    @property
    def trip_ms(self) -> float:
        """Once round, without what guesses cost: what the tokens of a trip share."""
        saved_ms = sum(term.ms for hop in self.hops for term in hop.terms if term.name == "guesses")
        return self.tpot_ms - saved_ms

    @property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(hop.peer_id for hop in self.hops)

    @property
    def warm(self) -> bool:
        """Whether the route can serve at once."""
        return not any(hop.cold_spans for hop in self.hops)

    @property
    def objective_ms(self) -> float:
        """The sum of all terms: by this the circuit was chosen."""
        return sum(term.ms for hop in self.hops for term in hop.terms)


def route_of(
    posed: PosedProblem,
    hops: Sequence[Hop],
    snapshot: Snapshot,
    cost: CostModel,
    activation_codec: str = "",
    *,
    guesses: bool = False,
) -> Route:
    """The route that a circuit of the problem stands for, for a session that asks for this codec, and whose tokens may
    be guessed or not."""
    links_ms = _links_ms(posed, hops)
    stages = _stages(posed, hops, links_ms, snapshot, cost, activation_codec)
    lengths = prompt_chunks(stages, posed.demand.prompt_tokens)
    routed = tuple(
        _route_hop(posed, hops, position, snapshot, cost, link_ms, max(lengths))
        for position, link_ms in enumerate(links_ms)
    )
    head, costs = snapshot.seen(posed.views[hops[0].machine]), [posed.costs[hop.machine] for hop in hops]
    waits_ms = client_rtt_ms(head, cost) + costs[0].service_ms + sum(each.queue_ms for each in costs)
    first_ms = first_token_ms(stages, lengths, waits_ms, cost)
    terms = chain.from_iterable(hop.terms for hop in routed)
    tpot_ms = sum(term.ms for term in terms if term.in_tpot)
    route = Route(routed, tpot_ms, load_ms(posed.problem, hops) / 1000.0, first_ms)
    return _with_guesses(route, guessed_trip(posed, hops, snapshot, cost, tpot_ms)) if guesses else route


def _with_guesses(route: Route, trip: GuessedTrip) -> Route:
    """The route as its head's guesses make it."""
    if not trip.guesses:
        return route
    head, said = route.hops[0], (trip.said,)
    shared = replace(
        head,
        terms=(*head.terms, Term("guesses", trip.token_ms - route.tpot_ms, in_tpot=True)),
        measured=head.measured + (said if trip.head.trips else ()),
        assumed=head.assumed + (() if trip.head.trips else said),
    )
    hops = (shared, *route.hops[1:])
    return replace(route, hops=hops, tpot_ms=trip.token_ms, tokens_per_trip=trip.tokens)


def _stages(
    posed: PosedProblem,
    hops: Sequence[Hop],
    links_ms: Sequence[float],
    snapshot: Snapshot,
    cost: CostModel,
    activation_codec: str,
) -> list[PipelineStage]:
    """The circuit as its head will see it, by the session's descriptor."""
    model, views = snapshot.model, [posed.views[hop.machine] for hop in hops]
    announced = [view.facts.activation_codecs for view in views]
    return [
        stage_of(view.facts, hop.span, model, link_ms, mbps, encoding=encoding)
        for hop, view, link_ms, mbps, encoding in zip(
            hops,
            views,
            links_ms,
            _sent_at_mbps(posed, hops, snapshot, cost),
            encodings_of_circuit(activation_codec, model.dtype, announced),
            strict=True,
        )
    ]


def _sent_at_mbps(
    posed: PosedProblem, hops: Sequence[Hop], snapshot: Snapshot, cost: CostModel
) -> list[float | None]:
    """What each hop's link carries of a prompt: the hop's uplink, or its relay's share if that is less; None: nobody
    knows."""
    found: list[float | None] = []
    for hop, following in _linked(hops):
        uplink_mbps = snapshot.seen(posed.views[hop.machine]).uplink_mbps
        relay = posed.links.relay(hop.machine, following.machine)
        if relay is not None:
            uplink_mbps = min(relay.mbps, uplink_mbps or cost.unknown_bandwidth_mbps)
        found.append(uplink_mbps)
    return found


def _linked(hops: Sequence[Hop]) -> list[tuple[Hop, Hop]]:
    """Each hop and the next, from the last one back to the first."""
    return list(zip(hops, (*hops[1:], hops[0]), strict=True))


def _route_hop(
    posed: PosedProblem,
    hops: Sequence[Hop],
    position: int,
    snapshot: Snapshot,
    cost: CostModel,
    link_ms: float,
    chunk_tokens: int,
) -> RouteHop:
    """`chunk_tokens` are those of the prompt's longest chunk."""
    hop, following = hops[position], hops[(position + 1) % len(hops)]
    problem, view, costs = posed.problem, posed.views[hop.machine], posed.costs[hop.machine]
    first, last = hop.start == 0, hop.stop == problem.layers
    layers = hop.stop - hop.start
    relay_ms, prompt_relay_ms = posed.relay_of(hop.machine, following.machine)
    compute = [
        Term("layers", layers * costs.layer_ms, in_tpot=True),
        Term("batching", layers * (costs.batched_layer_ms - costs.layer_ms), in_tpot=True),
        Term("step", costs.fixed_ms, in_tpot=True),
    ]
    compute += [Term("embedding", costs.embed_ms, in_tpot=True)] if first else []
    compute += [Term("head", costs.head_ms, in_tpot=True)] if last else []
    terms = [
        *compute,
        Term("queue", costs.queue_ms, in_tpot=True),
        Term("link", link_ms, in_tpot=True),
        Term("relay", relay_ms, in_tpot=not last),
        # the tail returns a token, not an activation: it is charged for what it does not send
        Term("transfer", costs.transfer_ms, in_tpot=not last),
        Term("prefill", costs.prefill_ms + prompt_relay_ms * posed.demand.prompt_part, in_tpot=False),
        Term("loading", _loading_ms(posed, hop) * problem.load_weight, in_tpot=False),
        Term("reliability", costs.reliability_ms, in_tpot=False),
    ]
    if first:
        terms += [
            Term("service", costs.service_ms, in_tpot=True),
            Term("client link", costs.client_link_ms, in_tpot=False),
        ]
    uplink_mbps = snapshot.seen(view).uplink_mbps
    return RouteHop(
        peer_id=view.peer_id,
        span=hop.span,
        cold_spans=missing_spans(hop.span, view.state.spans),
        compute_ms=sum(term.ms for term in compute),
        link_ms=link_ms,
        terms=tuple(term for term in terms if term.ms != 0.0),
        assumed=_assumed(
            posed, hop, snapshot, cost, (following.machine, link_ms) if len(hops) > 1 else None, chunk_tokens
        ),
        measured=() if uplink_mbps is None else (f"an uplink of {uplink_mbps:g} Mbps",),
        uplink_mbps=uplink_mbps,
        relay=posed.links.relay(hop.machine, following.machine),
    )


def _links_ms(posed: PosedProblem, hops: Sequence[Hop]) -> list[float]:
    """One way from each hop to the next, from the last one back to the first; 0 if there is one hop."""
    if len(hops) == 1:
        return [0.0]
    machines = np.array([hop.machine for hop in hops])
    links_ms: list[float] = posed.links.latency_ms[machines, np.roll(machines, -1)].tolist()
    return links_ms


def _loading_ms(posed: PosedProblem, hop: Hop) -> float:
    """Milliseconds that the hop's peer loads, whatever the others do."""
    return load_ms(posed.problem, (hop,))


def _assumed(
    posed: PosedProblem,
    hop: Hop,
    snapshot: Snapshot,
    cost: CostModel,
    link: tuple[int, float] | None,
    chunk_tokens: int,
) -> tuple[str, ...]:
    """`link` is the machine of the next hop, and the milliseconds to it; None: there is one hop."""
    view = posed.views[hop.machine]
    seen = snapshot.seen(view)
    said = []
    if link is not None and not snapshot.measured(view, posed.views[link[0]]):
        relay = posed.links.relay(hop.machine, link[0])
        over = "" if relay is None else f" over the relay of {relay.name}, with {relay.mbps:.2g} Mbps of it"
        said.append(f"a round trip of {2 * (link[1] - cost.hop_overhead_ms):.0f} ms to the next hop{over}")
    if seen.uplink_mbps is None:
        said.append(f"an uplink of {cost.unknown_bandwidth_mbps:g} Mbps")
    if seen.uptime_s == 0 and seen.losses == 0:
        said.append(f"that it stays for {cost.mean_lifetime_s / 3600:g} h on average")
    if hop.start == 0 and seen.client_rtt_ms is None:
        said.append(f"a round trip of {cost.unknown_rtt_ms:g} ms to the client")
    facts = view.facts
    largest = max(latency.batch_size for latency in facts.layer_latencies)
    if chunk_tokens > largest and not facts.prefill_latencies:
        said.append(f"the time of {chunk_tokens} rows from batches of {largest} at most")
    if hop.start == 0 and posed.demand.prompt_assumed:
        said.append(f"a prompt of {posed.demand.prompt_tokens} tokens")
    return tuple(said)
