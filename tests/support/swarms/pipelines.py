"""Pipelines to decide about: stages of any profile and links of any kind."""

from dataclasses import replace

from hypothesis import strategies as st
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.routing.cost.pipeline import PipelineStage

FACTS = facts_of(Identity.generate())
ACTIVATION_BYTES = 8192


def stage(
    fixed_ms: float = 4.0,
    row_ms: float = 0.1,
    *,
    link_ms: float = 0.0,
    uplink_mbps: float | None = None,
    sent_bytes: int = ACTIVATION_BYTES,
) -> PipelineStage:
    """One whose step of n rows takes `fixed_ms + n * row_ms`, whichever kind it is."""
    sizes = (1, 2, 32)
    facts = replace(
        FACTS,
        layer_latencies=tuple(LayerLatency(size, fixed_ms + size * row_ms) for size in sizes),
        prefill_latencies=tuple(PrefillLatency(size, fixed_ms + size * row_ms) for size in sizes[1:]),
    )
    return PipelineStage(facts, 1, 0.0, 0.0, link_ms, uplink_mbps, sent_bytes)


def roofline(
    bound_ms: float, row_ms: float, knee: int, *, link_ms: float, uplink_mbps: float | None = None
) -> PipelineStage:
    """One that memory bounds up to `knee` rows, and computation beyond."""
    rows = sorted({1, 2, 4, 8, 16, 32, knee})
    times = [bound_ms + row_ms * max(0, size - knee) + 1e-3 * size for size in rows]
    facts = replace(
        FACTS,
        layer_latencies=tuple(LayerLatency(*pair) for pair in zip(rows, times, strict=True)),
        prefill_latencies=(),
    )
    return PipelineStage(facts, 1, 0.0, 0.0, link_ms, uplink_mbps, ACTIVATION_BYTES)


@st.composite
def pipelines(draw: st.DrawFn) -> list[PipelineStage]:
    """One to five stages, some with links of their own speed."""
    links = st.floats(0, 60)
    uplinks = st.none() | st.floats(5, 1000)
    linear = st.builds(
        stage, st.floats(0.1, 30), st.floats(0, 3), link_ms=links, uplink_mbps=uplinks,
        sent_bytes=st.sampled_from([512, 8192, 16384]),
    )  # fmt: skip
    bounded = st.builds(
        roofline, st.floats(0.5, 30), st.floats(0, 3), st.integers(1, 32), link_ms=links, uplink_mbps=uplinks
    )
    stages = draw(st.lists(linear | bounded, min_size=1, max_size=5))
    return [*stages[:-1], replace(stages[-1], head_ms=draw(st.floats(0, 30)))]
