"""Peers to test with: facts, states, and a timing that makes minutes of a swarm's life pass in seconds."""

from collections.abc import Iterable
from dataclasses import replace

from molink.dht.identity.identity import Identity
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.records.records import (
    PROTOCOL_VERSION,
    DeviceProperties,
    LayerLatency,
    LinkMeasurement,
    PeerFacts,
    PeerState,
    ServedModel,
)
from molink.dht.records.state_codec import peer_tag
from molink.shards.spec import Span

MODEL = ServedModel("a" * 64, "b" * 64, "molink/tiny-shakespeare", "llama", "float32", "none", 32)
OTHER_MODEL = replace(MODEL, model_hash="c" * 64, name="another/model")
QUICK = DiscoveryTiming(
    interval_s=0.5,
    change_gap_s=0.05,
    facts_interval_s=60.0,
    anti_entropy_interval_s=0.5,
    refresh_interval_s=0.3,
    keepalive_s=0.3,
    silence_s=2.0,
    dial_timeout_s=60.0,
    bootstrap_timeout_s=120.0,
    upkeep_s=0.1,
    redial_s=0.5,
    ihave_interval_s=0.05,
    heard_s=0.2,
)
"""States live for two seconds; who joins or is dialled has as long as a busy machine may take."""


def facts_of(identity: Identity, *, sequence: int = 1, ttl_s: int = 3600, links: int = 0) -> PeerFacts:
    """Facts of a usual size."""
    return PeerFacts(
        peer_id=identity.peer_id,
        public_key=identity.public_key,
        sequence=sequence,
        ttl_s=ttl_s,
        protocol_version=PROTOCOL_VERSION,
        version="0.1.0",
        name="ada's PC",
        addresses=(f"/ip4/192.0.2.7/tcp/4001/p2p/{identity.peer_id}",),
        grpc_addresses=("192.0.2.7:4002",),
        certificate=bytes(400),
        device=DeviceProperties("cuda", "NVIDIA GeForce RTX 4090", 1, 24 * 2**30, "Linux x86_64", 16),
        model=MODEL,
        span_limit=Span(0, 16),
        layer_latencies=(LayerLatency(1, 1.25), LayerLatency(8, 2.5)),
        embed_ms=0.125,
        head_ms=0.75,
        load_bytes_per_s=2.0**31,
        links=tuple(LinkMeasurement(Identity.generate().peer_id, float(rtt)) for rtt in range(links)),
        decode_context_ms=0.5,
        prefill_context_ms=0.03125,
    )


def state_of(identity: Identity, *, sequence: int = 2, facts_sequence: int = 1, ttl_s: int = 57) -> PeerState:
    """A state of a peer that serves two spans."""
    return PeerState(
        peer_id=identity.peer_id,
        sequence=sequence,
        ttl_s=ttl_s,
        facts_sequence=facts_sequence,
        spans=(Span(0, 8), Span(12, 16)),
        free_weight_bytes=3 * 2**30,
        free_kv_bytes=2**30,
        sessions=3,
        queued=1,
    )


def known_keys(public_keys: Iterable[bytes]) -> dict[int, bytes]:
    """Keys by tag, as `verify_state` looks them up."""
    return {peer_tag(key): key for key in public_keys}
