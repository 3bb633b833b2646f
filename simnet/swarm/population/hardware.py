"""The graphics cards that volunteers have at home, and how common each is. Pure.

Memory, its rate and the rate of 16-bit matrix products that accumulate in 32 bits are the maker's; the efficiencies
are those assumed for the RTX 4090 in `devices`. The mix is an assumption, of a swarm of people who play games; nobody
has counted volunteers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from molink.dht.records.records import DeviceProperties
from molink.peer.memory.memory import MemoryPlan, plan_memory
from molink.peer.profiling.profile import Profile
from molink.shards.spec import ModelSpec
from molink.simnet.devices.devices import DEVICES, USABLE_MEMORY, DeviceProfile
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.devices.timed_profile import timed_profile

GIB = 2**30
_BATCH_TOKENS = 512
"""Rows of a step for which a volunteer sets memory aside."""


def _card(name: str, memory_gib: int, gb_per_s: float, tflops: float) -> DeviceProfile:
    """Launch overheads and efficiencies as of the RTX 4090."""
    known = DEVICES["rtx-4090"]
    return DeviceProfile(
        name=name,
        memory_bytes=memory_gib * GIB,
        memory_bytes_per_s=gb_per_s * 1e9,
        flops_per_s=tflops * 1e12,
        memory_efficiency=known.memory_efficiency,
        compute_efficiency=known.compute_efficiency,
        half_rate_rows=known.half_rate_rows,
        layer_s=known.layer_s,
        step_s=known.step_s,
    )


CARDS: Mapping[str, DeviceProfile] = MappingProxyType(
    {
        "rtx-4090": DEVICES["rtx-4090"],
        "rtx-3090": _card("NVIDIA GeForce RTX 3090", 24, 936, 71),
        "rtx-4080": _card("NVIDIA GeForce RTX 4080", 16, 717, 97.5),
        "rtx-4060-ti-16gb": _card("NVIDIA GeForce RTX 4060 Ti", 16, 288, 44),
        "rtx-4070": _card("NVIDIA GeForce RTX 4070", 12, 504, 58),
        "rtx-3060": _card("NVIDIA GeForce RTX 3060", 12, 360, 25.5),
        "rtx-4060": _card("NVIDIA GeForce RTX 4060", 8, 272, 30),
    }
)
MIX: Mapping[str, float] = MappingProxyType(
    {
        "rtx-4090": 0.08,
        "rtx-3090": 0.10,
        "rtx-4080": 0.10,
        "rtx-4060-ti-16gb": 0.07,
        "rtx-4070": 0.20,
        "rtx-3060": 0.27,
        "rtx-4060": 0.18,
    }
)
"""What part of the volunteers has which card; the parts add up to 1."""


@dataclass(frozen=True, slots=True, eq=False)
class CardKind:
    """A kind of card, as a peer that serves one model knows it."""

    name: str
    device: DeviceProperties
    profile: Profile
    memory: MemoryPlan


def kinds_of(shape: ModelShape, spec: ModelSpec) -> tuple[CardKind, ...]:
    """One for each card on which at least a layer of the model fits, in the order of `CARDS`.

    Raises:
        ValueError: it fits on none.
    """
    kinds = []
    for name, card in CARDS.items():
        try:
            memory = plan_memory(spec, int(USABLE_MEMORY * card.memory_bytes), _BATCH_TOKENS)
        except ValueError:
            continue
        device = DeviceProperties("cuda", card.name, 1, card.memory_bytes, "Linux x86_64", 8)
        kinds.append(CardKind(name, device, timed_profile(shape, card), memory))
    if not kinds:
        raise ValueError(f"not a single layer of {shape.name} fits on any of the cards {', '.join(CARDS)}")
    return tuple(kinds)
