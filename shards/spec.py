"""What a model is and what is asked of it, as values. No torch here: every world may import this file."""

from collections.abc import Iterator
from dataclasses import dataclass, field

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Numeric types that a circuit can compute in, with the bytes of one element."""

QUANTIZATIONS = ("none", "int8", "nf4")

ACTIVATION_CODECS = ("none", "float16", "bfloat16", "int8")
"""How activations may travel between peers: in the model's own numbers, or, if all agree, in fewer bytes."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Consecutive decoder layers [start, stop)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a span needs 0 <= start < stop, got [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def covers(self, other: "Span") -> bool:
        """Whether every layer of `other` is in this span."""
        return self.start <= other.start and other.stop <= self.stop


def merge_spans(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The same layers in as few spans as possible, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def missing_spans(wanted: Span, held: tuple[Span, ...]) -> tuple[Span, ...]:
    """The parts of `wanted` that `held` does not cover, in order."""
    missing: list[Span] = []
    start = wanted.start
    for span in merge_spans(held):
        if span.stop <= start or span.start >= wanted.stop:
            continue
        if span.start > start:
            missing.append(Span(start, span.start))
        start = max(start, span.stop)
    if start < wanted.stop:
        missing.append(Span(start, wanted.stop))
    return tuple(missing)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as peers, routers and clients speak of it: what it is called and what each part of it costs.

    Sizes are those in memory, in the dtype and quantization that the swarm computes in.
    """

    model_hash: str
    """64 hexadecimal digits over content, dtype and quantization: equal hashes serve the same numbers."""
    content_hash: str
    """64 hexadecimal digits over configuration, tensors and tokenizer files, whatever the dtype."""
    name: str
    """What people call it, such as `molink/tiny-shakespeare`. A label, not an identity."""
    architecture: str
    """`model_type` of the configuration, such as `llama`."""
    layers: int
    hidden_size: int
    vocabulary_size: int
    context_length: int
    """Most tokens that one sequence may have, prompt and generation together."""
    dtype: str
    quantization: str
    layer_bytes: tuple[int, ...]
    """Weights of each decoder layer."""
    embed_bytes: int
    """Weights that the head of a circuit holds besides its layers: embeddings of tokens and positions."""
    head_bytes: int
    """Weights that the tail of a circuit holds besides its layers: final norm and language-model head."""
    kv_bytes_per_token: tuple[int, ...]
    """KV cache of one token in each layer."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a generation, as the model's generation configuration says."""

    def __post_init__(self) -> None:
        if (
            self.layers < 1
            or len(self.layer_bytes) != self.layers
            or len(self.kv_bytes_per_token) != self.layers
        ):
            raise ValueError(
                f"layers={self.layers} needs as many layer_bytes ({len(self.layer_bytes)}) "
                f"and kv_bytes_per_token ({len(self.kv_bytes_per_token)})"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(
                f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}"
            )

    @property
    def whole(self) -> Span:
        return Span(0, self.layers)

    @property
    def activation_bytes(self) -> int:
        """One token's hidden state on the wire."""
        return self.hidden_size * DTYPE_BYTES[self.dtype]

    def weight_bytes(self, span: Span) -> int:
        """Weights of the span, with the embedding if it starts the model and the head if it ends it."""
        layers = sum(self.layer_bytes[span.start : span.stop])
        embed = self.embed_bytes if span.start == 0 else 0
        head = self.head_bytes if span.stop == self.layers else 0
        return layers + embed + head

    def kv_bytes(self, span: Span, tokens: int) -> int:
        """KV cache of one sequence of `tokens` tokens in the span."""
        return tokens * sum(self.kv_bytes_per_token[span.start : span.stop])


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tail of a circuit chooses the next token, and when a generation ends.

    temperature 0 is greedy and ignores top_k, top_p and seed. Otherwise the logits are divided by it, cut to the
    top_k most likely (0: all) and then to the smallest set of probability top_p, and a token is drawn with a random
    number that depends on (seed, position) alone, so that any peer that takes over draws the same.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are cut from it. Looked for by the client."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a generation, beside the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own stop tokens."""
    logprobs: int | None = None
    """None: no log-probabilities. n: the chosen token's and those of the n most likely, 0 to 20."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    """(token id, added to its logit) pairs, at most 300."""

    def __post_init__(self) -> None:
        checks = (
            (self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {self.max_new_tokens}"),
            (
                0.0 <= self.temperature <= 100.0,
                f"temperature must be between 0 and 100, got {self.temperature}",
            ),
            (self.top_k >= 0, f"top_k must be 0 (all) or more, got {self.top_k}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be above 0 and at most 1, got {self.top_p}"),
            (self.seed is None or 0 <= self.seed < 2**64, f"seed must be in [0, 2**64), got {self.seed}"),
            (len(self.stop) <= 16 and all(self.stop), "stop takes at most 16 strings, none of them empty"),
            (len(self.stop_token_ids) <= 64, "stop_token_ids takes at most 64 ids"),
            (
                self.logprobs is None or 0 <= self.logprobs <= 20,
                f"logprobs must be 0 to 20, got {self.logprobs}",
            ),
            (len(self.logit_bias) <= 300, "logit_bias takes at most 300 tokens"),
            (
                all(-100 <= bias <= 100 for _, bias in self.logit_bias),
                "a logit_bias must be between -100 and 100",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)
