"""Preview of circuits: over which peers they would go, what these would load, and what is missing. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from molink.client.api.peer_requirements import PeerRequirements
from molink.dht.records.records import PeerView
from molink.routing import NoCircuit, Route
from molink.routing.cost.terms import Demand
from molink.routing.routes.planner import plan
from molink.routing.routes.shortlist import narrowed
from molink.routing.snapshot import Snapshot
from molink.shards.spec import ModelSpec, Span, merge_spans


@dataclass(frozen=True, slots=True)
class CircuitsPreview:
    """Preview of circuits that are to stand at the same time; nothing is asked of anybody for it."""

    spec: ModelSpec
    wanted: int
    """Circuits."""
    tokens: int
    """For which each is to have room."""
    routes: tuple[Route, ...]
    """Of those that there is room for now."""
    missing_bytes: int = 0
    """What a further peer would have to have free, weights and KV caches together, for one more circuit; 0: nothing is
    missing, or not memory."""
    missing_layers: tuple[Span, ...] = ()
    """That no peer could serve."""
    reason: str = ""
    """Why there are fewer circuits than wanted; empty: there are as many."""

    @property
    def is_possible(self) -> bool:
        """Whether there is room for all of them."""
        return not self.reason

    @property
    def load_bytes(self) -> int:
        """Weights that peers would load."""
        return sum(
            self.spec.weight_bytes(span)
            for route in self.routes
            for hop in route.hops
            for span in hop.cold_spans
        )

    def describe(self) -> dict[str, Any]:
        """Returns it JSON-ready."""
        return {
            "possible": self.is_possible,
            "reason": self.reason or None,
            "missing_bytes": self.missing_bytes,
            "missing_layers": [[span.start, span.stop] for span in self.missing_layers],
            "circuits_wanted": self.wanted,
            "tokens_per_circuit": self.tokens,
            "load_bytes": self.load_bytes,
            "circuits": [self._describe_route(route) for route in self.routes],
        }

    def _describe_route(self, route: Route) -> dict[str, Any]:
        return {
            "predicted_tpot_ms": round(route.tpot_ms, 3),
            "predicted_ttft_ms": round(route.ttft_ms, 3),
            "load_s": round(route.load_s, 3),
            "hops": [
                {
                    "peer_id": hop.peer_id,
                    "start": hop.span.start,
                    "stop": hop.span.stop,
                    "load_bytes": sum(map(self.spec.weight_bytes, hop.cold_spans)),
                    "kv_bytes": self.spec.kv_bytes(hop.span, self.tokens),
                }
                for hop in route.hops
            ],
        }


def preview_circuits(
    views: Sequence[PeerView], spec: ModelSpec, requirements: PeerRequirements, wanted: int, tokens: int
) -> CircuitsPreview:
    """Plans so many circuits for sessions of `tokens` tokens, each in what those before leave of the peers' memory."""
    left = {
        view.peer_id: view
        for view in views
        if view.facts.model.model_hash == spec.model_hash and requirements.met_by(view.facts)
    }
    routes: list[Route] = []
    lacking = requirements.missing_gpus(view.facts for view in left.values())
    if lacking:
        named = f" {requirements.gpu}" if requirements.gpu else ""
        reason = (
            f"{lacking} of {requirements.gpu_count}{named} GPUs are missing among the peers of this model"
        )
        return CircuitsPreview(spec, wanted, tokens, (), reason=reason)
    demand = Demand.of(tokens)
    for _ in range(wanted):
        try:
            route = plan(narrowed(Snapshot(tuple(left.values()), spec), demand), tokens)
        except NoCircuit as cause:
            return CircuitsPreview(
                spec, wanted, tokens, tuple(routes), cause.missing_bytes, cause.missing_layers, str(cause)
            )
        routes.append(route)
        for hop in route.hops:
            left[hop.peer_id] = _taken(left[hop.peer_id], spec, hop.span, hop.cold_spans, tokens)
    return CircuitsPreview(spec, wanted, tokens, tuple(routes))


def _taken(view: PeerView, spec: ModelSpec, span: Span, cold: Sequence[Span], tokens: int) -> PeerView:
    """The peer with that hop's lease, and its layers loaded."""
    state = view.state
    held = tuple(merge_spans((*state.spans, *cold)))
    loaded_bytes = spec.held_bytes(held) - spec.held_bytes(state.spans)
    kv_bytes = spec.kv_bytes(span, tokens)
    from_weights = max(0, kv_bytes - state.free_kv_bytes)
    left = replace(
        state,
        spans=held,
        sessions=state.sessions + 1,
        free_kv_bytes=max(0, state.free_kv_bytes - kv_bytes),
        free_weight_bytes=max(0, state.free_weight_bytes - loaded_bytes - from_weights),
    )
    return replace(view, state=left)
