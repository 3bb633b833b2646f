"""What quantized weights do to a model's output, measured on the model itself before anybody is served."""

import gc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.peer.memory.memory import format_bytes
from molink.peer.models.model import LocalModel
from molink.peer.profiling.codec_effect import SAMPLES, WHOLE_MODEL_BYTES, relative_rms, samples_for
from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint.store import describe
from molink.shards.spec import ModelSpec, Span


@dataclass(frozen=True, slots=True)
class QuantizationEffect:
    """One quantization of one model, on SAMPLES sequences of random tokens, always the same ones."""

    quantization: str
    dtype: str
    layer_bytes: int
    """All layers together, quantized."""
    plain_layer_bytes: int
    """The same in the dtype."""
    rms_error: float
    """Root mean square of the error over that of the hidden states, after the first layer."""
    samples: int = 0
    """Sequences whose next token was compared; 0: the model was too large to be loaded whole for it."""
    same_tokens: int = 0
    """Those of which the likeliest next token is the same."""
    divergence_nats: float = 0.0
    """Mean Kullback-Leibler divergence of the next token's distribution from the unquantized model's."""

    def __str__(self) -> str:
        saved = 1 - self.layer_bytes / self.plain_layer_bytes
        line = (
            f"Quantization {self.quantization}: the layers take {format_bytes(self.layer_bytes)}, in {self.dtype} "
            f"{format_bytes(self.plain_layer_bytes)} ({saved:.0%} less); hidden states are off by "
            f"{self.rms_error:.2%} (RMS) after the first layer"
        )
        if not self.samples:
            return line
        return (
            f"{line}; {self.same_tokens} of {self.samples} next tokens stay the likeliest, "
            f"KL divergence {self.divergence_nats:.1e} nats"
        )


def measure_quantization(model: LocalModel, device: str) -> QuantizationEffect:
    """Loads the model, or of a large one the first layer, first in its dtype and then quantized, and runs samples.

    Blocks for about a second with a small model; its memory is free again after.

    Raises:
        WeightsError: the layers cannot be loaded.
    """
    spec = model.spec
    plain = describe(model.manifest, spec.dtype, "none", name=spec.name)
    whole = plain.weight_bytes(plain.whole) <= WHOLE_MODEL_BYTES
    exact_hidden, exact = _outputs(model, plain, device, whole=whole)
    hidden, quantized = _outputs(model, spec, device, whole=whole)
    compared = 0 if exact is None or quantized is None else SAMPLES
    same_tokens, divergence_nats = 0, 0.0
    if exact is not None and quantized is not None:
        same_tokens = int((exact.argmax(-1) == quantized.argmax(-1)).sum())
        divergence_nats = max(0.0, float((exact.exp() * (exact - quantized)).sum(-1).mean()))
    return QuantizationEffect(
        quantization=spec.quantization,
        dtype=spec.dtype,
        layer_bytes=sum(spec.layer_bytes),
        plain_layer_bytes=sum(plain.layer_bytes),
        rms_error=relative_rms(exact_hidden, hidden),
        samples=compared,
        same_tokens=same_tokens,
        divergence_nats=divergence_nats,
    )


def _outputs(model: LocalModel, spec: ModelSpec, device: str, *, whole: bool) -> tuple[Tensor, Tensor | None]:
    """What follows the first layer, and log-probabilities [SAMPLES, vocabulary] of the token after each sample."""
    first = Span(0, 1)
    held = spec.whole if whole else first
    engine = Engine(spec, device)
    engine.attach(replace(model, spec=spec).load(held, device))
    hidden = _step(engine, first)
    logits = _step(engine, spec.whole) if whole else None
    del engine
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return hidden, None if logits is None else torch.log_softmax(logits.double(), dim=-1)


def _step(engine: Engine, span: Span) -> Tensor:
    """The samples through the span: hidden states of all rows, or logits after each sample where it ends the model."""
    samples = samples_for(engine.spec)
    length = len(samples[0])
    ends = span == engine.spec.whole
    rows = [Rows(engine.new_cache(span, length), length, ids, want_logits=ends) for ids in samples]
    return engine.step(span, rows, None).cpu()
