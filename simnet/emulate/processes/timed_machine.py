"""A machine that nobody has here, as a peer of it would know itself: its device, its profile, its memory."""

from dataclasses import dataclass, replace
from pathlib import Path

from molink.dht.records.records import Device
from molink.peer.compute.backend import Backend
from molink.peer.device.device import describe_device
from molink.peer.profiling.profile import Profile
from molink.peer.serving.artifact_server import ArtifactServer
from molink.simnet.devices.devices import USABLE_MEMORY, DeviceProfile
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.devices.timed_profile import timed_profile
from molink.simnet.emulate.processes.timed_backend import TimedBackend


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What a peer needs of the machine that it runs on."""

    backend: Backend
    artifacts: ArtifactServer
    device: Device
    profile: Profile
    memory_bytes: int


def timed_machine(shape: ModelShape, device: DeviceProfile) -> Machine:
    """A machine with that device, whose time is the profile's."""
    spec = shape.spec()
    return Machine(
        backend=TimedBackend(shape, device),
        artifacts=ArtifactServer(spec.model_hash, b"", Path(), {}),
        device=replace(
            describe_device("cpu"), kind="cuda", name=device.name, memory_bytes=device.memory_bytes
        ),
        profile=timed_profile(shape, device),
        memory_bytes=int(USABLE_MEMORY * device.memory_bytes),
    )
