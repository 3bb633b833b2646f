"""The parts of a serving peer, as its bootstrap hands them over."""

from dataclasses import dataclass

from molink.dht.node.discovery import Discovery
from molink.dht.records.records import PeerFacts
from molink.peer.announcing.announcer import Announcer
from molink.peer.announcing.placing import PlacementDriver
from molink.peer.host_policy.memory_guard import MemoryGuard
from molink.peer.host_policy.pausing import Pausing
from molink.peer.memory.leases import LeaseBook
from molink.peer.models.model import LocalModel
from molink.peer.profiling.step_times import StepTimes
from molink.peer.ranks.backend import RankedBackend
from molink.peer.reach.reach import Reach
from molink.peer.serving.data_plane import DataPlane


@dataclass(frozen=True, slots=True, eq=False)
class PeerParts:
    """The parts of a serving peer."""

    discovery: Discovery
    model: LocalModel
    leases: LeaseBook
    serving: DataPlane
    announcer: Announcer
    placing: PlacementDriver | None
    """None: the owner has chosen the layers."""
    ranks: RankedBackend | None
    """None: it computes on one device."""
    pausing: Pausing
    memory_guard: MemoryGuard | None
    """None: the device itself refuses more."""
    step_times: StepTimes
    reach: Reach
    base: PeerFacts
    """What it would announce if others can dial it as its owner has set it up."""
