"""What peers have to be like to be on somebody's circuits. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from molink.dht.records.records import PeerFacts


@dataclass(frozen=True, slots=True)
class PeerRequirements:
    """Requirements that each peer of a circuit meets, by what it announces; nobody checks whether that is true."""

    gpu: str = ""
    """Part of the name of its GPUs, such as `RTX 4090`, in whatever case; empty: any device."""
    gpu_count: int = 0
    """GPUs that all peers which meet the other requirements have together, at least."""
    memory_bytes: int = 0
    """Of one of its devices, at least."""
    regions: tuple[str, ...] = ()
    """In which it says that it is, in whatever case; empty: anywhere."""

    def met_by(self, facts: PeerFacts) -> bool:
        """Whether that peer may be on a circuit."""
        device = facts.device
        has_gpu = device.kind != "cpu" and self.gpu.casefold() in device.name.casefold()
        is_there = facts.region.casefold() in {region.casefold() for region in self.regions}
        return (
            (has_gpu or not self.gpu)
            and device.memory_bytes >= self.memory_bytes
            and (is_there or not self.regions)
        )

    def missing_gpus(self, peers: Iterable[PeerFacts]) -> int:
        """Returns how many GPUs these peers lack together; 0: none."""
        found = sum(one.device.count for one in peers if one.device.kind != "cpu" and self.met_by(one))
        return max(0, self.gpu_count - found)


ANY_PEER: Final = PeerRequirements()
