"""How long devices take for a step, estimated from what they can do at most: a roofline (Williams et al., 2009). Pure.

A step reads every weight of its span once, whatever the batch, and the keys and values of every sequence in it; and it
multiplies. Reading and multiplying overlap: the slower of the two counts, for the matrices and for attention each.
The rates are the maker's; the efficiencies are one estimate for each device, never fitted to a result. Nobody has
measured a device for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from molink.shards.spec import Span
from molink.simnet.model_shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one sequence adds to a step: one row of a decode, or some of a prefill."""

    rows: int
    context: int
    """Tokens in its cache before."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.context < 0:
            raise ValueError(f"a chunk has at least one row and no negative context, got {self}")


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device as a roofline."""

    name: str
    """As people call it."""
    memory_bytes: int
    memory_bytes_per_s: float
    """The maker's."""
    flops_per_s: float
    """The maker's, of dense 16-bit matrix products that accumulate in 32 bits, without sparsity."""
    memory_efficiency: float
    """The part of the memory's rate that a step sees."""
    compute_efficiency: float
    """The part of flops_per_s that a product of very many rows sees."""
    half_rate_rows: float
    """Rows with which a product reaches half of that: small ones leave units idle."""
    layer_s: float
    """For each layer besides: launches that nothing hides."""
    step_s: float
    """For each step besides: scheduling, and activations to and from the device."""

    def __post_init__(self) -> None:
        positive = (self.memory_bytes, self.memory_bytes_per_s, self.flops_per_s)
        if not min(positive) > 0 or not min(self.half_rate_rows, self.layer_s, self.step_s) >= 0:
            raise ValueError(f"memory and rates must be positive and overheads not negative: {self}")
        if not (0 < self.memory_efficiency <= 1 and 0 < self.compute_efficiency <= 1):
            raise ValueError(f"efficiencies must be above 0 and at most 1: {self}")

    def compute_s(self, shape: ModelShape, span: Span, chunks: Sequence[Chunk], sampled: int) -> float:
        """Seconds for one step of `chunks` through `span`.

        `sampled` is how many sequences draw a token after it; it counts only where the span ends the model.

        Raises:
            ValueError: no chunk, a span beyond the model, or a negative `sampled`.
        """
        if not chunks or span.stop > shape.layers or sampled < 0:
            raise ValueError(f"{len(chunks)} chunks, {sampled} sampled, {span} of {shape.layers} layers")
        rows = sum(chunk.rows for chunk in chunks)
        matrices_s = self._product_s(shape.layer_parameters, shape.element_bytes, rows)
        seconds = self.step_s + len(span) * (self.layer_s + matrices_s + self._attention_s(shape, chunks))
        if span.start == 0:
            seconds += rows * shape.activation_bytes / self._bytes_per_s
        if span.stop == shape.layers and sampled:
            seconds += self._product_s(shape.head_parameters, shape.element_bytes, sampled)
        return seconds

    @property
    def _bytes_per_s(self) -> float:
        return self.memory_bytes_per_s * self.memory_efficiency

    def _product_s(self, parameters: int, element_bytes: int, rows: int) -> float:
        """Rows times matrices of so many parameters: 2 operations for each, in tiles that few rows do not fill."""
        reading_s = parameters * element_bytes / self._bytes_per_s
        best_s = (
            2.0 * parameters * (rows + self.half_rate_rows) / (self.flops_per_s * self.compute_efficiency)
        )
        return max(reading_s, best_s)

    def _attention_s(self, shape: ModelShape, chunks: Sequence[Chunk]) -> float:
        """Of one layer: every row attends to the context before it and to the rows of its own chunk up to itself."""
        tokens = attended = 0
        for chunk in chunks:
            rows, context = chunk.rows, chunk.context
            tokens += context + rows
            attended += rows * context + rows * (rows + 1) // 2
        reading_s = tokens * shape.kv_bytes_per_token / self._bytes_per_s
        operations = 4.0 * attended * shape.heads * shape.head_dim
        return max(reading_s, operations / (self.flops_per_s * self.compute_efficiency))


DEVICES: Mapping[str, DeviceProfile] = MappingProxyType(
    {
        "rtx-4090": DeviceProfile(
            name="NVIDIA GeForce RTX 4090",
            memory_bytes=24 * 2**30,
            memory_bytes_per_s=1008e9,
            flops_per_s=165.2e12,
            memory_efficiency=0.85,
            compute_efficiency=0.75,
            half_rate_rows=32.0,
            layer_s=10e-6,
            step_s=500e-6,
        ),
    }
)
"""By the name that commands take. NVIDIA's Ada architecture paper gives the 4090's 1008 GB/s and 165.2 TFLOP/s with
FP32 accumulation; 330.3 is with FP16 accumulation or sparsity."""
