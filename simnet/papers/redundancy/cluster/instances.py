"""What an instance of the redundancy paper computes, and how long that takes: four accelerators, one model. Pure.

Tensor parallelism: every rank reads and multiplies its part of each matrix and of each key and value, and two
all-reduces in each layer make up the whole. One estimate for each device, whatever the workload or the policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from molink.routing.parallelism.volumes import all_reduce_factor
from molink.shards.spec import Span
from molink.simnet.devices.devices import DEVICES, DeviceProfile, Work
from molink.simnet.devices.model_shapes import MODEL_SHAPES, ModelShape

RANKS = 4
USABLE_MEMORY = 0.9
"""The part that weights, keys and values may take: vLLM's default."""
SEQUENCE_MS = 7.2 / 20
"""What each sequence adds to a step beside its rows: the paper's Figure 5 gives 7.2 ms for 20 more, at any length. A
roofline has no such term (it gives 0.3 ms for the keys and values of 20): an engine of the time spends it in Python."""


@dataclass(frozen=True, slots=True)
class LocalConnection:
    """Between the accelerators of an instance."""

    bytes_per_s: float
    """Of one accelerator, in one direction: half of what Table 1 prints, which makers count both ways."""
    all_reduce_s: float
    """Before the first byte of an all-reduce: an estimate."""


def _accelerator(device: str, name: str, memory_gib: int) -> DeviceProfile:
    """As the paper's Table 1 has it, with an engine that records its kernels and the same efficiencies for both."""
    return replace(
        DEVICES[device],
        name=name,
        memory_bytes=memory_gib * 2**30,
        memory_efficiency=0.8,
        compute_efficiency=0.5,
        half_rate_rows=64.0,
        layer_s=10e-6,
        step_s=500e-6,
    )


ACCELERATORS: Mapping[str, DeviceProfile] = MappingProxyType(
    {
        "h100": _accelerator("h100", "NVIDIA H100 SXM5", 80),
        "910b2": _accelerator("910b2", "Huawei Ascend 910B2", 64),
    }
)
"""Those of the paper. The H100 of `molink.simnet.devices.devices` is as another paper measured it, without recorded
kernels."""
LOCAL_CONNECTIONS: Mapping[str, LocalConnection] = MappingProxyType(
    {"h100": LocalConnection(450e9, 10e-6), "910b2": LocalConnection(196e9, 10e-6)}
)
"""By the device's name."""


@dataclass(frozen=True, slots=True)
class InstanceProfile:
    """An instance that holds a whole model."""

    device: DeviceProfile
    local: LocalConnection
    shape: ModelShape
    rank: ModelShape
    """What one rank has of it."""
    sequence_s: float
    """For each sequence of a step besides."""

    @property
    def weight_bytes(self) -> int:
        """Of the whole model."""
        layers = sum(map(self.shape.layer_parameters, range(self.shape.layers)))
        ends = self.shape.embed_parameters + self.shape.head_parameters
        return (layers + ends) * self.shape.element_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return self.shape.layers * self.shape.kv_bytes_per_token

    @property
    def capacity_tokens(self) -> int:
        """Whose keys and values fit beside the weights."""
        usable = int(RANKS * self.device.memory_bytes * USABLE_MEMORY) - self.weight_bytes
        return usable // self.kv_token_bytes

    def step_s(self, work: Work, sequences: int) -> float:
        """Seconds for a step of so many sequences, each of which draws a token."""
        computing_s = self.device.work_s(self.rank, Span(0, self.shape.layers), work, sequences)
        payload_bytes = work.rows * self.shape.activation_bytes * all_reduce_factor(RANKS)
        reducing_s = self.local.all_reduce_s + payload_bytes / self.local.bytes_per_s
        return computing_s + 2 * self.shape.layers * reducing_s + sequences * self.sequence_s


def instance_profile(device: str, sequence_ms: float = SEQUENCE_MS) -> InstanceProfile:
    """An instance of Llama-2-70B on four of that device.

    Raises:
        ValueError: Table 1 has no such device, or the time is negative.
    """
    if device not in LOCAL_CONNECTIONS:
        raise ValueError(f"--device {device} is not in the paper: choose from {', '.join(LOCAL_CONNECTIONS)}")
    if not sequence_ms >= 0:
        raise ValueError(f"--sequence-ms must not be negative, got {sequence_ms:g}")
    shape = MODEL_SHAPES["llama-2-70b"]
    return InstanceProfile(
        ACCELERATORS[device], LOCAL_CONNECTIONS[device], shape, _rank(shape, RANKS), sequence_ms / 1000
    )


def _rank(shape: ModelShape, ranks: int) -> ModelShape:
    """Heads, MLP and vocabulary are cut; the norms are not."""
    return replace(
        shape,
        name=f"{shape.name}, one of {ranks} ranks",
        intermediate_size=shape.intermediate_size // ranks,
        heads=shape.heads // ranks,
        kv_heads=shape.kv_heads // ranks,
        vocabulary_size=shape.vocabulary_size // ranks,
    )
