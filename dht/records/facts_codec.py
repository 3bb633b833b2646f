"""Facts of a peer as a protobuf message and back. Both directions check the same bounds.

Measurements are announced with 12 significant bits: more of them is noise, and noise cannot be compressed.
"""

import math

from molink.dht.identity.addresses import PeerAddress, host_and_port
from molink.dht.identity.identity import is_sound, peer_id_of, public_key_of
from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.bounds import MAX_LAYERS, MAX_SEQUENCE, MAX_TTL_S, real, size, text, whole
from molink.dht.records.records import (
    AnnouncedDraft,
    Coordinate,
    DeviceProperties,
    LayerLatency,
    LinkMeasurement,
    PeerFacts,
    PrefillLatency,
    RelayAt,
    ServedModel,
)
from molink.shards.spec import MAX_STEP_TOKENS, Span

MAX_ADDRESSES = 8
MAX_LINKS = 32
MAX_LAYER_LATENCIES = 16
MAX_PREFILL_LATENCIES = 8
MAX_CERTIFICATE_BYTES = 1024

MAX_UPLINK_MBPS = 1e7
MAX_ACTIVATION_CODECS = 8
MAX_RELAYS = 3
MAX_REGION_CHARACTERS = 32
MAX_SAMPLING_ABILITIES = 8
MAX_DRAFTS = 3
MAX_DRAFT_CHARACTERS = 24
TOKENIZER_HASH_BYTES = 8
MAX_GUESS_MS = 10_000.0
MOST_STEP_TOKENS = 2**20

_SIGNIFICANT_BITS = 12
_MAX_MS = 1e9
_MAX_BYTES = 2**62


def facts_to_message(facts: PeerFacts) -> pb.Facts:
    """Of more than 32 links, the nearest. Raises ValueError if a value is out of bounds."""
    nearest = sorted(facts.links, key=lambda link: (link.rtt_ms, link.peer_id))[:MAX_LINKS]
    kept = set(nearest)
    message = pb.Facts(
        public_key=facts.public_key,
        sequence=whole("sequence", facts.sequence, MAX_SEQUENCE),
        ttl_s=whole("ttl_s", facts.ttl_s, MAX_TTL_S),
        protocol_version=whole("protocol_version", facts.protocol_version, 2**31),
        version=facts.version,
        name=facts.name,
        addresses=[_without_peer_id(address, facts.peer_id) for address in facts.addresses],
        grpc_addresses=facts.grpc_addresses,
        certificate=facts.certificate,
        device=_device_to_message(facts.device),
        model=_model_to_message(facts.model),
        embed_ms=_rounded(facts.embed_ms),
        head_ms=_rounded(facts.head_ms),
        load_bytes_per_s=_rounded(facts.load_bytes_per_s),
        activation_codecs=facts.activation_codecs,
        decode_context_ms=_rounded(real("decode_context_ms", facts.decode_context_ms, _MAX_MS)),
        prefill_context_ms=_rounded(real("prefill_context_ms", facts.prefill_context_ms, _MAX_MS)),
        step_ms=_rounded(real("step_ms", facts.step_ms, _MAX_MS)),
    )
    if facts.step_tokens != MAX_STEP_TOKENS:
        message.step_tokens = whole("step_tokens", facts.step_tokens, MOST_STEP_TOKENS, least=1)
    if facts.uplink_mbps is not None:
        message.uplink_mbps = real("uplink_mbps", facts.uplink_mbps, MAX_UPLINK_MBPS, zero=False)
    if facts.span_limit is not None:
        whole("span_limit", facts.span_limit.stop, MAX_LAYERS)
        message.span_limit.start, message.span_limit.stop = facts.span_limit.start, facts.span_limit.stop
    for latency in facts.layer_latencies:
        whole("batch_size", latency.batch_size, 2**20, least=1)
        message.layer_latencies.add(batch_size=latency.batch_size, layer_ms=_rounded(latency.layer_ms))
    for prefill in facts.prefill_latencies:
        whole("tokens", prefill.tokens, 2**20, least=1)
        message.prefill_latencies.add(tokens=prefill.tokens, layer_ms=_rounded(prefill.layer_ms))
    for link in facts.links:
        if link in kept:
            message.links.add(public_key=public_key_of(link.peer_id), rtt_ms=_rounded(link.rtt_ms))
    _relays_to_message(facts, message)
    size("drafts", len(facts.drafts), MAX_DRAFTS)
    for draft in facts.drafts:
        message.drafts.add(name=draft.name, tokenizer=draft.tokenizer, guess_ms=_rounded(draft.guess_ms))
    if facts.coordinate is not None:
        message.coordinate.position.extend(facts.coordinate.position)
        message.coordinate.height_ms = facts.coordinate.height_ms
        message.coordinate.error = facts.coordinate.error
    return message


def _relays_to_message(facts: PeerFacts, message: pb.Facts) -> None:
    if facts.relay_address:
        message.relay_address = host_and_port("a relay's address", facts.relay_address)
    size("relays", len(facts.relays), MAX_RELAYS)
    for relay in facts.relays:
        message.relays.add(public_key=public_key_of(relay.peer_id), address=relay.address)
    message.cone = facts.cone
    message.keeps_copies = facts.keeps_copies
    message.pairs = facts.pairs
    message.region = text("the region", facts.region, MAX_REGION_CHARACTERS)
    size("sampling abilities", len(facts.sampling_abilities), MAX_SAMPLING_ABILITIES)
    message.sampling_abilities.extend(facts.sampling_abilities)
    if facts.partner_peer_id:
        message.partner_key = public_key_of(facts.partner_peer_id)


def facts_from_message(message: pb.Facts) -> PeerFacts:
    """Raises ValueError if a value is out of bounds."""
    if not is_sound(message.public_key):
        raise ValueError("the public key is nobody's")
    peer_id = peer_id_of(message.public_key)
    size("addresses", len(message.addresses), MAX_ADDRESSES)
    size("gRPC addresses", len(message.grpc_addresses), MAX_ADDRESSES)
    size("layer latencies", len(message.layer_latencies), MAX_LAYER_LATENCIES)
    size("prefill latencies", len(message.prefill_latencies), MAX_PREFILL_LATENCIES)
    size("links", len(message.links), MAX_LINKS)
    size("activation codecs", len(message.activation_codecs), MAX_ACTIVATION_CODECS)
    size("relays", len(message.relays), MAX_RELAYS)
    size("sampling abilities", len(message.sampling_abilities), MAX_SAMPLING_ABILITIES)
    size("drafts", len(message.drafts), MAX_DRAFTS)
    size("bytes of certificate", len(message.certificate), MAX_CERTIFICATE_BYTES)
    model = _model_from_message(message.model)
    return PeerFacts(
        peer_id=peer_id,
        public_key=message.public_key,
        sequence=whole("sequence", message.sequence, MAX_SEQUENCE),
        ttl_s=whole("ttl_s", message.ttl_s, MAX_TTL_S),
        protocol_version=whole("protocol_version", message.protocol_version, 2**31, least=1),
        version=text("version", message.version, 32),
        name=text("name", message.name, 64),
        addresses=tuple(_with_peer_id(address, peer_id) for address in message.addresses),
        grpc_addresses=tuple(host_and_port("a gRPC address", address) for address in message.grpc_addresses),
        certificate=message.certificate,
        device=_device_from_message(message.device),
        model=model,
        span_limit=_span_limit(message, model.layers),
        layer_latencies=_latencies_from_message(message),
        embed_ms=real("embed_ms", message.embed_ms, _MAX_MS),
        head_ms=real("head_ms", message.head_ms, _MAX_MS),
        load_bytes_per_s=real("load_bytes_per_s", message.load_bytes_per_s, 1e15, zero=False),
        links=tuple(
            LinkMeasurement(_link_peer_id(link.public_key), real("rtt_ms", link.rtt_ms, _MAX_MS))
            for link in message.links
        ),
        coordinate=_coordinate(message),
        uplink_mbps=real("uplink_mbps", message.uplink_mbps, MAX_UPLINK_MBPS) or None,
        activation_codecs=tuple(
            text("an activation codec", codec, 16, least=1) for codec in message.activation_codecs
        ),
        prefill_latencies=_prefill_from_message(message),
        decode_context_ms=real("decode_context_ms", message.decode_context_ms, _MAX_MS),
        prefill_context_ms=real("prefill_context_ms", message.prefill_context_ms, _MAX_MS),
        step_ms=real("step_ms", message.step_ms, _MAX_MS),
        step_tokens=whole("step_tokens", message.step_tokens, MOST_STEP_TOKENS) or MAX_STEP_TOKENS,
        relay_address=message.relay_address and host_and_port("a relay's address", message.relay_address),
        relays=tuple(
            RelayAt(_link_peer_id(relay.public_key), host_and_port("a relay's address", relay.address))
            for relay in message.relays
        ),
        cone=message.cone,
        keeps_copies=message.keeps_copies,
        pairs=message.pairs,
        region=text("the region", message.region, MAX_REGION_CHARACTERS),
        sampling_abilities=tuple(
            text("a sampling ability", ability, 16, least=1) for ability in message.sampling_abilities
        ),
        partner_peer_id=_link_peer_id(message.partner_key) if message.partner_key else "",
        drafts=tuple(map(_draft_from_message, message.drafts)),
    )


def _rounded(value: float) -> float:
    """Down to 12 significant bits. What is not finite is left for the bounds to refuse."""
    if not math.isfinite(value):
        return value
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(mantissa * 2**_SIGNIFICANT_BITS), exponent - _SIGNIFICANT_BITS)


def _without_peer_id(address: str, peer_id: str) -> str:
    """On the wire an address lacks its end, which the key implies: nobody can announce another's address."""
    if not address.endswith(f"/p2p/{peer_id}"):
        raise ValueError(f"an address must be a multiaddress that ends in /p2p/{peer_id}, it is {address!r}")
    return address.removesuffix(f"/p2p/{peer_id}")


def _with_peer_id(address: str, peer_id: str) -> str:
    if PeerAddress.parse(address).peer_id is not None:
        raise ValueError("an address lacks its end, which the key implies")
    return f"{address}/p2p/{peer_id}"


def _link_peer_id(public_key: bytes) -> str:
    if not is_sound(public_key):
        raise ValueError("a link names the other peer by its 32-byte key")
    return peer_id_of(public_key)


def _span_limit(message: pb.Facts, layers: int) -> Span | None:
    if not message.HasField("span_limit"):
        return None
    whole("span_limit", message.span_limit.stop, layers)
    return Span(message.span_limit.start, message.span_limit.stop)


def _coordinate(message: pb.Facts) -> Coordinate | None:
    if not message.HasField("coordinate"):
        return None
    announced = message.coordinate
    return Coordinate(tuple(announced.position), announced.height_ms, announced.error)


def _draft_from_message(message: pb.Draft) -> AnnouncedDraft:
    if len(message.tokenizer) not in (0, TOKENIZER_HASH_BYTES):
        raise ValueError(f"a tokenizer's hash has {TOKENIZER_HASH_BYTES} bytes, not {len(message.tokenizer)}")
    return AnnouncedDraft(
        text("a draft", message.name, MAX_DRAFT_CHARACTERS, least=1),
        message.tokenizer,
        real("guess_ms", message.guess_ms, MAX_GUESS_MS),
    )


def _latencies_from_message(message: pb.Facts) -> tuple[LayerLatency, ...]:
    latencies = tuple(
        LayerLatency(
            whole("batch_size", latency.batch_size, 2**20, least=1),
            real("layer_ms", latency.layer_ms, _MAX_MS, zero=False),
        )
        for latency in message.layer_latencies
    )
    sizes = [latency.batch_size for latency in latencies]
    if sizes != sorted(set(sizes)):
        raise ValueError("layer latencies must be in order of batch size")
    return latencies


def _prefill_from_message(message: pb.Facts) -> tuple[PrefillLatency, ...]:
    latencies = tuple(
        PrefillLatency(
            whole("tokens", latency.tokens, 2**20, least=1),
            real("layer_ms", latency.layer_ms, _MAX_MS, zero=False),
        )
        for latency in message.prefill_latencies
    )
    tokens = [latency.tokens for latency in latencies]
    if tokens != sorted(set(tokens)):
        raise ValueError("prefill latencies must be in order of tokens")
    return latencies


def _device_to_message(device: DeviceProperties) -> pb.Device:
    return pb.Device(
        kind=device.kind,
        name=device.name,
        count=whole("device.count", device.count, 1024),
        memory_bytes=whole("device.memory_bytes", device.memory_bytes, _MAX_BYTES),
        system=device.system,
        processors=whole("device.processors", device.processors, 65536),
    )


def _device_from_message(message: pb.Device) -> DeviceProperties:
    return DeviceProperties(
        kind=text("device.kind", message.kind, 16, least=1),
        name=text("device.name", message.name, 96),
        count=whole("device.count", message.count, 1024),
        memory_bytes=whole("device.memory_bytes", message.memory_bytes, _MAX_BYTES),
        system=text("device.system", message.system, 64),
        processors=whole("device.processors", message.processors, 65536),
    )


def _model_to_message(model: ServedModel) -> pb.ServedModel:
    return pb.ServedModel(
        model_hash=model.model_hash,
        content_hash=model.content_hash,
        name=model.name,
        architecture=model.architecture,
        dtype=model.dtype,
        quantization=model.quantization,
        layers=whole("model.layers", model.layers, MAX_LAYERS, least=1),
    )


def _model_from_message(message: pb.ServedModel) -> ServedModel:
    return ServedModel(
        model_hash=text("model.model_hash", message.model_hash, 64, least=1),
        content_hash=text("model.content_hash", message.content_hash, 64),
        name=text("model.name", message.name, 128),
        architecture=text("model.architecture", message.architecture, 64),
        dtype=text("model.dtype", message.dtype, 16),
        quantization=text("model.quantization", message.quantization, 16),
        layers=whole("model.layers", message.layers, MAX_LAYERS, least=1),
    )
