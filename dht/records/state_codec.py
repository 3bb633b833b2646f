"""State of a peer as a protobuf message of at most 85 bytes, and back. Both directions check the same bounds.

The bytes, at worst: peer tag 9, sequence 9, ttl 4, age of the facts 9, seven spans 30 and one that loads 6, two
sizes 6, two counts 8, draining 2: 83. With the record's first byte and signature that is 148.
"""

from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.bounds import MAX_LAYERS, MAX_SEQUENCE, MAX_TTL_S, size, whole
from molink.dht.records.records import PeerState
from molink.shards.spec import Span, merge_spans

MAX_SPANS = 8
"""Held and loading together."""
MAX_LOADING_SPANS = 1
_TAG_BYTES = 8
_MAX_COUNT = 65_535
_MANTISSA_BITS = 8
_MAX_EXPONENT = 55
_MAX_SIZE_BYTES = 2**63 - 1


def peer_tag(public_key: bytes) -> int:
    """A short name for a peer: the first 8 bytes of its key. It selects a key, and proves nothing."""
    return int.from_bytes(public_key[:_TAG_BYTES], "little")


def state_to_message(state: PeerState, public_key: bytes) -> pb.State:
    """Raises ValueError if a value is out of bounds."""
    whole("sequence", state.sequence, MAX_SEQUENCE)
    loading = _longest(state.loading, MAX_LOADING_SPANS)
    return pb.State(
        peer_tag=peer_tag(public_key),
        sequence=state.sequence,
        ttl_s=whole("ttl_s", state.ttl_s, MAX_TTL_S),
        facts_age=state.sequence - whole("facts_sequence", state.facts_sequence, state.sequence),
        spans=_spans_to_gaps(_longest(state.spans, MAX_SPANS - len(loading))),
        free_weight=_rounded_down(state.free_weight_bytes),
        free_kv=_rounded_down(state.free_kv_bytes),
        sessions=min(whole("sessions", state.sessions, 2**62), _MAX_COUNT),
        queued=min(whole("queued", state.queued, 2**62), _MAX_COUNT),
        draining=state.draining,
        loading=_spans_to_gaps(loading),
    )


def state_from_message(message: pb.State, peer_id: str) -> PeerState:
    """Raises ValueError if a value is out of bounds."""
    sequence = whole("sequence", message.sequence, MAX_SEQUENCE)
    return PeerState(
        peer_id=peer_id,
        sequence=sequence,
        ttl_s=whole("ttl_s", message.ttl_s, MAX_TTL_S),
        facts_sequence=sequence - whole("facts_age", message.facts_age, sequence),
        spans=_gaps_to_spans(tuple(message.spans), MAX_SPANS),
        free_weight_bytes=_size_bytes(message.free_weight),
        free_kv_bytes=_size_bytes(message.free_kv),
        sessions=whole("sessions", message.sessions, _MAX_COUNT),
        queued=whole("queued", message.queued, _MAX_COUNT),
        draining=message.draining,
        loading=_gaps_to_spans(tuple(message.loading), MAX_LOADING_SPANS),
    )


def _longest(spans: tuple[Span, ...], most: int) -> tuple[Span, ...]:
    """In order, adjacent ones joined."""
    return tuple(sorted(sorted(merge_spans(spans), key=lambda span: (-len(span), span))[:most]))


def _spans_to_gaps(spans: tuple[Span, ...]) -> list[int]:
    gaps: list[int] = []
    end = 0
    for span in spans:
        whole("a span's end", span.stop, MAX_LAYERS)
        gaps += (span.start - end, len(span))
        end = span.stop
    return gaps


def _gaps_to_spans(gaps: tuple[int, ...], most: int) -> tuple[Span, ...]:
    size("spans", len(gaps), 2 * most)
    if len(gaps) % 2:
        raise ValueError("spans come as pairs of gap and length")
    spans: list[Span] = []
    end = 0
    for gap, length in zip(gaps[::2], gaps[1::2], strict=True):
        whole("a span's length", length, MAX_LAYERS, least=1)
        start = end + whole("a gap between spans", gap, MAX_LAYERS)
        end = whole("a span's end", start + length, MAX_LAYERS)
        spans.append(Span(start, end))
    return tuple(spans)


def _rounded_down(size_bytes: int) -> int:
    whole("a size in bytes", size_bytes, _MAX_SIZE_BYTES)
    exponent = max(0, size_bytes.bit_length() - _MANTISSA_BITS)
    return exponent << _MANTISSA_BITS | size_bytes >> exponent


def _size_bytes(code: int) -> int:
    exponent, mantissa = code >> _MANTISSA_BITS, code & ((1 << _MANTISSA_BITS) - 1)
    return mantissa << whole("the exponent of a size", exponent, _MAX_EXPONENT)
