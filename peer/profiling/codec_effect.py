"""What a lossy activation codec does to a model's output, measured on the model itself before anybody is served."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.peer.models.model import LocalModel
from molink.shards import codec
from molink.shards.batching.engine import Engine, Rows
from molink.shards.spec import ModelSpec, Span

WHOLE_MODEL_BYTES = 1 << 30
"""Models of at most so many bytes are measured up to their logits, larger ones after the first layer."""
SAMPLES = 32
SAMPLE_TOKENS = 32
SEED = 20_240_601


@dataclass(frozen=True, slots=True)
class CodecEffect:
    """One codec on one model, on SAMPLES sequences of random tokens, always the same ones."""

    codec: str
    dtype: str
    row_bytes: int
    """One token's activation in the codec."""
    plain_row_bytes: int
    """The same in the model's own numbers."""
    rms_error: float
    """Root mean square of the error over that of the hidden states, after the layers before the one link."""
    samples: int = 0
    """Sequences whose next token was compared; 0: the model was too large to be loaded whole for it."""
    same_tokens: int = 0
    """Those of which the likeliest next token is the same."""
    divergence_nats: float = 0.0
    """Mean Kullback-Leibler divergence of the next token's distribution from the exact one."""

    def __str__(self) -> str:
        saved = 1 - self.row_bytes / self.plain_row_bytes
        line = (
            f"Activation codec {self.codec}: a token takes {self.row_bytes:,} bytes on a link, in {self.dtype} "
            f"{self.plain_row_bytes:,} ({saved:.0%} less); hidden states are off by {self.rms_error:.2%} (RMS)"
        )
        if not self.samples:
            return f"{line} after the first layer"
        return (
            f"{line}; with one such link {self.same_tokens} of {self.samples} next tokens stay the likeliest, "
            f"KL divergence {self.divergence_nats:.1e} nats"
        )


def measure_codec(model: LocalModel, device: str, name: str) -> CodecEffect:
    """Loads the model, or of a large one the first layer, and runs samples with and without the codec.

    The model has at least two layers. Blocks for about a second with a small model; its memory is free again after.

    Raises:
        WeightsError: the layers cannot be fetched or loaded.
    """
    spec = model.spec
    whole = spec.weight_bytes(spec.whole) <= WHOLE_MODEL_BYTES
    front = Span(0, max(1, spec.layers // 2) if whole else 1)
    engine = Engine(spec, device)
    held = spec.whole if whole else front
    engine.attach(model.load(held, device))
    samples = samples_for(spec)
    length = len(samples[0])
    rows = [Rows(engine.new_cache(front, length), length, ids, want_logits=False) for ids in samples]
    hidden = engine.step(front, rows, None).cpu()
    coded = codec.decode(codec.encode(hidden, name), SAMPLES * length, spec.hidden_size, spec.dtype, name)
    effect = CodecEffect(
        codec=name,
        dtype=spec.dtype,
        row_bytes=codec.encoded_bytes(name, 1, spec.hidden_size),
        plain_row_bytes=codec.encoded_bytes(spec.dtype, 1, spec.hidden_size),
        rms_error=relative_rms(hidden, coded),
    )
    if not whole:
        return effect
    exact = _log_probabilities(engine, Span(front.stop, spec.layers), hidden, length)
    other = _log_probabilities(engine, Span(front.stop, spec.layers), coded, length)
    return replace(
        effect,
        samples=SAMPLES,
        same_tokens=int((exact.argmax(-1) == other.argmax(-1)).sum()),
        divergence_nats=max(0.0, float((exact.exp() * (exact - other)).sum(-1).mean())),
    )


def samples_for(spec: ModelSpec) -> list[tuple[int, ...]]:
    """SAMPLES sequences of random tokens, always the same ones for a model."""
    length = max(1, min(SAMPLE_TOKENS, spec.context_length // 2))
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(spec.vocabulary_size, (SAMPLES, length), generator=generator)
    return [tuple(ids) for ids in drawn.tolist()]


def relative_rms(exact: Tensor, coded: Tensor) -> float:
    """Root mean square of the difference, over that of `exact`."""
    size = float(exact.double().norm())
    return float((coded.double() - exact.double()).norm()) / size if size > 0 else 0.0


def _log_probabilities(engine: Engine, back: Span, hidden: Tensor, length: int) -> Tensor:
    """[SAMPLES, vocabulary], of the token after each sample."""
    rows = [Rows(engine.new_cache(back, length), length, None, want_logits=True) for _ in range(SAMPLES)]
    return torch.log_softmax(engine.step(back, rows, hidden).double(), dim=-1).cpu()
