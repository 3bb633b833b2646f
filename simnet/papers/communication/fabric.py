"""Which line is between two ranks: inside a node, between nodes, or anywhere. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from molink.routing.parallelism.layout_prediction import DeviceLink
from molink.routing.parallelism.parallelism import Layout
from molink.simnet.core.matrices import Latencies

NVLINK = DeviceLink(bytes_per_s=360e9, latency_s=3e-6)
"""Fourth generation: 450 GB/s each way by its maker, of which four fifths; a message's start is an estimate."""
NDR400 = DeviceLink(bytes_per_s=45e9, latency_s=6e-6)
"""InfiniBand of 400 Gb/s, one adapter for each device, of which nine tenths; a message's start is an estimate."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """Nodes of equally many devices. Ranks are numbered stage by stage, and placed node by node."""

    name: str
    inside: DeviceLink
    between: DeviceLink
    node_devices: int
    latency_ms: Latencies | None = None
    """Of nodes, where they are far apart; None: every line between them has the latency of `between`."""

    def link(self, source: int, target: int) -> DeviceLink:
        node, other = source // self.node_devices, target // self.node_devices
        if node == other:
            return self.inside
        if self.latency_ms is None:
            return self.between
        return replace(self.between, latency_s=self.latency_ms[node][other] / 1000)

    def slowest(self, layout: Layout) -> DeviceLink:
        """Of those that the layout's devices use."""
        if layout.devices <= self.node_devices:
            return self.inside
        firsts = range(0, layout.devices, self.node_devices)
        links = [self.link(source, target) for source in firsts for target in firsts if source != target]
        return max(links, key=lambda link: link.latency_s)


FABRICS: Mapping[str, Fabric] = MappingProxyType(
    {
        "cardinal": Fabric("cardinal", NVLINK, NDR400, 4),
        "nvlink": Fabric("nvlink", NVLINK, NVLINK, 1),
        "ndr400": Fabric("ndr400", NDR400, NDR400, 1),
    }
)
"""The first is the communication-patterns paper's platform (Table II): four devices a node."""

CHOICES = f"{', '.join(FABRICS)}, or a rate and a one-way delay such as 100mbps,30ms"
_RATE_AND_DELAY = re.compile(r"([0-9.]+)([mg])bps,([0-9.]+)ms")


def fabric_named(text: str) -> Fabric:
    """One of FABRICS, or lines of one rate and delay between all devices.

    Raises:
        ValueError: it is neither; one sentence.
    """
    if text in FABRICS:
        return FABRICS[text]
    found = _RATE_AND_DELAY.fullmatch(text.lower().replace(" ", ""))
    try:
        if found is None:
            raise ValueError("neither a name nor a rate and a delay")
        bits_per_s = float(found[1]) * {"m": 1e6, "g": 1e9}[found[2]]
        link = DeviceLink(bytes_per_s=bits_per_s / 8, latency_s=float(found[3]) / 1000)
    except ValueError as error:
        raise ValueError(f"--network must be {CHOICES}, got {text!r}") from error
    return Fabric(text, link, link, 1)


def tensor_sizes(devices: int) -> tuple[int, ...]:
    """Ranks that can share layers evenly: the powers of two up to so many devices."""
    return tuple(2**power for power in range(int(math.log2(devices)) + 1))
