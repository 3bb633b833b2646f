"""Problems, brute force and announcements for the tests of circuit search."""

from itertools import pairwise, permutations
from typing import Any

import numpy as np
from hypothesis import strategies as st

from molink.dht.records.records import (
    PROTOCOL_VERSION,
    DeviceProperties,
    LayerLatency,
    LinkMeasurement,
    PeerFacts,
    PeerState,
    PeerView,
    ServedModel,
)
from molink.routing import CircuitProblem, Hop, Snapshot, tpot_ms
from molink.shards.spec import ModelSpec, Span


def random_problem(rng: np.random.Generator, machines: int, layers: int, *, full: bool) -> CircuitProblem:
    """A small problem; with `full`, residency, willingness, KV memory, embedding and head too."""
    latency = rng.uniform(0.5, 50.0, (machines, machines))
    if rng.random() < 0.5:
        latency = (latency + latency.T) / 2
    np.fill_diagonal(latency, 0.0)
    values: dict[str, Any] = {
        "layer_ms": rng.uniform(0.1, 10.0, (machines, layers) if rng.random() < 0.5 else machines),
        "latency_ms": latency,
        "free_bytes": rng.integers(0, 8, machines) * 100,
        "layer_bytes": rng.choice([100, 150, 220], layers) if rng.random() < 0.5 else np.full(layers, 100),
        "embed_ms": rng.uniform(0.0, 3.0, machines),
        "head_ms": rng.uniform(0.0, 3.0, machines),
    }
    if full:
        held = np.zeros((machines, layers), dtype=bool)
        willing = np.ones((machines, layers), dtype=bool)
        for machine in range(machines):
            start, stop = sorted(rng.choice(layers + 1, 2, replace=False))
            held[machine, start:stop] = True
            if rng.random() < 0.3:
                start, stop = sorted(rng.choice(layers + 1, 2, replace=False))
                willing[machine] = held[machine]
                willing[machine, start:stop] = True
        values |= {
            "resident": held,
            "allowed": willing,
            "embed_bytes": 50,
            "head_bytes": int(rng.integers(0, 200)),
            "embed_resident": held[:, 0],
            "head_resident": held[:, -1],
            "kv_bytes": np.full(layers, 10),
            "free_kv_bytes": rng.integers(0, 2 * layers, machines) * 10,
            "load_ms": rng.uniform(0.1, 2.0, machines),
            "load_weight": 0.05,
        }
        values["shared_bytes"] = int(rng.integers(0, min(50, values["head_bytes"]) + 1))
    return CircuitProblem(**values)


@st.composite
def problems(
    draw: st.DrawFn, *, machines: int = 6, layers: int = 8, full: bool | None = None
) -> CircuitProblem:
    seed = draw(st.integers(0, 2**32 - 1))
    chosen = draw(st.booleans()) if full is None else full
    count = draw(st.integers(1, machines))
    return random_problem(np.random.default_rng(seed), count, draw(st.integers(1, layers)), full=chosen)


def fits(problem: CircuitProblem, hop: Hop) -> bool:
    """Whether a machine can serve the hop, computed layer by layer."""
    machine, needed, kv = hop.machine, 0, 0
    for layer in range(hop.start, hop.stop):
        if problem.allowed is not None and not problem.allowed[machine, layer]:
            return False
        held = problem.resident is not None and bool(problem.resident[machine, layer])
        needed += 0 if held else int(problem.layer_bytes[layer])
        kv += 0 if problem.kv_bytes is None else int(problem.kv_bytes[layer])
    has_embedding = problem.embed_resident is not None and bool(problem.embed_resident[machine])
    has_head = problem.head_resident is not None and bool(problem.head_resident[machine])
    starts, ends = hop.start == 0 and not has_embedding, hop.stop == problem.layers and not has_head
    needed += starts * problem.embed_bytes + ends * problem.head_bytes
    if (starts or has_embedding) and (ends or has_head) and (starts or ends):
        needed -= problem.shared_bytes
    room = problem.free_kv_bytes is None or kv <= problem.free_kv_bytes[machine]
    return needed <= problem.free_bytes[machine] and bool(room)


def check_circuit(problem: CircuitProblem, hops: tuple[Hop, ...]) -> None:
    """Every layer once and in order, no machine twice, everything fits."""
    assert hops[0].start == 0
    assert hops[-1].stop == problem.layers
    assert all(before.stop == after.start for before, after in pairwise(hops))
    assert len({hop.machine for hop in hops}) == len(hops)
    assert all(hop.start < hop.stop and fits(problem, hop) for hop in hops)


def greedy_orderings(problem: CircuitProblem) -> list[tuple[float, tuple[Hop, ...]]]:
    """All circuits in which machines, in some order, each take as many layers as fit."""
    found: dict[tuple[Hop, ...], float] = {}
    for order in permutations(range(problem.machines)):
        hops: list[Hop] = []
        layer = 0
        for machine in order:
            stops = [
                stop
                for stop in range(layer + 1, problem.layers + 1)
                if fits(problem, Hop(machine, layer, stop))
            ]
            if layer == problem.layers or not stops:
                break
            hops.append(Hop(machine, layer, max(stops)))
            layer = max(stops)
        if layer == problem.layers:
            found[tuple(hops)] = tpot_ms(problem, hops)
    return sorted((cost, hops) for hops, cost in found.items())


def cheapest_of_all(problem: CircuitProblem) -> float | None:
    """The best TPOT over every partition and order; None if nothing fits."""
    best: float | None = None

    def extend(hops: tuple[Hop, ...], layer: int) -> None:
        nonlocal best
        if layer == problem.layers:
            cost = tpot_ms(problem, hops)
            best = cost if best is None else min(best, cost)
            return
        for machine in set(range(problem.machines)) - {hop.machine for hop in hops}:
            for stop in range(layer + 1, problem.layers + 1):
                if fits(problem, Hop(machine, layer, stop)):
                    extend((*hops, Hop(machine, layer, stop)), stop)

    extend((), 0)
    return best


MODEL = ModelSpec(
    model_hash="ab" * 32,
    content_hash="cd" * 32,
    name="molink/example",
    architecture="llama",
    layers=8,
    hidden_size=64,
    vocabulary_size=256,
    context_length=512,
    dtype="float32",
    quantization="none",
    layer_bytes=(1_000_000,) * 8,
    embed_bytes=300_000,
    head_bytes=400_000,
    kv_bytes_per_token=(512,) * 8,
    stop_token_ids=(0,),
)


def peer(peer_id: str, *spans: tuple[int, int], **changes: Any) -> PeerView:  # noqa: ANN401 (fields of several types)
    """A peer that holds the spans; `changes` are fields of facts or state, `model` is the model's hash."""
    model_hash = changes.pop("model", MODEL.model_hash)
    served = ServedModel(model_hash, MODEL.content_hash, MODEL.name, "llama", "float32", "none", 8)
    facts: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "span_limit": None,
        "layer_latencies": (LayerLatency(1, 2.0),),
        "embed_ms": 0.1,
        "head_ms": 0.3,
        "load_bytes_per_s": 1e9,
        "links": (),
        "coordinate": None,
        "keeps_copies": True,
        "partner_peer_id": "",
        "sampling_abilities": (),
        "drafts": (),
    }
    state: dict[str, Any] = {
        "free_weight_bytes": 0,
        "free_kv_bytes": 10**9,
        "sessions": 0,
        "queued": 0,
        "draining": False,
    }
    links = changes.pop("links", {})
    facts["links"] = tuple(LinkMeasurement(target, rtt) for target, rtt in links.items())
    for name, value in changes.items():
        (facts if name in facts else state)[name] = value
    return PeerView(
        PeerFacts(
            peer_id=peer_id,
            public_key=b"\0" * 32,
            sequence=1,
            ttl_s=120,
            version="0",
            name=peer_id,
            addresses=(),
            grpc_addresses=("127.0.0.1:1",),
            certificate=b"",
            device=DeviceProperties("cpu", "cpu", 1, 10**10, "Linux x86_64", 2),
            model=served,
            **facts,
        ),
        PeerState(
            peer_id=peer_id,
            sequence=2,
            ttl_s=120,
            facts_sequence=1,
            spans=tuple(Span(*span) for span in spans),
            **state,
        ),
        age_s=1.0,
    )


def snapshot_of(*views: PeerView, measured: dict[tuple[str, str], float] | None = None) -> Snapshot:
    return Snapshot(views, MODEL, measured or {})
