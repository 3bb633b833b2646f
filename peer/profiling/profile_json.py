"""Profiles as JSON values, in which a peer remembers them."""

from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.peer.profiling.profile import FLOOR_MS, Profile, SliceLatency


def to_json(profile: Profile) -> dict[str, object]:
    """The profile as JSON values, units in the names."""
    return {
        "layer_ms": {str(latency.batch_size): latency.layer_ms for latency in profile.layer_latencies},
        "prefill_layer_ms": {str(latency.tokens): latency.layer_ms for latency in profile.prefill_latencies},
        "embed_ms": profile.embed_ms,
        "head_ms": profile.head_ms,
        "step_ms": profile.step_ms,
        "load_bytes_per_s": profile.load_bytes_per_s,
        "decode_context_ms": profile.decode_context_ms,
        "prefill_context_ms": profile.prefill_context_ms,
        "threads": profile.threads,
        "pieces": [[one.tokens, one.layer_ms, one.context_ms] for one in profile.slice_latencies],
    }


def from_json(content: object) -> Profile | None:
    """A remembered profile; None if there is none, or if it is damaged."""
    if not isinstance(content, dict):
        return None
    try:
        layer_ms = {int(size): float(layer_ms) for size, layer_ms in content["layer_ms"].items()}
        prefill_ms = {
            int(tokens): float(layer_ms) for tokens, layer_ms in content["prefill_layer_ms"].items()
        }
        embed_ms, head_ms, load = (
            float(content[name]) for name in ("embed_ms", "head_ms", "load_bytes_per_s")
        )
        threads, step_ms = int(content["threads"]), float(content.get("step_ms", 0.0))
        contexts_ms = (float(content["decode_context_ms"]), float(content["prefill_context_ms"]))
        pieces = tuple(
            SliceLatency(int(tokens), float(layer_ms), float(context_ms))
            for tokens, layer_ms, context_ms in content["pieces"]
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    values = (*layer_ms.values(), *prefill_ms.values(), embed_ms, head_ms, load)
    if min(layer_ms, default=0) != 1 or not all(value >= FLOOR_MS for value in values):
        return None
    if not all(value >= 0 for value in (step_ms, *contexts_ms, *(one.context_ms for one in pieces))):
        return None
    if threads < 1 or not all(one.tokens > 0 and one.layer_ms >= FLOOR_MS for one in pieces):
        return None
    prefills = tuple(PrefillLatency(*pair) for pair in sorted(prefill_ms.items()))
    latencies = tuple(LayerLatency(*pair) for pair in sorted(layer_ms.items()))
    return Profile(latencies, embed_ms, head_ms, load, prefills, *contexts_ms, pieces, threads, step_ms)
