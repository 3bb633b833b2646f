"""How long devices take for a step, estimated from what they can do at most: a roofline (Williams et al., 2009). Pure.

A step reads every weight of its span once, whatever the batch, and the keys and values of every sequence in it; and it
multiplies. Reading and multiplying overlap: the slower of the two counts, for the matrices and for attention each.
The rates are the maker's. Where a paper prints times of layers, efficiencies and overheads follow from them; elsewhere
they are one estimate for each device, and nobody has measured one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from molink.shards.spec import Span
from molink.simnet.devices.model_shapes import ModelShape

USABLE_MEMORY = 0.9
"""The part of a GPU's memory that a peer takes by default."""


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """What one sequence adds to a step: one row of a decode, or some of a prefill."""

    rows: int
    context: int
    """Tokens in its cache before."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.context < 0:
            raise ValueError(f"a chunk has at least one row and no negative context, got {self}")


class Work(NamedTuple):
    """What all chunks of a step add up to."""

    rows: int
    tokens: int
    """In the caches afterwards: what attention reads."""
    attended: int
    """Pairs of a row and a token that it attends to: those before it and itself."""


def work_of(chunks: Sequence[SequenceChunk]) -> Work:
    """Their sum."""
    return Work(
        sum(chunk.rows for chunk in chunks),
        sum(chunk.context + chunk.rows for chunk in chunks),
        sum(chunk.rows * chunk.context + chunk.rows * (chunk.rows + 1) // 2 for chunk in chunks),
    )


class StepParts(NamedTuple):
    """What a step takes on a device whatever its contexts are, and what these add."""

    layers: int
    layers_s: float
    """Their matrices, all together."""
    embedding_s: float
    head_s: float
    """Both 0 where there is none."""
    kv_bytes_per_token: int
    attention_operations: int
    """Both of one layer."""
    bytes_per_s: float
    flops_per_s: float
    """What the device reaches."""


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
    """For each layer, and for the head, besides: launches that nothing hides."""
    step_s: float
    """For each step besides: scheduling, and activations to and from the device."""

    def __post_init__(self) -> None:
        positive = (self.memory_bytes, self.memory_bytes_per_s, self.flops_per_s)
        if not min(positive) > 0 or not min(self.half_rate_rows, self.layer_s, self.step_s) >= 0:
            raise ValueError(f"memory and rates must be positive and overheads not negative: {self}")
        if not (0 < self.memory_efficiency <= 1 and 0 < self.compute_efficiency <= 1):
            raise ValueError(f"efficiencies must be above 0 and at most 1: {self}")

    def compute_s(
        self, shape: ModelShape, span: Span, chunks: Sequence[SequenceChunk], sampled: int
    ) -> float:
        """Seconds for one step of `chunks` through `span`.

        `sampled` is how many sequences draw a token after it; it counts only where the span ends the model.

        Raises:
            ValueError: no chunk, a span beyond the model, or a negative `sampled`.
        """
        return self.work_s(shape, span, work_of(chunks), sampled)

    def work_s(self, shape: ModelShape, span: Span, work: Work, sampled: int) -> float:
        """The same of chunks that were added up before.

        Raises:
            ValueError: as `compute_s`.
        """
        return self.parts_s(self.without_contexts(shape, span, work.rows, sampled), work)

    def without_contexts(self, shape: ModelShape, span: Span, rows: int, sampled: int) -> StepParts:
        """What a step takes whatever its contexts are.

        Raises:
            ValueError: as `compute_s`.
        """
        if rows < 1 or span.stop > shape.layers or sampled < 0:
            raise ValueError(f"chunks of {rows} rows, {sampled} sampled, {span} of {shape.layers} layers")
        layers_s = (
            len(span) * self._layer_s(shape, span.start, rows)
            if shape.experts is None
            else sum(self._layer_s(shape, layer, rows) for layer in span)
        )
        embedding_s = head_s = 0.0
        if span.start == 0:
            embedding_s = rows * shape.activation_bytes / self._bytes_per_s
        if span.stop == shape.layers and sampled:
            head = shape.head_parameters
            head_s = self.layer_s + self._product_s(head, sampled * head, shape.element_bytes)
        return StepParts(
            len(span),
            layers_s,
            embedding_s,
            head_s,
            shape.kv_bytes_per_token,
            shape.attention_operations,
            self._bytes_per_s,
            self.flops_per_s * self.compute_efficiency,
        )

    def parts_s(self, parts: StepParts, work: Work) -> float:
        """Seconds of a step with contexts. Of one layer every row attends to the context before it and to the rows of
        its own chunk up to itself."""
        layers, layers_s, embedding_s, head_s, kv_bytes, operations, bytes_per_s, flops_per_s = parts
        reading_s = work.tokens * kv_bytes / bytes_per_s
        best_s = float(work.attended * operations) / flops_per_s
        attention_s = self.layer_s + (reading_s if reading_s > best_s else best_s)
        return self.step_s + layers_s + layers * attention_s + embedding_s + head_s

    @property
    def _bytes_per_s(self) -> float:
        return self.memory_bytes_per_s * self.memory_efficiency

    def _layer_s(self, shape: ModelShape, layer: int, rows: int) -> float:
        """Of its matrices. Experts read are those that the rows draw; each row is multiplied by its own."""
        read = shape.read_parameters(layer, rows)
        return self._product_s(read, rows * shape.row_parameters(layer), shape.element_bytes)

    def _product_s(self, read: float, multiplied: float, element_bytes: int) -> float:
        """Matrices of `read` parameters, by which rows are multiplied: in all `multiplied`, rows times parameters.

        2 operations for each, in tiles that few rows do not fill: those cost as if every matrix had some rows more.
        """
        reading_s = read * element_bytes / self._bytes_per_s
        best_s = (
            2.0 * (multiplied + read * self.half_rate_rows) / (self.flops_per_s * self.compute_efficiency)
        )
        return max(reading_s, best_s)


_GB, _GIB = 10**9, 2**30
_TABLE_2_LAYER_BYTES, _TABLE_2_HEAD_BYTES = 2 * 855_654_400, 2 * 262_152_192
"""Of llama-2-70b in FP16: one layer, and the language-model head with its norm."""
_FIGURE_4_MS, _FIGURE_4_LAYERS = 30.6, 40
"""Of the decentralized-scheduling paper: one row through the first layers of llama-2-70b on an H100."""


def _estimated(name: str, memory_bytes: int, bytes_per_s: float, flops_per_s: float) -> DeviceProfile:
    """A device of which only the maker's rates are known: as an engine with fused and recorded kernels has it."""
    return DeviceProfile(
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        memory_efficiency=0.85,
        compute_efficiency=0.75,
        half_rate_rows=32.0,
        layer_s=10e-6,
        step_s=500e-6,
    )


def _as_table_2(device: DeviceProfile, embed_ms: float, layer_ms: float, head_ms: float) -> DeviceProfile:
    """A device for which the decentralized-scheduling paper's Table 2 prints times of one token of llama-2-70b.

    A layer reads more than the head and takes longer: both differences give the rate that memory reaches. What is left
    of both is launches, 0.14 to 0.21 ms on the three devices, as of an engine that launches each kernel from Python.
    """
    bytes_per_s = 1000 * (_TABLE_2_LAYER_BYTES - _TABLE_2_HEAD_BYTES) / (layer_ms - head_ms)
    return replace(
        device,
        memory_efficiency=bytes_per_s / device.memory_bytes_per_s,
        layer_s=layer_ms / 1000 - _TABLE_2_LAYER_BYTES / bytes_per_s,
        step_s=embed_ms / 1000,
    )


def _as_figure_4(device: DeviceProfile) -> DeviceProfile:
    """The H100 for which that paper prints 30.6 ms of 40 layers, launches being what reading leaves of them."""
    step_s = 0.074e-3
    layer_s = (_FIGURE_4_MS / 1000 - step_s) / _FIGURE_4_LAYERS
    reading_s = _TABLE_2_LAYER_BYTES / (device.memory_bytes_per_s * device.memory_efficiency)
    return replace(device, layer_s=layer_s - reading_s, step_s=step_s)


_A100 = _estimated("NVIDIA A100 80GB SXM", 80 * _GB, 2039e9, 312e12)
_RTX_3090 = _estimated("NVIDIA GeForce RTX 3090", 24 * _GIB, 936e9, 71e12)
_A10G = _estimated("NVIDIA A10G", 24 * _GB, 600e9, 70e12)
_H100 = _estimated("NVIDIA H100 80GB SXM", 80 * _GB, 3.35e12, 989e12)
_LAPTOP = DeviceProfile(
    name="laptop CPU",
    memory_bytes=16 * _GIB,
    memory_bytes_per_s=83.2e9,
    flops_per_s=1.0e12,
    memory_efficiency=0.6,
    compute_efficiency=0.5,
    half_rate_rows=2.0,
    layer_s=50e-6,
    step_s=500e-6,
)

DEVICES: Mapping[str, DeviceProfile] = MappingProxyType(
    {
        "rtx-3060": _estimated("NVIDIA GeForce RTX 3060", 12 * _GIB, 360e9, 25.5e12),
        "rtx-3080": _estimated("NVIDIA GeForce RTX 3080", 10 * _GIB, 760e9, 59.5e12),
        "rtx-3090": _as_table_2(_RTX_3090, embed_ms=0.062, layer_ms=2.177, head_ms=0.785),
        "rtx-4060": _estimated("NVIDIA GeForce RTX 4060", 8 * _GIB, 272e9, 30.2e12),
        "rtx-4070": _estimated("NVIDIA GeForce RTX 4070", 12 * _GIB, 504e9, 58.3e12),
        "rtx-4090": _estimated("NVIDIA GeForce RTX 4090", 24 * _GIB, 1008e9, 165.2e12),
        "a10g": _as_table_2(_A10G, embed_ms=0.098, layer_ms=3.748, head_ms=1.293),
        "a100-80": _as_table_2(_A100, embed_ms=0.074, layer_ms=1.211, head_ms=0.471),
        "h20-96": _estimated("NVIDIA H20 96GB", 96 * _GB, 4.0e12, 148e12),
        "h100": _as_figure_4(_H100),
        "h100-94": _estimated("NVIDIA H100 94GB HBM2e", 94 * _GB, 2.46e12, 989e12),
        "910b2": _estimated("Huawei Ascend 910B2", 64 * _GB, 1.8e12, 400e12),
        "laptop-cpu": _LAPTOP,
    }
)
"""By the name that commands take. Where the rates are from:

- RTX 30 and 40: NVIDIA's Ampere GA102 and Ada architecture papers, FP16 products with FP32 accumulation (the 4090's
  330.3 TFLOP/s are with FP16 accumulation or sparsity); of the smaller ones twice their FP32 rate, as of the larger.
- A100, A10G, H20: NVIDIA's data sheets. H100 and 910B2: the redundancy paper's Table 1.
- The H100 of 94 GB is the communication-patterns paper's (Table II: HBM2e); its bandwidth is an estimate from six
  stacks of 3.2 Gb/s a pin.
- The laptop is nobody's: eight cores, two channels of DDR5-5200.

Times of layers are the decentralized-scheduling paper's on the RTX 3090, A10G, A100 and (at one row) H100, and include
launches from Python, which engines that record their kernels do not pay. All others are rooflines.
"""
