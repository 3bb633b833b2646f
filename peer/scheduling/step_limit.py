"""How many tokens of a prompt a peer on a GPU takes in one step: more where its profile says that this pays. Pure.

A hop computes a chunk whole, so that its own time and work space bound it, and heads cut prompts to the least of what
the hops of a circuit announce. Longer steps read the weights for more tokens, until products are what takes the time.
"""

from collections.abc import Sequence

from molink.dht.records.records import PrefillLatency
from molink.peer.memory.memory import workspace_bytes
from molink.peer.scheduling.prefill_window import WINDOW_BYTES
from molink.shards.spec import MAX_STEP_TOKENS, ModelSpec

WORTH = 0.9
"""A token of a step twice as long must take at most so much of the time."""
MOST_STEP_MS = 500.0
"""A step through all layers of the model takes at most this long: others' decode steps wait for it where it is not
computed in pieces."""
WORKSPACE_SHARE = 0.05
"""Of the memory, at most, for a step's work space."""


def longest_step(
    spec: ModelSpec, latencies: Sequence[PrefillLatency], step_ms: float, memory_bytes: int
) -> int:
    """The most tokens of a step: MAX_STEP_TOKENS, doubled as long as `latencies`, of one layer beside `step_ms` of the
    whole step, say that it pays, `memory_bytes` have room for it, and its rows fit the window of prefill that a hop may
    have waiting. Layers with a window keep room for no more."""
    measured = {latency.tokens: latency.layer_ms for latency in latencies}
    tokens = MAX_STEP_TOKENS
    if any(spec.kv_windows):
        return tokens
    while tokens in measured and (longer := 2 * tokens) in measured:
        now_ms, longer_ms = (step_ms + spec.layers * measured[count] for count in (tokens, longer))
        pays = longer_ms <= 2 * WORTH * now_ms and longer_ms <= MOST_STEP_MS
        fits = longer * spec.activation_bytes <= WINDOW_BYTES
        if not (pays and fits) or workspace_bytes(spec, longer) > WORKSPACE_SHARE * memory_bytes:
            break
        tokens = longer
    return tokens
