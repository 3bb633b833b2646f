"""Swarms by chance, and every circuit that a problem has, for the tests of routes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from support.circuits.circuit_cases import MODEL, fits, peer

from molink.dht.records.records import LayerLatency, PeerView
from molink.routing import CircuitProblem, Hop, PeerObservation, Snapshot

HALF = MODEL.layers // 2
NAMES = "abcd"


def aged(view: PeerView, age_s: float) -> PeerView:
    return replace(view, age_s=age_s)


def on(view: PeerView, processors: int) -> PeerView:
    """The same peer with so many processors."""
    device = replace(view.facts.device, processors=processors)
    return replace(view, facts=replace(view.facts, device=device))


def changed(view: PeerView, **state: Any) -> PeerView:  # noqa: ANN401 (fields of several types)
    """The same peer with another state."""
    return replace(view, state=replace(view.state, **state))


@st.composite
def views(draw: st.DrawFn, peer_id: str) -> PeerView:
    spans = draw(st.sampled_from(((0, 8), (0, HALF), (HALF, 8), (2, 6), None)))
    first = draw(st.floats(0.1, 5.0))
    latencies = (LayerLatency(1, first), LayerLatency(8, first * draw(st.floats(1.0, 4.0))))
    view = peer(
        peer_id,
        *(() if spans is None else (spans,)),
        layer_latencies=latencies if draw(st.booleans()) else latencies[:1],
        embed_ms=draw(st.floats(0.0, 1.0)),
        head_ms=draw(st.floats(0.0, 2.0)),
        sessions=draw(st.integers(0, 8)),
        queued=draw(st.integers(0, 70)),
        free_weight_bytes=draw(st.sampled_from((0, 3_000_000, 10**8))),
        free_kv_bytes=draw(st.sampled_from((8 * 512 * 64, 10**9))),
        links={
            other: draw(st.floats(0.0, 80.0)) for other in NAMES if other != peer_id and draw(st.booleans())
        },
    )
    return aged(on(view, draw(st.integers(1, 16))), draw(st.floats(0.0, 100.0)))


observations = st.builds(
    PeerObservation,
    uptime_s=st.floats(0.0, 1e6),
    losses=st.integers(0, 5),
    client_rtt_ms=st.none() | st.floats(0.0, 300.0),
    uplink_mbps=st.none() | st.floats(1.0, 1000.0),
)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Up to four peers, of which the first alone could serve."""
    others = draw(st.sets(st.sampled_from(NAMES[1:])))
    whole = peer("a", (0, 8), layer_latencies=(LayerLatency(1, draw(st.floats(0.5, 9.0))),))
    seen = draw(st.dictionaries(st.sampled_from(NAMES), observations))
    return Snapshot((whole, *(draw(views(name)) for name in sorted(others))), MODEL, {}, seen)


def every_circuit(problem: CircuitProblem) -> Iterator[tuple[Hop, ...]]:
    """All partitions in all orders."""

    def extend(hops: tuple[Hop, ...], layer: int) -> Iterator[tuple[Hop, ...]]:
        if layer == problem.layers:
            yield hops
            return
        for machine in set(range(problem.machines)) - {hop.machine for hop in hops}:
            for stop in range(layer + 1, problem.layers + 1):
                if fits(problem, Hop(machine, layer, stop)):
                    yield from extend((*hops, Hop(machine, layer, stop)), stop)

    return extend((), 0)
