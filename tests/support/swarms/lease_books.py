"""Lease books to test with: a model whose layers are easy to count, and what a book answers."""

from molink.peer.memory.leases import Granted, LeaseBook, LeaseKey, Refused
from molink.peer.memory.memory import MemoryPlan
from molink.shards.spec import ModelSpec, Span

TTL_S = 30.0


def make_spec(layers: int = 6) -> ModelSpec:
    """Layer n takes 100 + n bytes of weights and 1 + n % 2 of KV cache a token."""
    return ModelSpec(
        model_hash="0" * 64,
        content_hash="1" * 64,
        name="test/model",
        architecture="llama",
        layers=layers,
        hidden_size=8,
        vocabulary_size=16,
        context_length=200,
        dtype="float32",
        quantization="none",
        layer_bytes=tuple(100 + layer for layer in range(layers)),
        embed_bytes=30,
        head_bytes=40,
        kv_bytes_per_token=tuple(1 + layer % 2 for layer in range(layers)),
        stop_token_ids=(0,),
    )


SPEC = make_spec()
WHOLE_BYTES = SPEC.weight_bytes(SPEC.whole)


def key(session: int, epoch: int = 1) -> LeaseKey:
    return LeaseKey(bytes([session]) * 16, epoch)


def book(kv: int = 1000, **options: int) -> LeaseBook:
    """Room for all weights and `kv` bytes of KV cache."""
    return LeaseBook(SPEC, MemoryPlan(WHOLE_BYTES + kv + 10, 10, WHOLE_BYTES), **options)


def granted(answer: Granted | Refused) -> Granted:
    assert isinstance(answer, Granted), answer
    return answer


def refused(answer: Granted | Refused | tuple[Span, ...], code: str) -> Refused:
    assert isinstance(answer, Refused), answer
    assert answer.code == code
    return answer
