"""The swarm as JSON-ready values: for `status`, the gateway, and whoever asks."""

from collections.abc import Sequence
from heapq import heapreplace
from itertools import accumulate
from typing import Any

from molink.dht.records.records import PROTOCOL_VERSION, PeerFacts, PeerView
from molink.shards.spec import Span, missing_spans


def describe_swarm(views: Sequence[PeerView]) -> dict[str, Any]:
    """The peers that are known, and of each model the layers that nobody holds who answers, and disjoint circuits of
    those who answer. JSON-ready."""
    models: dict[str, list[PeerView]] = {}
    for view in views:
        if view.facts.protocol_version != PROTOCOL_VERSION:
            continue  # it can be in no circuit of ours
        models.setdefault(view.facts.model.model_hash, []).append(view)
    return {
        "models": [_describe_model(holders) for holders in models.values()],
        "peers": [describe_peer(view) for view in sorted(views, key=_order)],
    }


def describe_peer(view: PeerView) -> dict[str, object]:
    """One peer, JSON-ready."""
    facts, state = view.facts, view.state
    return {
        "peer_id": view.peer_id,
        "name": facts.name,
        "model": facts.model.name,
        "model_hash": facts.model.model_hash,
        "dtype": facts.model.dtype,
        "quantization": facts.model.quantization,
        "device": facts.device.name,
        "region": facts.region or None,
        "version": facts.version,
        "same_protocol": facts.protocol_version == PROTOCOL_VERSION,
        "addresses": list(facts.addresses),
        "spans": [[span.start, span.stop] for span in state.spans],
        "free_weight_bytes": state.free_weight_bytes,
        "free_kv_bytes": state.free_kv_bytes,
        "sessions": state.sessions,
        "queued": state.queued,
        "draining": state.draining,
        "layer_ms": facts.layer_latencies[0].layer_ms if facts.layer_latencies else None,
        "uplink_mbps": facts.uplink_mbps,
        "activation_codecs": list(facts.activation_codecs),
        "sampling_abilities": list(facts.sampling_abilities),
        "drafts": [
            {
                "name": one.name,
                "tokenizer": one.tokenizer.hex() or None,
                "guess_ms": _short(one.guess_ms),
            }
            for one in facts.drafts
        ],
        "keeps_copies": facts.keeps_copies,
        "pairs": facts.pairs,
        "partner": facts.partner_peer_id or None,
        "age_s": round(view.age_s, 1),
        "answers": view.answers,
        **_describe_costs(facts),
    }


def _describe_costs(facts: PeerFacts) -> dict[str, object]:
    """Describes what else a router counts with. Times by batch size or by tokens are under the number in decimal."""
    limit, place = facts.span_limit, facts.coordinate
    return {
        "processors": facts.device.processors,
        "span_limit": None if limit is None else [limit.start, limit.stop],
        "layer_ms_by_batch_size": {
            str(one.batch_size): _short(one.layer_ms) for one in facts.layer_latencies
        },
        "prefill_layer_ms": {str(one.tokens): _short(one.layer_ms) for one in facts.prefill_latencies},
        "decode_context_ms": _short(facts.decode_context_ms),
        "prefill_context_ms": _short(facts.prefill_context_ms),
        "step_ms": _short(facts.step_ms),
        "step_tokens": facts.step_tokens,
        "embed_ms": _short(facts.embed_ms),
        "head_ms": _short(facts.head_ms),
        "load_bytes_per_s": _short(facts.load_bytes_per_s),
        "coordinate": None
        if place is None
        else {
            "position": [_short(part) for part in place.position],
            "height_ms": _short(place.height_ms),
            "error": _short(place.error),
        },
    }


def _short(value: float) -> float:
    """Six significant digits, more than are announced."""
    return float(f"{value:.6g}")


def _describe_model(holders: Sequence[PeerView]) -> dict[str, object]:
    model = holders[0].facts.model
    answering = [view for view in holders if view.answers]
    held = tuple(span for view in answering for span in view.state.spans)
    missing = missing_spans(Span(0, model.layers), held)
    return {
        "model": model.name,
        "model_hash": model.model_hash,
        "layers": model.layers,
        "peers": len(answering),
        "missing": [[span.start, span.stop] for span in missing],
        "complete": not missing,
        "circuits": [
            {"hops": [{"peer_id": peer_id, "start": hop.start, "stop": hop.stop} for peer_id, hop in circuit]}
            for circuit in disjoint_circuits(answering, model.layers)
        ],
    }


def disjoint_circuits(views: Sequence[PeerView], layers: int) -> list[list[tuple[str, Span]]]:
    """As many circuits as can stand at once of layers that are held, each peer in one of them at most, with the longest
    of its spans; who drains or answers nothing is in none.

    There are as many as the layer that the fewest hold has holders: spans, by where they begin, each go to the circuit
    that has come least far, which leaves none behind.
    """
    held = sorted(
        (span, view.peer_id)
        for view in views
        if view.state.spans and view.answers and not view.state.draining
        if (span := max(view.state.spans, key=len)).stop <= layers
    )
    changes = [0] * (layers + 1)
    for span, _ in held:
        changes[span.start] += 1
        changes[span.stop] -= 1
    circuits = [(0, number) for number in range(min(accumulate(changes[:layers])))]
    holders: list[list[tuple[Span, str]]] = [[] for _ in circuits]
    for span, peer_id in held:
        if circuits and circuits[0][0] < span.stop:
            _, number = circuits[0]
            holders[number].append((span, peer_id))
            heapreplace(circuits, (span.stop, number))
    return [_fewest(its, layers) for its in holders]


def _fewest(holders: Sequence[tuple[Span, str]], layers: int) -> list[tuple[str, Span]]:
    """The hops of a circuit over as few of these holders as can be, which cover the layers together."""
    hops: list[tuple[str, Span]] = []
    reached = 0
    while reached < layers:
        stop, peer_id = max((span.stop, peer_id) for span, peer_id in holders if span.start <= reached)
        hops.append((peer_id, Span(reached, stop)))
        reached = stop
    return hops


def _order(view: PeerView) -> tuple[str, int, str]:
    start = view.state.spans[0].start if view.state.spans else view.facts.model.layers
    return view.facts.model.name, start, view.peer_id
