"""What a lossy activation codec or quantized weights do to a model's output, measured on the model itself before
anybody is served."""

import gc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.peer.memory.memory import format_bytes
from molink.peer.models.model import LocalModel
from molink.shards import codec
from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint.store import describe
from molink.shards.spec import ModelSpec, Span

WHOLE_MODEL_BYTES = 1 << 30
"""Models of at most so many bytes are measured up to their logits, larger ones after the first layer."""
SAMPLES = 32
SAMPLE_TOKENS = 32
SEED = 20_240_601


@dataclass(frozen=True, slots=True)
class OutputError:
    """Error of a model's output on SAMPLES sequences of random tokens, always the same ones."""

    rms: float
    """Root mean square of the error over that of the hidden states."""
    samples: int = 0
    """Sequences whose next token was compared; 0: the model was too large to be loaded whole for it."""
    same_tokens: int = 0
    """Those of which the likeliest next token is the same."""
    divergence_nats: float = 0.0
    """Mean Kullback-Leibler divergence of the next token's distribution from the exact one."""

    @classmethod
    def between(
        cls,
        exact_hidden: Tensor,
        hidden: Tensor,
        exact_logits: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> "OutputError":
        """Compares hidden states of equal shape, and logits [SAMPLES, vocabulary] where both are given."""
        size = float(exact_hidden.double().norm())
        rms = float((hidden.double() - exact_hidden.double()).norm()) / size if size > 0 else 0.0
        if exact_logits is None or logits is None:
            return cls(rms)
        exact, other = (torch.log_softmax(one.double(), dim=-1) for one in (exact_logits, logits))
        same_tokens = int((exact.argmax(-1) == other.argmax(-1)).sum())
        divergence_nats = max(0.0, float((exact.exp() * (exact - other)).sum(-1).mean()))
        return cls(rms, len(exact), same_tokens, divergence_nats)

    @property
    def tokens_line(self) -> str:
        """The part of a sentence that says what becomes of next tokens."""
        return (
            f"{self.same_tokens} of {self.samples} next tokens stay the likeliest, "
            f"KL divergence {self.divergence_nats:.1e} nats"
        )


@dataclass(frozen=True, slots=True)
class CodecEffect:
    """Effect of one activation codec on one model, used on one link in the model's middle."""

    codec: str
    dtype: str
    row_bytes: int
    """One token's activation in the codec."""
    plain_row_bytes: int
    """The same in the model's own numbers."""
    error: OutputError

    def __str__(self) -> str:
        saved, error = 1 - self.row_bytes / self.plain_row_bytes, self.error
        line = (
            f"Activation codec {self.codec}: a token takes {self.row_bytes:,} bytes on a link, in {self.dtype} "
            f"{self.plain_row_bytes:,} ({saved:.0%} less); hidden states are off by {error.rms:.2%} (RMS)"
        )
        return (
            f"{line}; with one such link {error.tokens_line}"
            if error.samples
            else f"{line} after the first layer"
        )


@dataclass(frozen=True, slots=True)
class QuantizationEffect:
    """Effect of one quantization on one model; hidden states are those after the first layer."""

    quantization: str
    dtype: str
    layer_bytes: int
    """All layers together, quantized."""
    plain_layer_bytes: int
    """The same in the dtype."""
    error: OutputError

    def __str__(self) -> str:
        saved, error = 1 - self.layer_bytes / self.plain_layer_bytes, self.error
        line = (
            f"Quantization {self.quantization}: the layers take {format_bytes(self.layer_bytes)}, in {self.dtype} "
            f"{format_bytes(self.plain_layer_bytes)} ({saved:.0%} less); hidden states are off by "
            f"{error.rms:.2%} (RMS) after the first layer"
        )
        return f"{line}; {error.tokens_line}" if error.samples else line


def measure_codec(model: LocalModel, device: str, name: str) -> CodecEffect:
    """Measures a codec: the samples go through the model, or the first layer of a large one, with and without it.

    The model has at least two layers. Blocks for about a second with a small model; its memory is free again after.

    Raises:
        WeightsError: the layers cannot be fetched or loaded.
    """
    spec = model.spec
    whole = _is_loaded_whole(spec)
    front = Span(0, max(1, spec.layers // 2) if whole else 1)
    engine = Engine(spec, device)
    engine.attach(model.load(spec.whole if whole else front, device))
    hidden = _step(engine, front)
    count = SAMPLES * _sample_tokens(spec)
    coded = codec.decode(codec.encode(hidden, name), count, spec.hidden_size, spec.dtype, name)
    logits = [_step(engine, Span(front.stop, spec.layers), one) for one in (hidden, coded)] if whole else ()
    return CodecEffect(
        codec=name,
        dtype=spec.dtype,
        row_bytes=codec.encoded_bytes(name, 1, spec.hidden_size),
        plain_row_bytes=codec.encoded_bytes(spec.dtype, 1, spec.hidden_size),
        error=OutputError.between(hidden, coded, *logits),
    )


def measure_quantization(model: LocalModel, device: str) -> QuantizationEffect:
    """Measures the model's quantization: the samples go through the model, or the first layer of a large one, first in
    its dtype and then quantized.

    Blocks for about a second with a small model; its memory is free again after.

    Raises:
        WeightsError: the layers cannot be loaded.
    """
    spec = model.spec
    plain = describe(model.manifest, spec.dtype, "none", name=spec.name)
    whole = _is_loaded_whole(plain)
    exact_hidden, exact_logits = _outputs(replace(model, spec=plain), device, whole=whole)
    hidden, logits = _outputs(model, device, whole=whole)
    return QuantizationEffect(
        quantization=spec.quantization,
        dtype=spec.dtype,
        layer_bytes=sum(spec.layer_bytes),
        plain_layer_bytes=sum(plain.layer_bytes),
        error=OutputError.between(exact_hidden, hidden, exact_logits, logits),
    )


def _is_loaded_whole(spec: ModelSpec) -> bool:
    return spec.weight_bytes(spec.whole) <= WHOLE_MODEL_BYTES


def _outputs(model: LocalModel, device: str, *, whole: bool) -> tuple[Tensor, Tensor | None]:
    """What follows the first layer, and logits after each sample, if it is to be loaded whole."""
    first = Span(0, 1)
    engine = Engine(model.spec, device)
    engine.attach(model.load(model.spec.whole if whole else first, device))
    hidden = _step(engine, first)
    logits = _step(engine, model.spec.whole) if whole else None
    del engine
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return hidden, logits


def _sample_tokens(spec: ModelSpec) -> int:
    """Tokens of one sample."""
    return max(1, min(SAMPLE_TOKENS, spec.context_length // 2))


def _step(engine: Engine, span: Span, hidden: Tensor | None = None) -> Tensor:
    """The samples, or their hidden states, through the span: hidden states of all rows, or logits after each sample
    where it ends the model."""
    spec, length = engine.spec, _sample_tokens(engine.spec)
    generator = torch.Generator().manual_seed(SEED)
    samples = torch.randint(spec.vocabulary_size, (SAMPLES, length), generator=generator).tolist()
    rows = [
        Rows(
            engine.new_cache(span, length),
            length,
            tuple(ids) if hidden is None else None,
            logit_rows=int(span.stop == spec.layers),
        )
        for ids in samples
    ]
    return engine.step(span, rows, hidden).cpu()
