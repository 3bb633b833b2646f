"""A machine that nobody has here, as a peer of it would know itself: its device, its profile, its memory."""

from dataclasses import dataclass, replace
from pathlib import Path

from molink.dht.records import Device, LayerLatency, PrefillLatency
from molink.peer.backend import Backend
from molink.peer.device import describe_device
from molink.peer.handout import Handout
from molink.peer.profile import Profile
from molink.shards.spec import Span
from molink.simnet.devices import Chunk, DeviceProfile
from molink.simnet.model_shapes import ModelShape
from molink.simnet.timed_backend import TimedBackend

USABLE_MEMORY = 0.9
"""The part of a GPU's memory that a peer takes by default."""
_LOAD_BYTES_PER_S = 2e9
_PROFILED_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_PROFILED_PROMPTS = (64, 128, 256, 512, 1024, 2048)
_PROFILED_CONTEXT = 512


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What a peer needs of the machine that it runs on."""

    backend: Backend
    handout: Handout
    device: Device
    profile: Profile
    memory_bytes: int


def timed_machine(shape: ModelShape, device: DeviceProfile) -> Machine:
    """A machine with that device, whose time is the profile's."""
    spec = shape.spec()
    middle = Span(1, 2) if shape.layers > 2 else Span(0, 1)

    def layer_ms(batch: int) -> float:
        chunks = [Chunk(1, _PROFILED_CONTEXT)] * batch
        return 1000 * (device.compute_s(shape, middle, chunks, 0) - device.step_s)

    def prompt_ms(tokens: int) -> float:
        return 1000 * (device.compute_s(shape, middle, [Chunk(tokens, 0)], 0) - device.step_s)

    last = Span(shape.layers - 1, shape.layers)
    one = [Chunk(1, _PROFILED_CONTEXT)]
    head_s = device.compute_s(shape, last, one, 1) - device.compute_s(shape, last, one, 0)
    profile = Profile(
        layer_latencies=tuple(LayerLatency(batch, layer_ms(batch)) for batch in _PROFILED_BATCHES),
        embed_ms=1000 * device.step_s,
        head_ms=1000 * (head_s + device.step_s),
        load_bytes_per_s=_LOAD_BYTES_PER_S,
        prefill_latencies=tuple(PrefillLatency(tokens, prompt_ms(tokens)) for tokens in _PROFILED_PROMPTS),
    )
    return Machine(
        backend=TimedBackend(shape, device),
        handout=Handout(spec.model_hash, b"", Path(), {}),
        device=replace(
            describe_device("cpu"), kind="cuda", name=device.name, memory_bytes=device.memory_bytes
        ),
        profile=profile,
        memory_bytes=int(USABLE_MEMORY * device.memory_bytes),
    )
