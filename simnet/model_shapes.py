"""What models are made of, as far as time, memory and traffic depend on it. Pure.

Numbers are those of the published configurations; nothing here is a weight.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from molink.shards.spec import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of grouped-query attention and a gated MLP, as Llama and Qwen2 are."""

    name: str
    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    context_length: int
    dtype: str = "float16"
    attention_bias: bool = False
    """Whether query, key and value have biases."""
    tied: bool = False
    """Whether the language-model head is the embedding."""
    tensors_per_boundary: int = 1
    """Of a row each, between two machines. An engine that adds a layer's output to the residual only with the next
    norm sends both."""

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden_size, self.intermediate_size, self.heads, self.kv_heads)
        others = (self.head_dim, self.vocabulary_size, self.context_length, self.tensors_per_boundary)
        if min(*sizes, *others) < 1:
            raise ValueError(f"every size of {self.name} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def layer_parameters(self) -> int:
        """Projections of attention and MLP, biases and two norms."""
        query, keys_and_values = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query + keys_and_values)
        bias = query + keys_and_values if self.attention_bias else 0
        return attention + bias + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def embed_parameters(self) -> int:
        return self.vocabulary_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Language-model head and final norm. A tied head is held by the tail too: it is another machine."""
        return self.vocabulary_size * self.hidden_size + self.hidden_size

    @property
    def layer_bytes(self) -> int:
        return self.layer_parameters * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def activation_bytes(self) -> int:
        """One token's hidden state within a machine."""
        return self.hidden_size * self.element_bytes

    @property
    def boundary_size(self) -> int:
        """Numbers that one token's row has between two machines."""
        return self.hidden_size * self.tensors_per_boundary

    def spec(self) -> ModelSpec:
        """The shape as peers, routers and clients speak of a model: its hidden size is what travels between them. Its
        hashes are of the shape: no weights have them."""
        content_hash = hashlib.sha256(f"molink-shape 1\n{self!r}\n".encode()).hexdigest()
        return ModelSpec(
            model_hash=hashlib.sha256(f"{content_hash}\n{self.dtype}\n".encode()).hexdigest(),
            content_hash=content_hash,
            name=self.name,
            architecture=self.architecture,
            layers=self.layers,
            hidden_size=self.boundary_size,
            vocabulary_size=self.vocabulary_size,
            context_length=self.context_length,
            dtype=self.dtype,
            quantization="none",
            layer_bytes=(self.layer_bytes,) * self.layers,
            embed_bytes=self.embed_parameters * self.element_bytes,
            head_bytes=self.head_parameters * self.element_bytes,
            kv_bytes_per_token=(self.kv_bytes_per_token,) * self.layers,
            stop_token_ids=(),
        )


QWEN2_7B = ModelShape(
    name="qwen2-7b",
    architecture="qwen2",
    layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocabulary_size=152064,
    context_length=32768,
    attention_bias=True,
)
"""Qwen2-7B-Instruct in FP16, which the transmission paper serves (its reference 19)."""

LLAMA_2_7B = ModelShape(
    name="llama-2-7b",
    architecture="llama",
    layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    heads=32,
    kv_heads=32,
    head_dim=128,
    vocabulary_size=32000,
    context_length=4096,
)
"""In FP16, which the MoLink system paper serves."""

LLAMA_2_70B = ModelShape(
    name="llama-2-70b",
    architecture="llama",
    layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocabulary_size=32000,
    context_length=4096,
)
"""In FP16, which the decentralized-scheduling paper serves."""

MODEL_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {shape.name: shape for shape in (QWEN2_7B, LLAMA_2_7B, LLAMA_2_70B)}
)
