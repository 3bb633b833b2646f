"""What models are made of, as far as time, memory and traffic depend on it. Pure.

Numbers are those of the published configurations (`config.json` of each model on the Hugging Face hub, the models'
papers); nothing here is a weight. Totals of parameters follow from them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from molink.shards.spec import DTYPE_BYTES, ModelSpec, Span
from molink.simnet.devices.layer_shapes import Experts, LatentAttention
from molink.simnet.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of grouped-query or latent attention and gated MLPs or experts, as Llama, Qwen and DeepSeek-V3 are."""

    name: str
    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    """Of the MLP, in layers that have no experts."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    context_length: int
    dtype: str = "float16"
    attention_bias: bool = False
    """Whether query, key and value have biases."""
    query_key_norm: bool = False
    """Whether queries and keys of a head are normed."""
    tied: bool = False
    """Whether the language-model head is the embedding."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    """In place of grouped-query attention; kv_heads and head_dim then say nothing."""
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
    def attention_parameters(self) -> int:
        """Of one layer: projections, biases, and the layer's two norms."""
        norms = 2 * self.hidden_size
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.heads) + norms
        query, keys_and_values = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        bias = query + keys_and_values if self.attention_bias else 0
        head_norms = 2 * self.head_dim if self.query_key_norm else 0
        return self.hidden_size * (2 * query + keys_and_values) + bias + head_norms + norms

    def layer_parameters(self, layer: int) -> int:
        """Of that layer, all its experts included."""
        return int(self.read_parameters(layer, None))

    def read_parameters(self, layer: int, rows: int | None) -> float:
        """What a step of `rows` rows reads of that layer: of experts those that some row needs. None: all of them."""
        experts = self._experts_of(layer)
        if experts is None:
            return self.attention_parameters + 3 * self.hidden_size * self.intermediate_size
        read = experts.shared + (experts.count if rows is None else experts.distinct(rows))
        return self._beside_experts(experts) + read * experts.expert_parameters(self.hidden_size)

    def row_parameters(self, layer: int) -> int:
        """What one row is multiplied by in that layer: of experts the active ones and the shared."""
        experts = self._experts_of(layer)
        if experts is None:
            return self.layer_parameters(layer)
        used = experts.shared + experts.active
        return self._beside_experts(experts) + used * experts.expert_parameters(self.hidden_size)

    def _experts_of(self, layer: int) -> Experts | None:
        return None if self.experts is None or layer < self.experts.dense_layers else self.experts

    def _beside_experts(self, experts: Experts) -> int:
        return self.attention_parameters + experts.router_parameters(self.hidden_size)

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied head is counted once."""
        layers = sum(self.layer_parameters(layer) for layer in range(self.layers))
        return layers + self._ends_parameters

    @property
    def active_parameters(self) -> int:
        """Of those, what one row meets."""
        return sum(self.row_parameters(layer) for layer in range(self.layers)) + self._ends_parameters

    @property
    def _ends_parameters(self) -> int:
        return (self.hidden_size if self.tied else self.head_parameters) + self.embed_parameters

    @property
    def embed_parameters(self) -> int:
        return self.vocabulary_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Language-model head and final norm. A tied head is held by the tail too: it is another machine."""
        return self.vocabulary_size * self.hidden_size + self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in one layer, or the latent in their place."""
        cached = 2 * self.kv_heads * self.head_dim if self.latent is None else self.latent.cached_size
        return cached * self.element_bytes

    @property
    def attention_operations(self) -> int:
        """For one row and one token that it attends to, in one layer: scores, and values weighed by them."""
        if self.latent is not None:
            return self.latent.operations_per_pair(self.heads)
        return 4 * self.heads * self.head_dim

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
            layer_bytes=tuple(
                self.layer_parameters(layer) * self.element_bytes for layer in range(self.layers)
            ),
            embed_bytes=self.embed_parameters * self.element_bytes,
            head_bytes=self.head_parameters * self.element_bytes,
            kv_bytes_per_token=(self.kv_bytes_per_token,) * self.layers,
            stop_token_ids=(),
        )


_Row = tuple[str, int, int, int, int, int, int, int, int]
"""Name, layers, hidden size, intermediate size, heads, key-value heads, size of a head, vocabulary, context."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What models of a family have in common."""

    architecture: str
    dtype: str = "bfloat16"
    attention_bias: bool = False
    query_key_norm: bool = False
    tied: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None

    def shapes(self, rows: Iterable[_Row]) -> tuple[ModelShape, ...]:
        """One for each row."""
        return tuple(
            ModelShape(
                row[0],
                self.architecture,
                *row[1:],
                dtype=self.dtype,
                attention_bias=self.attention_bias,
                query_key_norm=self.query_key_norm,
                tied=self.tied,
                experts=self.experts,
                latent=self.latent,
            )
            for row in rows
        )


_TINY = (("tiny-shakespeare", 12, 192, 512, 6, 2, 32, 1024, 1024),)
"""The bundled model."""
_LLAMA_2 = (
    ("llama-30b", 60, 6656, 17920, 52, 52, 128, 32000, 2048),
    ("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096),
    ("llama-2-13b", 40, 5120, 13824, 40, 40, 128, 32000, 4096),
    ("llama-2-70b", 80, 8192, 28672, 64, 8, 128, 32000, 4096),
)
"""In FP16, as the papers serve them. The first is the first LLaMA's, of the transmission paper's Figures 1 and 3."""
_LLAMA_3 = (
    ("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192),
    ("llama-3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 8192),
    ("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
    ("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
    ("llama-3.1-405b", 126, 16384, 53248, 128, 8, 128, 128256, 131072),
)
_LLAMA_3_TIED = (
    ("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072),
    ("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, 131072),
)
_QWEN_2 = (
    ("qwen2-7b", 28, 3584, 18944, 28, 4, 128, 152064, 32768),
    ("qwen2-72b", 80, 8192, 29568, 64, 8, 128, 152064, 32768),
    ("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 32768),
    ("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064, 32768),
)
"""In FP16: the first is what the transmission paper serves (its reference 19)."""
_QWEN_2_TIED = (
    ("qwen2-0.5b", 24, 896, 4864, 14, 2, 64, 151936, 32768),
    ("qwen2-1.5b", 28, 1536, 8960, 12, 2, 128, 151936, 32768),
    ("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, 32768),
    ("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 128, 151936, 32768),
)
_QWEN_3 = (
    ("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, 40960),
    ("qwen3-14b", 40, 5120, 17408, 40, 8, 128, 151936, 40960),
    ("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936, 40960),
)
_QWEN_3_TIED = (
    ("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, 40960),
    ("qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, 151936, 40960),
    ("qwen3-4b", 36, 2560, 9728, 32, 8, 128, 151936, 40960),
)
_QWEN_3_30B = (("qwen3-30b-a3b", 48, 2048, 6144, 32, 4, 128, 151936, 40960),)
_QWEN_3_235B = (("qwen3-235b-a22b", 94, 4096, 12288, 64, 4, 128, 151936, 40960),)
_MIXTRAL_7B = (("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, 32768),)
_MIXTRAL_22B = (("mixtral-8x22b", 56, 6144, 16384, 48, 8, 128, 32000, 65536),)
_DEEPSEEK_V3 = (("deepseek-v3", 61, 7168, 18432, 128, 128, 128, 129280, 163840),)
"""Counted in 16 bits although it is published in 8, and without the layer that only predicts a second token."""
_DEEPSEEK_LATENT = LatentAttention(query_rank=1536, kv_rank=512, rope_dim=64, head_dim=128, value_dim=128)
_DEEPSEEK_EXPERTS = Experts(256, 8, 2048, shared=1, dense_layers=3, router_bias=True)

MODEL_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shapes in (
            _Family("llama", dtype="float32").shapes(_TINY),
            _Family("llama", dtype="float16").shapes(_LLAMA_2),
            _Family("llama").shapes(_LLAMA_3),
            _Family("llama", tied=True).shapes(_LLAMA_3_TIED),
            _Family("qwen2", dtype="float16", attention_bias=True).shapes(_QWEN_2),
            _Family("qwen2", attention_bias=True, tied=True).shapes(_QWEN_2_TIED),
            _Family("qwen3", query_key_norm=True).shapes(_QWEN_3),
            _Family("qwen3", query_key_norm=True, tied=True).shapes(_QWEN_3_TIED),
            _Family("qwen3_moe", query_key_norm=True, experts=Experts(128, 8, 768)).shapes(_QWEN_3_30B),
            _Family("qwen3_moe", query_key_norm=True, experts=Experts(128, 8, 1536)).shapes(_QWEN_3_235B),
            _Family("mixtral", experts=Experts(8, 2, 14336)).shapes(_MIXTRAL_7B),
            _Family("mixtral", experts=Experts(8, 2, 16384)).shapes(_MIXTRAL_22B),
            _Family("deepseek_v3", experts=_DEEPSEEK_EXPERTS, latent=_DEEPSEEK_LATENT).shapes(_DEEPSEEK_V3),
        )
        for shape in shapes
    }
)
"""By the name that commands take."""

QWEN2_7B = MODEL_SHAPES["qwen2-7b"]
"""What emulated and simulated swarms serve unless they are told otherwise."""


def shape_named(name: str) -> ModelShape:
    """The model of that name; raises ValueError with one sentence."""
    if name not in MODEL_SHAPES:
        near = did_you_mean(name, MODEL_SHAPES)
        raise ValueError(f"--model {name} has no known shape{near}: choose from {', '.join(MODEL_SHAPES)}")
    return MODEL_SHAPES[name]


def even_spans(layers: int, peers: int) -> tuple[Span, ...]:
    """The model's layers in as many spans as there are peers.

    Raises:
        ValueError: there are more peers than layers, or none.
    """
    if not 1 <= peers <= layers:
        raise ValueError(f"{layers} layers can be split among 1 to {layers} peers, not {peers}")
    base, longer = divmod(layers, peers)
    starts = [peer * base + min(peer, longer) for peer in range(peers + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(starts))
